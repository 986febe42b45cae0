"""Modules without values: each rank fills in what it keeps, as built or from a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.moving import put
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.replicas import Replicas
from lightning_tspipe.runtime.weights.construction import Construction
from lightning_tspipe.runtime.weights.ownership import named_tensors

GRADIENTS = "lightning_tspipe_gradients"
"""Accumulated gradients, by replica and name; each rank writes its own."""

Group = dict[str, Any]
Place = tuple[Any, ...]
"""A path through what a checkpoint holds: ``("model", NAME)``, ``("optimizer_0", "state",
PARAMETER, KEY)``, ``("optimizer_0", "param_groups", NUMBER, KEY)``, and below ``GRADIENTS``."""


class Source(ABC):
    """A checkpoint of which a rank reads only its part: some of its values at a time."""

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the parameters and buffers."""

    @property
    @abstractmethod
    def places(self) -> Iterable[Place]:
        """Where there are values."""

    @abstractmethod
    def read(self, place: Place) -> Any:
        """A tensor, on the CPU, or a value."""

    def _below(self, *start: str) -> dict[Place, Place]:
        """The places that begin so, by the rest of each."""
        number = len(start)
        return {place[number:]: place for place in self.places if place[:number] == start}

    def tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        """Some parameters and buffers, on the CPU."""
        return {name: self.read(("model", name)) for name in names}

    def optimizer_groups(self, index: int, groups: Sequence[Group]) -> list[Group]:
        """The parameter groups of an optimizer, with the parameters of its own.

        Raises:
            ConfigurationError: There are more or fewer in the checkpoint.
        """
        saved: dict[int, Group] = {}
        for place in self._below(f"optimizer_{index}", "param_groups").values():
            group = saved.setdefault(place[2], {})
            if len(place) == 4:  # else of a value that torch takes apart: the own one stays
                group[place[3]] = place
        if not saved:  # it was made before there were optimizers
            return list(groups)
        if len(saved) != len(groups):
            raise ConfigurationError(
                f"optimizer {index} has {len(groups)} parameter groups, but {len(saved)} in the "
                "checkpoint. Configure as many as the run that saved it"
            )
        return [
            {**group, **{k: self.read(v) for k, v in saved[number].items() if k != "params"}}
            for number, group in enumerate(groups)
        ]

    def optimizer_state(
        self, index: int, names: Sequence[str], wanted: Collection[str]
    ) -> dict[str, dict[str, Any]]:
        """What an optimizer kept for some of its parameters, of which all are named in order."""
        found: dict[str, dict[str, Any]] = {}
        for (key, what, *_), place in self._below(f"optimizer_{index}", "state").items():
            name = names[key] if isinstance(key, int) else key
            if name in wanted:
                found.setdefault(name, {})[what] = self.read(place)
        return found

    def gradients(self, wanted: Collection[str]) -> list[dict[str, Tensor]]:
        """What each replica had accumulated for some parameters, if it is kept apart."""
        found: dict[str, dict[str, Any]] = {}
        for (replica, name), place in self._below(GRADIENTS).items():
            if name in wanted:
                found.setdefault(replica, {})[name] = self.read(place)
        return [found[replica] for replica in sorted(found, key=int)]


@dataclass(eq=False)
class Materializer:
    """The values of a module that was built on the meta device.

    Attributes:
        module: The module.
        construction: How it was built.
        source: A checkpoint to take values from.
    """

    module: nn.Module
    construction: Construction
    source: Source | None = None
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def agree(self, transport: Transport, replicas: Replicas) -> None:
        """All ranks take the random state in which the first loss rank built the module."""
        states = self.construction.random_states
        if transport.rank == LOSS_RANK:
            states = replicas.broadcast(states)
        states = transport.broadcast_object(states, LOSS_RANK)
        if len(states) != len(self.construction.random_states):
            raise ConfigurationError(
                "configure_model did different things on different ranks: build the same modules "
                "on all of them"
            )
        self.construction.random_states = states

    def fill(self, keep: Callable[[str], bool]) -> None:
        """Give values to the parameters and buffers that this rank keeps and that have none.

        Args:
            keep: Says of a name whether to keep it.

        Raises:
            ConfigurationError: It is not known how one of them gets its values.
        """
        missing = {n: t for n, t in named_tensors(self.module) if t.is_meta and keep(n)}
        values: dict[str, Tensor] = {}
        if self.source is not None:
            values = self.source.tensors(missing.keys() & set(self.source.shapes))
        built = [name for name in missing if name not in values]
        self._check_known({name: missing[name] for name in built})
        made = self.construction.values([missing[name] for name in built])
        values |= dict(zip(built, made, strict=True))
        for name, tensor in missing.items():
            self._undo.append(put(self.module, tensor, values.pop(name)))

    def fill_attributes(self) -> None:
        """Give values to tensors that modules have as plain attributes; every rank keeps them."""
        for module in self.module.modules():
            for key, value in vars(module).items():
                if type(value) is Tensor and value.is_meta and self.construction.knows(value):
                    module.__dict__[key] = self.construction.values([value])[0]

    def drop(self) -> None:
        """Take the values back, as if there had never been any."""
        while self._undo:
            self._undo.pop()()

    def done(self) -> None:
        """This rank has all that it will ever keep."""
        self._undo.clear()
        self.construction.forget()

    def _check_known(self, tensors: dict[str, Tensor]) -> None:
        unknown = [n for n, tensor in tensors.items() if not self.construction.knows(tensor)]
        if unknown:
            owner = self.module.get_submodule(unknown[0].rpartition(".")[0])
            raise ConfigurationError(
                f"{unknown[0]!r} (of a {type(owner).__name__}) is on the meta device, and nothing "
                f"says which values it gets ({len(unknown)} such tensors). Build the module in "
                "configure_model or under trainer.init_module(empty_init=True), or give a "
                "checkpoint that has them: trainer.fit(ckpt_path=...)"
            )


def is_on_meta(module: nn.Module) -> bool:
    """Whether a part of a module has no values."""
    return any(tensor.is_meta for _, tensor in named_tensors(module))
