"""What steps change of a module beside its networks: attributes, and metrics of torchmetrics."""

from __future__ import annotations

import logging
import pickle
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.networks.modules import containers_of_class
from lightning_tspipe.strategy.training.data import to_device

log = logging.getLogger("lightning_tspipe")

_CONTAINERS = (list, dict, set, deque)
_SHARED = (*_CONTAINERS, int, float, str, Tensor)
Place = tuple[str, str]
"""Name of a module, name of an attribute."""


class Collected:
    """The attributes and metrics of a module that its steps change.

    Args:
        modules: The parts of the LightningModule that are not pipelined, by their names.
        internal: Attributes that are Lightning's or torch's own.
    """

    def __init__(self, modules: dict[str, nn.Module], internal: frozenset[str]) -> None:
        self._modules = modules
        self._internal = internal
        self._changed: set[Place] = set()
        self._last: set[Place] = set()
        self._given: dict[str, dict[str, tuple[Any, Any]]] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """While inside, a step runs on the loss rank."""
        before = {place: _state(value) for place, value in self._attributes()}
        yield
        now = {place: _state(value) for place, value in self._attributes()}
        self._last = {place for place, state in now.items() if before.get(place) != state}
        self._changed |= self._last

    def told(self) -> dict[Place, bytes]:
        """What the last step has set, on the loss rank; but not what it has put into containers."""
        last = [(place, value) for place, value in self._attributes() if place in self._last]
        own = {place: value for place, value in last if not isinstance(value, _CONTAINERS)}
        return {place: packed for place, value in own.items() if (packed := pack(place, value))}

    def _attributes(self) -> Iterator[tuple[Place, Any]]:
        for path, module in self._modules.items():
            if not hasattr(module, "update_called"):
                for name, value in {**containers_of_class(module), **vars(module)}.items():
                    if isinstance(value, _SHARED) and name not in self._internal:
                        yield (path, name), value

    def take(self) -> dict[str | Place, bytes]:
        """What steps have changed since the last call; on the loss rank."""
        changed, self._changed = self._changed, set()
        found: dict[str | Place, Any] = {
            place: value for place, value in self._attributes() if place in changed
        }
        for path, metric in metrics_of(self._modules).items():
            if metric.update_called and not self._is_as_given(path, metric):
                found[path] = (metric.metric_state, metric.update_count)
        return {place: packed for place, value in found.items() if (packed := pack(place, value))}

    def give(self, taken: Mapping[Any, bytes], device: torch.device) -> None:
        """Set what :meth:`take` found on the loss rank; on the others."""
        for place, packed in taken.items():
            value = to_device(pickle.loads(packed), device)  # noqa: S301 - from the loss rank
            if isinstance(place, tuple):
                path, name = place
                vars(self._modules[path])[name] = value
            else:
                metric: Any = self._modules[place]
                state, metric._update_count = value  # noqa: SLF001 - no public way
                metric._computed = None  # noqa: SLF001
                for name, each in state.items():
                    setattr(metric, name, each)
                # The values themselves: while they are kept, no others are taken for them.
                self._given[place] = {n: (v, _state(v)) for n, v in metric.metric_state.items()}

    def _is_as_given(self, path: str, metric: Any) -> bool:
        """Whether a metric has what another rank counted, perhaps long ago, and nothing else."""
        given = self._given.get(path)
        return given is not None and all(
            given[name][0] is value and given[name][1] == _state(value)
            for name, value in metric.metric_state.items()
        )


def _state(value: Any) -> Any:
    """A value that differs if an attribute has changed."""
    if isinstance(value, _CONTAINERS):
        return id(value), len(value)
    if isinstance(value, Tensor):
        return id(value), None if value.is_inference() else value._version  # noqa: SLF001
    return value


def pack(place: Any, value: Any) -> bytes:
    """Bytes, or none if there is no way to send this."""
    try:
        leaves = pytree.tree_leaves(value)
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            return b""  # of parameters that each rank has its own part of
        return pickle.dumps(pytree.tree_map_only(Tensor, lambda x: x.detach().cpu(), value))
    except Exception as error:  # noqa: BLE001 - whatever users put into lists
        log.debug("%s stays on rank %d: %s", place, LOSS_RANK, error)
        return b""


def metrics_of(modules: dict[str, nn.Module]) -> dict[str, Any]:
    """The metrics of torchmetrics among some modules, by their names."""
    for module in modules.values():
        if hasattr(module, "_groups_checked"):
            # Members of a MetricCollection's group get their leader's state when they are asked.
            module.values(copy_state=False)  # type: ignore[operator]
    return {path: module for path, module in modules.items() if hasattr(module, "update_called")}
