"""Share with all ranks what steps leave on the loss rank, for the hooks that every rank runs.

A step runs on the loss rank: what it appends to a list of the module, what its metrics have
counted, what it logged and returned is there and nowhere else. Hooks run on every rank. So before
the hooks at the end of an epoch the other ranks get all of it, in one message; between them nothing
is said. Metrics are shared before callbacks decide by them.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.runtime.batches.remote_loading import Remote
from lightning_tspipe.runtime.transport.replicas import Replicas
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup.declared import find_networks
from lightning_tspipe.strategy.training.collected import Collected, Place, metrics_of, pack
from lightning_tspipe.strategy.training.head_logs import HeadsHere

_STAGES = ("train", "validation", "test", "predict")


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
        self._peers: PeerMetrics | None = None

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
        modules = self._modules_outside()
        self._peers = PeerMetrics(modules, run.replicas)
        internal = run.lightning.namespace.internal_names
        self._collected = {stage: Collected(modules, internal) for stage in _STAGES}
        self._insert_step_sync(trainer)

    def reconnected(self) -> None:
        """The ranks have other places."""
        if self._peers is not None:
            self._peers.release()
            self._peers = PeerMetrics(self._modules_outside(), self._run.replicas)

    def release(self) -> None:
        """The run is over: metrics ask whom they asked before."""
        if self._peers is not None:
            self._peers.release()
            self._peers = None

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
        namespace = self._run.lightning.namespace
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

        def decides(callback: Any) -> bool:
            return isinstance(callback, kinds) or hasattr(callback, "decides_by_metrics")

        # Before each one, because callbacks between them may log; and for schedulers at the end.
        trainer.callbacks = [
            callback
            for known in trainer.callbacks
            for callback in ((sync, known) if decides(known) else (known,))
        ] + [sync]

    def _insert_step_sync(self, trainer: Any) -> None:
        """Have the other ranks know what steps left and logged, before all other callbacks."""
        if any(hasattr(callback, "is_step_sync") for callback in trainer.callbacks):
            return
        hooks: dict[str, Callable[..., None]] = {
            f"on_{stage}_batch_start": _batch_starts for stage in _STAGES
        }
        hooks |= {f"on_{stage}_epoch_end": partial(self._epoch_ends, stage) for stage in _STAGES}
        namespace = self._run.lightning.namespace
        trainer.callbacks.insert(0, namespace.callback(is_step_sync=True, **hooks))

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
        """Before the hooks at the end of an epoch."""
        run, transport = self._run, self._run.transport
        results = _results_of(stage, trainer)
        collected = self._collected[stage]
        engine = run.engine
        if engine is not None and engine.mode.apart is not None:
            self._exchange(collected, results)
        else:
            mine = (collected.take(), pack("results", results)) if run.is_loss_rank else None
            taken, packed = transport.broadcast_object(mine, LOSS_RANK)
            if not run.is_loss_rank:
                collected.give(taken, run.root_device)
                others = pickle.loads(packed) if packed else ()  # noqa: S301 - from the loss rank
                for own, other in zip(results, others, strict=False):
                    _complete(own, other)
            if stage == "predict":
                self.share_indices(trainer.predict_loop, "epoch_batch_indices")
        if stage != "predict":
            self.share_metrics()

    def _exchange(self, collected: Collected, results: list[Any]) -> None:
        """Where each rank runs steps of its own: all get what the first one with it has."""
        run, transport = self._run, self._run.transport
        mine = collected.take(), pack("results", results)
        gathered = transport.gather_object(mine, LOSS_RANK)
        everything = transport.broadcast_object(gathered, LOSS_RANK)
        merged: dict[str | Place, bytes] = {}
        for taken, _ in reversed(everything):
            merged |= taken
        own = mine[0]
        others = {place: value for place, value in merged.items() if own.get(place) != value}
        collected.give(others, run.root_device)
        for _, packed in everything:
            for here, there in zip(results, pickle.loads(packed), strict=False):  # noqa: S301 - as above
                _complete(here, there)

    def share_indices(self, loop: Any, name: str) -> None:
        """Which samples were predicted: that is what the data rank knows."""
        run = self._run
        if run.num_ranks > 1:
            found = run.transport.broadcast_object(getattr(loop, name), run.data_rank)
            setattr(loop, name, found)


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


def _batch_starts(trainer: Any, _module: Any, batch: Any, *_: Any) -> None:
    """Before the hooks of a batch."""
    results = trainer._results  # noqa: SLF001
    if isinstance(batch, Remote) and results is not None:
        # Where a hook logs an average, Lightning would count the samples of the batch.
        results.batch = None


def _compares_now(trainer: Any) -> bool:
    """Whether metrics are going to be compared after this batch."""
    return any(_saves_within_epochs(callback, trainer) for callback in trainer.callbacks) or any(
        config.reduce_on_plateau and config.interval == "step"
        for config in trainer.lr_scheduler_configs
    )


def _saves_within_epochs(callback: Any, trainer: Any) -> bool:
    """Whether a checkpoint callback is one that compares metrics after this batch."""
    if getattr(callback, "monitor", None) is None:
        return False
    steps = getattr(callback, "_every_n_train_steps", 0)
    timed = getattr(callback, "_train_time_interval", None) is not None
    return timed or (steps > 0 and trainer.global_step % steps == 0)


def _results_of(stage: str, trainer: Any) -> list[Any]:
    """Results for the caller of validate, test and predict: one item per loader."""
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
