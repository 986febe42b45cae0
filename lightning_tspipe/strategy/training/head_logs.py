"""Heads on a frozen trunk in Lightning's hooks: how the ranks tell of those they train.

Every rank runs the step for its own heads, logs for them and updates them; nobody waits for rank 0.
What loggers get travels one step after the Trainer logs, all else at the ends of epochs::

    rank 0  a/loss  b/loss ──┐                            ┌──► all metrics, on every rank
    rank 1  c/loss         ──┴── metrics, stopped heads ──┴──► rank 0's loggers: c/loss of rank 1
"""

from __future__ import annotations

import logging
from typing import Any

from lightning_tspipe.heads import StudentFanout
from lightning_tspipe.heads.training import STOPPED
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.stages.heads import FeatureCache
from lightning_tspipe.runtime.transport.channels import Channel
from lightning_tspipe.strategy.lightning.run import Run

log = logging.getLogger("lightning_tspipe")

Record = tuple[dict[str, float], int]
"""What a rank logged, and in which step."""


class HeadsHere:
    """What the strategy does beside, where the student is a fan-out.

    Args:
        run: The run.

    Attributes:
        cache: Keeps features in the coming fit; None: the trunk makes all of them.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.cache: FeatureCache | None = None
        self._unsent: list[Record] = []
        self._num_steps = self._every = 0
        self._is_due = False
        self._connector: Any = None  # of the Trainer to its loggers, where its logs are kept here

    @property
    def student(self) -> StudentFanout | None:
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

    def release(self) -> None:
        """Logging is Lightning's again, and nothing is kept."""
        self.cache = None
        self._every = 0
        if self._connector is not None:
            vars(self._connector).pop("log_metrics", None)
            self._connector = None

    def _keep_logs(self) -> None:
        """What this rank logs is for rank 0's loggers, which get it when the ranks next meet."""
        trainer: Any = self._run.trainer
        if self._run.is_loss_rank or self._connector is not None:
            return
        self._connector = trainer._logger_connector  # noqa: SLF001 - no public way
        original = self._connector.log_metrics

        def log_metrics(metrics: dict[str, Any], step: int | None = None) -> None:
            if trainer.loggers and metrics:
                steps = trainer.fit_loop.epoch_loop._batches_that_stepped  # noqa: SLF001
                values = {k: float(v) for k, v in metrics.items() if "/" in k}
                self._unsent.append((values, steps if step is None else step))
            original(metrics, step)

        self._connector.log_metrics = log_metrics

    def exchange(self) -> None:
        """All ranks get to know metrics and stopped heads; rank 0 logs. Every rank calls it."""
        student, run = self.student, self._run
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

    def note_stopped(self, checkpoint: dict[str, Any]) -> None:
        """Say in a checkpoint which heads have stopped, on any rank; every rank calls it."""
        student = self.student
        if student is None:
            return
        gathered = self._run.transport.gather_object(student.stopped, LOSS_RANK)
        if gathered is not None:
            checkpoint[STOPPED] = {name: why for each in gathered for name, why in each.items()}
