"""Share with all ranks what steps leave on the loss rank, for the hooks that every rank runs.

A step runs on the loss rank: what it appends to a list of the module, what its metrics have
counted, what it logged and returned is there and nowhere else. Hooks run on every rank. So before
the hooks at the end of an epoch the other ranks get all of it, in one message; between them nothing
is said. Metrics are shared before callbacks decide by them.
"""

from __future__ import annotations

import logging
import pickle
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.runtime.batches.loading import Remote
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup.declared import find_networks
from lightning_tspipe.strategy.training.batches import to_device
from lightning_tspipe.strategy.training.head_logs import HeadsHere

log = logging.getLogger("lightning_tspipe")

_STAGES = ("train", "validation", "test", "predict")
_CONTAINERS = (list, dict, set, deque)
_SHARED = (*_CONTAINERS, int, float, str, Tensor)
_ASKS = ("distributed_available_fn", "process_group")
Place = tuple[str, str]
"""Name of a module, name of an attribute."""


class StepResults:
    """Shares what steps leave behind, and the metrics.

    Args:
        run: The run.
        heads: Those of a fan-out, which log on several ranks.
    """

    def __init__(self, run: Run, heads: HeadsHere) -> None:
        self._run = run
        self._heads = heads
        self._collected: dict[str, Collected] = {}
        self._confined = ExitStack()

    def set_up(self, trainer: Any) -> None:
        """Before a run: look after the module, and have Lightning's callbacks call this."""
        run = self._run
        self._insert_metrics_sync(trainer)
        if run.num_ranks == 1:
            return
        # Rank 0 predicts and another rank reads: it tells rank 0 which samples they were.
        warnings.filterwarnings("ignore", message=".*the batch indices.*`.*RemoteLoader`")
        # After a fit ranks hold parts; what is loaded on rank 0 counts, and is shared from there.
        warnings.filterwarnings("ignore", message=".*to a meta parameter in the current model")
        self._confine_metrics()
        modules = self._modules_outside()
        internal = frozenset(vars(run.namespace.module()))
        self._collected = {stage: Collected(modules, internal) for stage in _STAGES}
        self._insert_step_sync(trainer)

    def reconnected(self) -> None:
        """The ranks have other places."""
        if self._collected:
            self.release()
            self._confine_metrics()

    def release(self) -> None:
        """The run is over: metrics ask whom they asked before."""
        self._confined.close()

    def _confine_metrics(self) -> None:
        """Keep metrics from asking all processes: only loss ranks have counted."""
        replicas = self._run.replicas
        for metric in _metrics_of(self._modules_outside()).values():
            # A group could not be copied along with its metric, once the run is over.
            before = {name: getattr(metric, name) for name in _ASKS}
            self._confined.callback(vars(metric).update, before)
            if replicas.number == 1:
                metric.distributed_available_fn = _not_available
            elif metric.process_group is None:
                metric.process_group = replicas.peers

    def _modules_outside(self) -> dict[str, nn.Module]:
        """The parts of the module that are not pipelined, by their names."""
        module = self._run.module
        try:
            networks = find_networks(module, self._run.options)
            names = [*networks.local, *(name for _, name in networks.items())]
        except ConfigurationError:  # an evaluation then goes without a pipeline
            names = []
        inside = {part for name in names for part in module.get_submodule(name).modules()}
        return {path: part for path, part in module.named_modules() if part not in inside}

    def watch(self, step: str) -> AbstractContextManager[None]:
        """While inside, this rank runs a step, such as ``training_step``."""
        stage = "train" if step == "training_step" else step.removesuffix("_step")
        return self._collected[stage].watch() if self._collected else nullcontext()

    # Callbacks

    def _insert_metrics_sync(self, trainer: Any) -> None:
        """Have all ranks know the metrics before callbacks decide by them."""
        if any(getattr(callback, "is_metrics_sync", False) for callback in trainer.callbacks):
            return
        namespace = self._run.namespace
        kinds = (namespace.callbacks.Checkpoint, namespace.callbacks.EarlyStopping)

        def share(*_: Any) -> None:
            self.share_metrics()

        def share_if_due(trainer: Any, *_: Any) -> None:
            if _compares_now(trainer):
                self.share_metrics()

        # Not a Checkpoint: users take those for ModelCheckpoints.
        sync = namespace.callback(
            is_metrics_sync=True, on_train_batch_end=share_if_due,
            **{f"on_{when}_end": share for when in ("train_epoch", "validation", "test")},
        )  # fmt: skip

        # Before each one, because callbacks between them may log; and for schedulers at the end.
        found: list[Any] = []
        for callback in trainer.callbacks:
            decides = isinstance(callback, kinds) or hasattr(callback, "decides_by_metrics")
            found += (sync, callback) if decides else (callback,)
        trainer.callbacks = [*found, sync]

    def _insert_step_sync(self, trainer: Any) -> None:
        """Have the other ranks know what steps left and logged, before all other callbacks."""
        if any(hasattr(callback, "is_step_sync") for callback in trainer.callbacks):
            return
        sync = self._run.namespace.callback(
            is_step_sync=True,
            **{f"on_{stage}_batch_start": _batch_starts for stage in _STAGES},
            **{f"on_{stage}_epoch_end": partial(self._epoch_ends, stage) for stage in _STAGES},
        )
        trainer.callbacks.insert(0, sync)

    def share_metrics(self) -> None:
        """All ranks get the metrics of rank 0; of heads, those of the ranks that train them."""
        run = self._run
        if self._heads.student is not None:
            self._heads.exchange()
            return
        metrics = {name: v.detach().cpu() for name, v in run.trainer.callback_metrics.items()}
        shared = run.broadcast(metrics)
        if not run.is_global_zero:
            run.trainer._logger_connector._callback_metrics.update(shared)  # noqa: SLF001

    def _epoch_ends(self, stage: str, trainer: Any, *_: Any) -> None:
        """Before the hooks at the end of an epoch: all get what the first rank with it has."""
        run, results, collected = self._run, _results_of(stage, trainer), self._collected[stage]
        own, packed = collected.take(), b""
        if run.engine is not None and run.engine.mode.apart is not None:  # steps on each rank
            packed = pack("results", results)
            everything = run.transport.gather_everywhere((own, packed))
        else:
            if run.is_loss_rank:
                packed = pack("results", results)
            everything = [run.transport.broadcast_object((own, packed), LOSS_RANK)]
        found = {
            place: value for taken, _ in reversed(everything) for place, value in taken.items()
        }
        others = {place: value for place, value in found.items() if own.get(place) != value}
        collected.give(others, run.root_device)
        for _, there in everything:
            if there and there != packed:
                for mine, other in zip(results, pickle.loads(there), strict=False):  # noqa: S301 - of other ranks
                    if stage == "predict":  # they replace their placeholders
                        mine[:] = other
                    else:  # what was logged there alone joins the rest
                        mine.update(other | mine)
        if stage == "predict":
            self.share_indices(trainer.predict_loop, "epoch_batch_indices")
        else:
            self.share_metrics()

    def share_indices(self, loop: Any, name: str) -> None:
        """Which samples were predicted: that is what the data rank knows."""
        run = self._run
        if run.num_ranks > 1:
            found = run.transport.broadcast_object(getattr(loop, name), run.data_rank)
            setattr(loop, name, found)


def _not_available() -> bool:
    return False


def _batch_starts(trainer: Any, _module: Any, batch: Any, *_: Any) -> None:
    """Before the hooks of a batch."""
    results = trainer._results  # noqa: SLF001
    if isinstance(batch, Remote) and results is not None:
        # Where a hook logs an average, Lightning would count the samples of the batch.
        results.batch = None


def _compares_now(trainer: Any) -> bool:
    """Whether a callback that saves, or a scheduler, compares metrics after this batch."""
    for callback in trainer.callbacks:
        steps = getattr(callback, "_every_n_train_steps", 0)
        timed = getattr(callback, "_train_time_interval", None) is not None
        is_due = timed or (steps > 0 and trainer.global_step % steps == 0)
        if is_due and getattr(callback, "monitor", None) is not None:
            return True
    return any(
        config.reduce_on_plateau and config.interval == "step"
        for config in trainer.lr_scheduler_configs
    )


def _results_of(stage: str, trainer: Any) -> Any:
    """Results for the caller of validate, test and predict: one item per loader."""
    if stage == "train":
        return []
    if stage == "predict":
        return trainer.predict_loop._predictions  # noqa: SLF001
    return trainer._evaluation_loop._logged_outputs  # noqa: SLF001


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
            if not hasattr(module, "update_called"):
                for name, value in vars(module).items():
                    if isinstance(value, _SHARED) and name not in self._internal:
                        yield (path, name), value

    def take(self) -> dict[str | Place, bytes]:
        """What steps have changed since the last call; on the loss rank."""
        changed, self._changed = self._changed, set()
        found: dict[str | Place, Any] = {
            place: value for place, value in self._attributes() if place in changed
        }
        for path, metric in _metrics_of(self._modules).items():
            if metric.update_called and not self._is_as_given(path, metric):
                found[path] = (metric.metric_state, metric.update_count)
        return {place: packed for place, value in found.items() if (packed := pack(place, value))}

    def give(self, taken: dict[str | Place, bytes], device: torch.device) -> None:
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


def _metrics_of(modules: dict[str, nn.Module]) -> dict[str, Any]:
    """The metrics of torchmetrics among some modules, by their names."""
    for module in modules.values():
        if hasattr(module, "_groups_checked"):
            # Members of a MetricCollection's group get their leader's state when they are asked.
            module.values(copy_state=False)  # type: ignore[operator]
    return {path: module for path, module in modules.items() if hasattr(module, "update_called")}
