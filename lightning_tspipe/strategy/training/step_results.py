"""What steps leave on the loss rank, for the hooks that every rank runs.

A step runs on the loss rank: what it appends to a list of the module, what its metrics have
counted, what it logged and returned is there and nowhere else. Hooks run on every rank. So before
the hooks at the end of an epoch the other ranks get all of it, in one message; between them nothing
is said.
"""

from __future__ import annotations

import logging
import pickle
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.runtime.batches.remote_loading import Remote
from lightning_tspipe.runtime.transport.replicas import Replicas
from lightning_tspipe.strategy.training.batches import to_device

if TYPE_CHECKING:
    from lightning_tspipe.strategy.strategy import PipelineHooks

log = logging.getLogger("lightning_tspipe")

_CONTAINERS = (list, dict, set, deque)
_SHARED = (*_CONTAINERS, int, float, str, Tensor)
STAGES = ("train", "validation", "test", "predict")
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
        self._given: dict[str, dict[str, tuple[Any, Any]]] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """While inside, a step runs on the loss rank."""
        before = {place: _state(value) for place, value in self._attributes()}
        yield
        for place, value in self._attributes():
            if place not in before or before[place] != _state(value):
                self._changed.add(place)

    def _attributes(self) -> Iterator[tuple[Place, Any]]:
        for path, module in self._modules.items():
            if not is_metric(module):
                for name, value in vars(module).items():
                    if isinstance(value, _SHARED) and name not in self._internal:
                        yield (path, name), value

    def take(self) -> dict[str | Place, bytes]:
        """What steps have changed since the last call; on the loss rank."""
        changed, self._changed = self._changed, set()
        found: dict[str | Place, Any] = {
            place: value for place, value in self._attributes() if place in changed
        }
        for path, metric in metrics_of(self._modules):
            if metric.update_called and not self._is_as_given(path, metric):
                found[path] = (metric.metric_state, metric.update_count)
        return {place: packed for place, value in found.items() if (packed := _pack(place, value))}

    def give(self, taken: dict[str | Place, bytes], device: torch.device) -> None:
        """Set what :meth:`take` found on the loss rank; on the others."""
        for place, packed in taken.items():
            value = to_device(pickle.loads(packed), device)  # noqa: S301 - from the loss rank
            if isinstance(place, tuple):
                path, name = place
                vars(self._modules[path])[name] = value
            else:
                metric: Any = self._modules[place]
                _set_metric(metric, *value)
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
    """What tells whether an attribute is as it was."""
    if isinstance(value, _CONTAINERS):
        return id(value), len(value)
    if isinstance(value, Tensor):
        return id(value), None if value.is_inference() else value._version  # noqa: SLF001
    return value


def _pack(place: Any, value: Any) -> bytes:
    """Bytes, or none if there is no way to send this."""
    try:
        leaves = pytree.tree_leaves(value)
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            return b""  # of parameters that each rank has its own part of
        return pickle.dumps(pytree.tree_map(_plain, value))
    except Exception as error:  # noqa: BLE001 - whatever users put into lists
        log.debug("%s stays on rank %d: %s", place, LOSS_RANK, error)
        return b""


def _plain(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


def _set_metric(metric: Any, state: dict[str, Any], count: int) -> None:
    for name, value in state.items():
        setattr(metric, name, value)
    metric._update_count = count  # noqa: SLF001 - no public way
    metric._computed = None  # noqa: SLF001


def is_metric(module: nn.Module) -> bool:
    """Whether a module is a metric of torchmetrics."""
    return hasattr(module, "update_called") and hasattr(module, "metric_state")


def metrics_of(modules: dict[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    """The metrics of torchmetrics among some modules, by their names."""
    for module in modules.values():
        if hasattr(module, "_groups_checked"):
            # Members of a MetricCollection's group get their leader's state when they are asked.
            module.values(copy_state=False)  # type: ignore[operator]
    for path, module in modules.items():
        if is_metric(module):
            yield path, module


class PeerMetrics:
    """Keeps metrics from asking all processes: only loss ranks have counted.

    Args:
        modules: Where to look for metrics, by their names.
        replicas: Whose counts are added up.
    """

    def __init__(self, modules: dict[str, nn.Module], replicas: Replicas) -> None:
        self._before = [
            (metric, metric.distributed_available_fn, metric.process_group)
            for _, metric in metrics_of(modules)
        ]
        for metric, _, group in self._before:
            if replicas.number == 1:
                metric.distributed_available_fn = _not_available
            elif group is None:
                metric.process_group = replicas.peers

    def release(self) -> None:
        """As it was before; a group could not be copied along with its metric."""
        for metric, function, group in self._before:
            metric.distributed_available_fn = function
            metric.process_group = group


def _not_available() -> bool:
    return False


class StepSync:
    """Shares what steps left, at the ends of epochs; a Lightning callback asks it.

    Args:
        strategy: The strategy.
        modules: The parts of the LightningModule that are not pipelined, by their names.
        internal: Attributes of modules that are Lightning's or torch's own.
    """

    def __init__(
        self, strategy: PipelineHooks, modules: dict[str, nn.Module], internal: frozenset[str]
    ) -> None:
        self._strategy = strategy
        self._collected = {stage: Collected(modules, internal) for stage in STAGES}

    def watch(self, step: str) -> AbstractContextManager[None]:
        """While inside, this rank runs a step, such as ``training_step``."""
        stage = "train" if step == "training_step" else step.removesuffix("_step")
        return self._collected[stage].watch()

    def batch_starts(self, trainer: Any, batch: Any) -> None:
        """Before the hooks of a batch."""
        results = trainer._results  # noqa: SLF001
        if isinstance(batch, Remote) and results is not None:
            # Where a hook logs an average, Lightning would count the samples of the batch.
            results.batch = None

    def epoch_ends(self, stage: str, trainer: Any) -> None:
        """Before the hooks at the end of an epoch."""
        strategy = self._strategy
        results = _results_of(stage, trainer)
        collected = self._collected[stage]
        engine = strategy.engine
        if engine is not None and engine.mode.apart is not None:
            self._exchange(collected, results)
            return
        mine = (collected.take(), _pack("results", results)) if strategy.is_loss_rank else None
        taken, packed = strategy.transport.broadcast_object(mine, LOSS_RANK)
        if not strategy.is_loss_rank:
            collected.give(taken, strategy.root_device)
            others = pickle.loads(packed) if packed else ()  # noqa: S301 - from the loss rank
            for own, other in zip(results, others, strict=False):
                _complete(own, other)
        if stage == "predict":
            self.share_indices(trainer.predict_loop, "epoch_batch_indices")

    def _exchange(self, collected: Collected, results: list[Any]) -> None:
        """Where each rank runs steps of its own: all get what the first one with it has."""
        strategy, transport = self._strategy, self._strategy.transport
        mine = collected.take(), _pack("results", results)
        gathered = transport.gather_object(mine, LOSS_RANK)
        everything = transport.broadcast_object(gathered, LOSS_RANK)
        merged: dict[str | Place, bytes] = {}
        for taken, _ in reversed(everything):
            merged |= taken
        own = mine[0]
        others = {place: value for place, value in merged.items() if own.get(place) != value}
        collected.give(others, strategy.root_device)
        for _, packed in everything:
            for here, there in zip(results, pickle.loads(packed), strict=False):  # noqa: S301 - as above
                _complete(here, there)

    def share_indices(self, loop: Any, name: str) -> None:
        """Which samples were predicted: that is what the data rank knows."""
        transport = self._strategy.transport
        setattr(
            loop, name, transport.broadcast_object(getattr(loop, name), transport.num_ranks - 1)
        )


def _results_of(stage: str, trainer: Any) -> list[Any]:
    """What Lightning keeps for the caller of validate, test and predict: one item per loader."""
    results: list[Any] = []
    if stage == "predict":
        results = trainer.predict_loop._predictions  # noqa: SLF001
    elif stage != "train":
        results = trainer._evaluation_loop._logged_outputs  # noqa: SLF001
    return results


def _complete(own: Any, other: Any) -> None:
    """Predictions replace their placeholders; what only the loss rank logged joins the rest."""
    if isinstance(own, list):
        own[:] = other
    else:
        own.update({name: value for name, value in other.items() if name not in own})
