"""Checkpoints of which a rank reads only its part: values, by their places.

A place is a path through what a checkpoint holds: ``("model", NAME)``, ``("optimizer_0", "state",
PARAMETER, KEY)``, ``("optimizer_0", "param_groups", NUMBER, KEY)``, and ``GRADIENTS``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_tspipe.errors import ConfigurationError

GRADIENTS = "lightning_tspipe_gradients"
"""Accumulated gradients, by replica and name; each rank writes its own."""

Group = dict[str, Any]
Place = tuple[Any, ...]


class PartialSource(ABC):
    """A checkpoint, which is asked for some of its values at a time."""

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
                f"optimizer {index} has {len(groups)} parameter groups, and {len(saved)} in the "
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


class FileSource(PartialSource):
    """An ordinary Lightning checkpoint, of which tensors may be mapped to its file.

    Those that are taken are copied: the file may be replaced while the training goes on.

    Args:
        checkpoint: The checkpoint. Hooks may change it before it is asked.
    """

    def __init__(self, checkpoint: dict[str, Any]) -> None:
        self._checkpoint = checkpoint

    @property
    @override
    def shapes(self) -> dict[str, tuple[int, ...]]:
        state = self._checkpoint["state_dict"]
        return {name: tuple(tensor.shape) for name, tensor in state.items()}

    @property
    def _optimizers(self) -> dict[str, Any]:
        states = self._checkpoint.get("optimizer_states", [])
        return {f"optimizer_{index}": state for index, state in enumerate(states)}

    @property
    @override
    def places(self) -> Iterable[Place]:
        for root, state in self._optimizers.items():
            for key, values in state["state"].items():
                yield from ((root, "state", key, what) for what in values)
            for number, group in enumerate(state["param_groups"]):
                yield from ((root, "param_groups", number, what) for what in group)

    @override
    def read(self, place: Place) -> Any:
        root, *path = place
        within = self._checkpoint["state_dict"] if root == "model" else self._optimizers[root]
        value = reduce(getitem, path, within)
        return value.clone() if isinstance(value, Tensor) else value
