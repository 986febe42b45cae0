"""Share with all ranks what steps leave on the loss rank, for the hooks that every rank runs.

A step runs on the loss rank: what it appends to a list of the module, what its metrics have
counted, what it logged and returned is there and nowhere else. Hooks run on every rank. So before
the hooks at the end of an epoch the other ranks get all of it, in one message; before those of a
batch the loss, and the plain attributes that the step has set. Metrics are shared before callbacks
decide by them.

Where the student is a fan-out, every rank runs the step for its own heads, logs for them and
updates them; nobody waits for rank 0. What loggers get travels one step after the Trainer logs, all
else at the ends of epochs::

    rank 0  a/loss  b/loss ──┐                            ┌──► all metrics, on every rank
    rank 1  c/loss         ──┴── metrics, stopped heads ──┴──► rank 0's loggers: c/loss of rank 1
"""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.heads import StudentFanout
from lightning_tspipe.heads.training import STOPPED
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.replacing import attributes_replaced
from lightning_tspipe.runtime.batches.loading import Remote
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.transport.channels import Channel, Lane, edges_from
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.training.collected import Collected, metrics_of, pack

log = logging.getLogger("lightning_tspipe")

_TOLD = torch.float64
"""Type of the losses that other ranks are told."""
_SCALAR = torch.empty((), device="meta")
_STAGES = ("train", "validation", "test", "predict")
Record = tuple[dict[str, float], int]
"""What a rank logged, and in which step."""


class StepResults:
    """Watches steps, and shares what they leave behind, and the metrics.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._collected: dict[str, Collected] = {}
        self._confined = ExitStack()
        self._unsent: list[Record] = []
        self._num_steps = self._every = 0
        self._is_due = False
        self._tells = self._shares = self._has_told = False
        self._loss: Tensor | None = None

    def set_up(self, trainer: Any) -> None:
        """Before a run: look after the module, and have Lightning's callbacks call this."""
        run = self._run
        self._insert_callbacks(trainer)
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

    def reconnected(self) -> None:
        """The ranks have other places."""
        if self._collected:
            self._confined.close()
            self._confine_metrics()

    def release(self) -> None:
        """The run is over: metrics ask whom they asked before, and logging is Lightning's again."""
        self._confined.close()
        self._every, self._tells = 0, False

    def _confine_metrics(self) -> None:
        """Keep metrics from asking all processes: only loss ranks have counted."""
        replicas = self._run.replicas
        metrics = list(metrics_of(self._modules_outside()).values())
        name, value = "distributed_available_fn", _not_available
        if replicas.number > 1:
            metrics = [metric for metric in metrics if metric.process_group is None]
            name, value = "process_group", replicas.peers
        # A group could not be copied along with its metric, once the run is over.
        self._confined.enter_context(attributes_replaced((m, name, value) for m in metrics))

    def _modules_outside(self) -> dict[str, nn.Module]:
        """The parts of the module that are not pipelined, by their names."""
        module = self._run.module
        try:
            networks = self._run.networks
            names = [*networks.local, *(name for _, name in networks.items())]
        except ConfigurationError:  # an evaluation then goes without a pipeline
            names = []
        inside = {part for name in names for part in module.get_submodule(name).modules()}
        return {path: part for path, part in module.named_modules() if part not in inside}

    def step(self, name: str, rest: Sequence[Any], batch_idx: int) -> Callable[[Any], Any]:
        """A user's step as a function of the batch alone."""
        method = getattr(self._run.module, name)
        stage = "train" if name == "training_step" else name.removesuffix("_step")
        others = [batch_idx if i == 0 else value for i, value in enumerate(rest)]

        def step(batch: Any) -> Any:
            if not self._run.trainer.predicting:
                # Lightning finds the batch size for averages here.
                results = self._run.trainer._results  # noqa: SLF001
                assert results is not None
                results.batch, results.batch_size = batch, None
            with self._run.replicas.as_world():
                engine = self._run.engine
                logs = self._run.is_loss_rank if engine is None else engine.computes_loss
                collected = self._collected.get(stage) if logs else None
                with nullcontext() if collected is None else collected.watch():
                    return method(batch, *others)

        return step

    # Callbacks

    def _insert_callbacks(self, trainer: Any) -> None:
        """Have all ranks know the metrics before callbacks decide by them, and what steps left."""
        if any(hasattr(callback, "shares_results") for callback in trainer.callbacks):
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
            shares_results=True, on_train_batch_end=share_if_due,
            **{f"on_{when}_end": share for when in ("train_epoch", "validation", "test")},
        )  # fmt: skip

        # Before each one, because callbacks between them may log; and for schedulers at the end.
        found: list[Any] = []
        for callback in trainer.callbacks:
            decides = isinstance(callback, kinds) or hasattr(callback, "decides_by_metrics")
            found += (sync, callback) if decides else (callback,)
        trainer.callbacks = [*found, sync]
        if self._run.num_ranks > 1:  # before all others
            first = namespace.callback(
                shares_results=True,
                on_after_backward=self._backward_ends,
                on_train_batch_end=self._batch_ends,
                **{f"on_{stage}_batch_start": _batch_starts for stage in _STAGES},
                **{f"on_{stage}_epoch_end": partial(self._epoch_ends, stage) for stage in _STAGES},
            )
            trainer.callbacks.insert(0, first)

    def tell(self, result: Any) -> None:
        """On the loss rank: tell the others the loss that a step has returned, and what it set."""
        run = self._run
        if not self._tells or run.pipeline_rank != LOSS_RANK:
            return
        told = self._collected["train"].told()
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if loss is not None:
            loss = loss.detach().to(_TOLD, copy=True)
            loss = loss.reshape(()) if run.module.automatic_optimization else loss
        if told and not self._shares:
            names = ", ".join(f"self.{path}.{name}".replace("..", ".") for path, name in told)
            warnings.warn(
                f"the step has set {names}, and nothing in the first step of this epoch: hooks on "
                "other ranks see that when the epoch ends. Set it in each step",
                stacklevel=2,
            )
        for rank in range(LOSS_RANK + 1, run.num_ranks):
            if self._shares:
                run.transport.send_object(told, rank, Channel.SET)
            if loss is not None:  # a GPU need not have computed it yet
                run.transport.send([loss], rank, Channel.LOSS)

    def _hear(self, like: Tensor | None) -> Tensor | None:
        """On another rank: what :meth:`tell` has told, which was long before; the loss."""
        run = self._run
        if self._shares:
            told = run.transport.receive_object(LOSS_RANK, Channel.SET)
            self._collected["train"].give(told, run.root_device)
        if like is None:
            return None
        spec = TensorSpec(tuple(like.shape), _TOLD)
        return run.transport.receive([spec], LOSS_RANK, Channel.LOSS).wait()[0]

    @property
    def _hears(self) -> bool:
        return self._tells and self._run.pipeline_rank != LOSS_RANK

    def _backward_ends(self, _trainer: Any, module: Any) -> None:
        """Before the hooks behind a backward, which may read what the step has set."""
        if self._hears and module.automatic_optimization:
            self._loss = self._hear(_SCALAR)

    def _batch_ends(self, _trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        """Before the hooks of a batch's end: the loss is here."""
        if not self._hears:
            return
        if not module.automatic_optimization:
            self._loss = self._hear(outputs.get("loss"))
        if self._loss is not None:
            outputs["loss"], self._loss = self._loss, None

    def share_metrics(self) -> None:
        """All ranks get the metrics of rank 0; of heads, those of the ranks that train them."""
        run = self._run
        if self._student is not None:
            self.exchange()
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

    # Heads of a fan-out

    @property
    def _student(self) -> StudentFanout | None:
        """The heads, once they are placed over several ranks; None without any."""
        engine = self._run.engine
        if engine is None or engine.transport.num_ranks == 1:
            return None
        return engine.mode.apart

    def placed(self, engine: Engine) -> None:
        """Every rank has its stages."""
        engine.mode.begin(engine.rank, engine.pipeline)
        if engine.mode.apart is not None and engine.transport.num_ranks > 1:
            self._keep_logs()
            trainer: Any = self._run.trainer
            every = trainer.log_every_n_steps if trainer.training and trainer.loggers else 0
            self._every = engine.transport.broadcast_object(every, LOSS_RANK)
            self._num_steps, self._is_due = 0, False
        engine.mode.begin_epoch(engine.transport, engine.pipeline)

    def begin_step(self, engine: Engine) -> None:
        """Before a training step: what was logged goes to rank 0, which gets it a step later.

        By then the others have sent it, since none is more than a step behind.
        """
        run = self._run
        self._tells = engine.mode.apart is None and run.num_ranks > 1
        self._shares = engine.captured.plan.sets
        if self._tells:
            run.transport.open(edges_from(LOSS_RANK, range(run.num_ranks), Lane.LOSS))
        if not self._every:
            return
        self._log_received()
        self._num_steps += 1
        self._is_due = self._num_steps % self._every == 0
        if self._is_due and not engine.is_loss_rank and engine.computes_loss:
            unsent, self._unsent = self._unsent, []
            engine.transport.send_object(unsent, LOSS_RANK, Channel.LOGS)

    def _log_received(self) -> None:
        """On rank 0: log what the other ranks with heads sent in the step before."""
        is_due, self._is_due = self._is_due, False
        engine = self._run.engine
        if not is_due or not self._run.is_loss_rank or engine is None:
            return
        records: list[Record] = []
        with waiting("what other ranks have logged"):
            for rank in engine.pipeline.loss_ranks:
                if rank != LOSS_RANK:
                    records += engine.transport.receive_object(rank, Channel.LOGS)
        self._log(records)

    def _log(self, records: list[Record]) -> None:
        """On rank 0: give loggers what other ranks have logged."""
        connector: Any = self._run.trainer._logger_connector  # noqa: SLF001 - no public way
        for values, step in sorted(records, key=lambda record: record[1]):
            connector.log_metrics(values, step)

    def _keep_logs(self) -> None:
        """What this rank logs is for rank 0's loggers, which get it when the ranks next meet."""
        trainer: Any = self._run.trainer
        connector = trainer._logger_connector  # noqa: SLF001 - no public way
        if self._run.is_loss_rank or "log_metrics" in vars(connector):
            return
        original = connector.log_metrics

        def log_metrics(metrics: dict[str, Any], step: int | None = None) -> None:
            if trainer.loggers and metrics:
                steps = trainer.fit_loop.epoch_loop._batches_that_stepped  # noqa: SLF001
                values = {k: float(v) for k, v in metrics.items() if "/" in k}
                self._unsent.append((values, steps if step is None else step))
            original(metrics, step)

        replaced = attributes_replaced([(connector, "log_metrics", log_metrics)])
        self._confined.enter_context(replaced)

    def exchange(self) -> None:
        """All ranks get to know metrics and stopped heads; rank 0 logs. Every rank calls it."""
        student, run = self._student, self._run
        if student is None or run.engine is None:
            return
        trainer, owners = run.trainer, run.engine.pipeline.student.ranks
        rank_of = dict(zip(student.names, owners, strict=False))
        self._log_received()
        unsent, self._unsent = self._unsent, []
        known = {name: value.detach().cpu() for name, value in trainer.callback_metrics.items()}
        everything = run.transport.gather_everywhere((known, dict(student.stopped), unsent))
        metrics = {k: v for each, _, _ in reversed(everything) for k, v in each.items()}
        for rank, (own, _, _) in enumerate(everything):
            metrics |= {k: v for k, v in own.items() if rank_of.get(k.partition("/")[0]) == rank}
        trainer._logger_connector._callback_metrics.update(metrics)  # noqa: SLF001
        if run.is_loss_rank:
            self._log([record for _, _, each in everything for record in each])
        stopped = {k: v for _, each, _ in everything for k, v in each.items()}
        for name, reason in stopped.items():
            if name not in student.stopped and run.is_loss_rank:
                log.warning("head %s has stopped: %s", name, reason)
            student.stop(name, reason)
        if set(student.stopped) >= set(student.names):
            trainer.should_stop = True

    def tell_unheard(self, engine: Engine) -> None:
        """Say once what hooks have logged on other ranks only, where nobody keeps it.

        Every rank calls it, where an epoch or the training has ended.
        """
        run = self._run
        if self._has_told or run.num_ranks == 1 or engine.mode.apart is not None:
            return
        self._has_told = True
        own = set(run.trainer.callback_metrics)
        gathered = run.transport.gather_object(own, LOSS_RANK)
        unheard = sorted(set().union(*gathered or ()) - own)
        if unheard and run.replicas.is_first:
            names = ", ".join(unheard[:5]) + (", ..." if unheard[5:] else "")
            warnings.warn(
                f"{names}: hooks have logged this on other ranks than rank {LOSS_RANK}, whose logs "
                "are kept, of parameters or gradients that rank "
                f"{LOSS_RANK} has not. Log by the same names on all ranks; "
                "self.trainer.strategy.grad_norm() gives the norm over all",
                stacklevel=2,
            )

    def note_stopped(self, checkpoint: dict[str, Any]) -> None:
        """Say in a checkpoint which heads have stopped, on any rank; every rank calls it."""
        student = self._student
        if student is None:
            return
        gathered = self._run.transport.gather_object(student.stopped, LOSS_RANK)
        if gathered is not None:
            checkpoint[STOPPED] = {name: why for each in gathered for name, why in each.items()}


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
