"""Modules without values: each rank fills in what it keeps, once it is known what that is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.networks.construction import Construction
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.replicas import Replicas
from lightning_tspipe.runtime.weights.ownership import named_tensors, put


class Source(Protocol):
    """A checkpoint of which parts can be read."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the parameters and buffers that it holds."""

    def tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        """Some parameters and buffers, on the CPU."""

    def optimizer_groups(
        self, index: int, groups: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """The parameter groups of an optimizer, in the form of its own."""

    def optimizer_state(
        self, index: int, names: Sequence[str], wanted: Collection[str]
    ) -> dict[str, dict[str, Any]]:
        """What an optimizer kept for some of its parameters, of which all are named in order."""

    def gradients(self, wanted: Collection[str]) -> list[dict[str, Tensor]]:
        """What each replica had accumulated for some parameters, if it is kept apart."""


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
