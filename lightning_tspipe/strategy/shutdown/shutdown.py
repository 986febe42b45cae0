"""Shutdown: a failure or a signal on one rank ends the run on all of them."""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from lightning_tspipe.replacing import attributes_replaced
from lightning_tspipe.runtime.faults.failures import end_with_this_process
from lightning_tspipe.runtime.faults.loader_workers import hear_of_children, let_children_end
from lightning_tspipe.runtime.faults.phases import HERE, SAVING
from lightning_tspipe.runtime.faults.rendezvous import Job, current_job, end_by
from lightning_tspipe.runtime.faults.stopping import END, REQUEUE, Stop
from lightning_tspipe.strategy.checkpoints.saving import CheckpointWriter
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.training.evaluating import Evaluator

log = logging.getLogger("lightning_tspipe")

_NO_VALUES = (
    "lightning-tspipe: each rank has the values of its own parameters, and those of others are on "
    "the meta device. In a hook, leave out those of which parameter.is_meta, and add up over the "
    "ranks: self.trainer.strategy.pipelined.sums([number]), which every rank calls"
)
_SIGTERM_EXIT_CODE = 128 + signal.SIGTERM


@dataclass(eq=False)
class Shutdown:
    """Ends a run on all ranks, whatever the reason.

    Attributes:
        _run: The run.
        _saving: What is being written where a run ends.
        _evaluator: Evaluations, which a signal ends too.
    """

    _run: Run
    _saving: CheckpointWriter
    _evaluator: Evaluator
    _requeues: bool = False
    _hears_no_more: bool = False
    _muted: ExitStack = field(default_factory=ExitStack)

    # The other ranks

    def begin(self) -> None:
        """A run begins: in the first one of a process, nothing is known of other ranks."""
        HERE.enter("the start-up")
        HERE.checkpoint = ""  # of an earlier run
        run, job = self._run, current_job()
        run.failures = None
        if job is not None and run.total_ranks > 1:
            run.look_after_others(job)

    def connected(self) -> None:
        """The ranks have met, in this run or an earlier one."""
        run = self._run
        run.ends_together = self._requeues = self._saving.has_told = self._hears_no_more = False
        if run.total_ranks == 1:
            run.stop = Stop(self._on_agreed)
        else:
            self._renew_stop()

    def reconnected(self) -> None:
        """The ranks have other places: notes of their own, since steps are counted anew."""
        before = self._run.stop
        self._renew_stop()
        if before.was_asked:
            self._run.stop.ask(END, before.asked_rank(END))

    def _renew_stop(self) -> None:
        """Begin with nothing asked for, and with the same number on all ranks."""
        run, job = self._run, current_job()
        assert job is not None
        # A rank may have begun runs that others never came to: one of them counts.
        job.num_begun = run.broadcast(job.num_begun + 1)
        run.stop = Stop(
            self._on_agreed, job.notes, run=job.num_begun,
            replica=run.replica, num_replicas=run.num_replicas,
            batches_per_update=lambda: int(run.trainer.accumulate_grad_batches),
            gather=run.replicas.gather,
        )  # fmt: skip

    # Failures

    def begin_end(self, exception: BaseException) -> None:
        """An exception has left the loops: before anything else, the other ranks get to know."""
        run = self._run
        if run.total_ranks == 1 or run.have_workers_failed:  # those have told it themselves
            return
        run.set_world_ranks()  # a worker may fail before it has set up anything
        is_sigterm = type(exception).__name__ == "SIGTERMException"  # of either Lightning
        run.ends_together = is_sigterm and run.stop.has_ended
        failures = run.failures = run.failures or run.failures_of(Job(run.global_rank))
        if run.ends_together:
            failures.end_watch()
        else:
            let_children_end()
            failures.settle(exception)
            if run.has_met:
                run.transport.close()

    def await_ends(self) -> None:
        """Where all ranks end together, or one is alone: until each has written what it writes."""
        self._saving.end_writing(waits=True)
        if self._run.failures is not None:
            self._run.failures.await_ends()

    def on_exception(self, exception: BaseException) -> None:
        """The run ends by an exception, of which callbacks know by now."""
        self.begin_end(exception)
        if self._run.engine is not None and re.search(r"\bmeta\b", str(exception)):
            exception.add_note(_NO_VALUES)
        self._muted.close()
        if self._run.is_failing:
            self._run.has_met = False  # the next run needs a transport that is open
        if type(exception).__name__ == "SIGTERMException":
            assert isinstance(exception, SystemExit)
            # Not 0: whoever started the job must not take it for complete.
            exception.code = _SIGTERM_EXIT_CODE
            end_with_this_process(self._run.started)

    def _mute(self, trainer: Any) -> None:
        """Keep checkpoint callbacks from saving, and from removing what they saved before."""
        saves = [c for c in trainer.checkpoint_callbacks if getattr(c, "save_on_exception", False)]
        muted = attributes_replaced((callback, "save_on_exception", False) for callback in saves)
        self._muted.enter_context(muted)
        if saves:
            self._saving.tell_unsaved()

    def end_of_run(self) -> None:
        """The run is over, also by an exception: wait for files, then for ranks that are there."""
        run = self._run
        self._saving.end_writing(waits=not run.is_failing)
        if run.lightning_module is not None:
            # A process that ends takes what it sent with it, unless it has arrived.
            run.barrier("teardown")
        if run.failures is not None:
            run.failures.end_watch()
        HERE.enter("the script, after a run")

    # Signals

    def prepare(self, trainer: Any) -> None:
        """Let exceptions and signals be heard here first; once for each run."""
        hear_of_children()
        self._catch_signals(trainer)
        if any(getattr(callback, "is_end_hook", False) for callback in trainer.callbacks):
            return
        run, namespace = self._run, self._run.namespace

        def on_exception(trainer: Any, _module: Any, exception: BaseException) -> None:
            self.begin_end(exception)
            if run.is_failing:
                self._mute(trainer)

        def end_of_batch(trainer: Any, *_: Any) -> None:
            # Lightning itself looks after training batches, and after all but the last of others.
            loop = trainer._active_loop  # noqa: SLF001
            if trainer.predicting or loop.batch_progress.is_last_batch:
                self._evaluator.end_if_agreed()

        first = namespace.callback(
            is_end_hook=True, on_exception=on_exception,
            on_validation_start=lambda *_: self._evaluator.begin_validation(), **phase_hooks(run),
        )  # fmt: skip
        last = namespace.callback(
            is_end_hook=True, on_validation_batch_end=end_of_batch,
            on_test_batch_end=end_of_batch, on_predict_batch_end=end_of_batch,
            on_train_batch_end=lambda trainer, *_: self._requeue_if_due(trainer),
        )  # fmt: skip
        trainer.callbacks = [first, *trainer.callbacks, last]

    def _catch_signals(self, trainer: Any) -> None:
        """A signal stops all ranks after the same batch, instead of this one after its own."""
        connector: Any = trainer._signal_connector  # noqa: SLF001 - no public way

        def on_sigterm(signum: int, _frame: Any) -> None:
            if self._hears_no_more:
                # Whatever was to be saved is, and nobody would ever look at a note.
                end_by(signum)
            self._ask(END)

        # Lightning takes them as handlers when the loops begin.
        connector._sigterm_notifier_fn = on_sigterm  # noqa: SLF001
        connector._slurm_sigusr_handler_fn = lambda *_: self._ask(REQUEUE)  # noqa: SLF001

    def _ask(self, word: str) -> None:
        self._run.stop.ask(word, str(self._run.global_rank))

    def _on_agreed(self, word: str) -> None:
        if word == REQUEUE:
            self._requeues = True
            return
        if self._run.is_global_zero:
            rank = self._run.stop.asked_rank(END)
            log.warning("SIGTERM to rank %s: all ranks stop after this batch", rank)
        self._run.trainer._signal_connector.received_sigterm = True  # noqa: SLF001

    def end_if_asked(self) -> None:
        """After the last batch of a run no header tells of a signal; every rank calls it."""
        stop = self._run.stop
        if self._run.reduce_boolean_decision(stop.was_asked, all=False):
            stop.hear(END)
        self._evaluator.end_if_agreed()
        self._hears_no_more = True
        if stop.was_asked:  # after all have said that nobody was
            end_by(signal.SIGTERM)

    def _requeue_if_due(self, trainer: Any) -> None:
        """Save and requeue, as Lightning does it in the signal handler of each rank on its own."""
        if self._requeues:
            self._requeues = False
            connector = trainer._signal_connector  # noqa: SLF001
            type(connector)._slurm_sigusr_handler_fn(connector, signal.SIGUSR1, None)  # noqa: SLF001


_PHASES = {
    "on_sanity_check_end": "the transition from the sanity check to training step {step}",
    "on_train_epoch_start": "the beginning of epoch {epoch}",
    "on_train_batch_start": "training step {step}{plans}",
    "on_validation_batch_start": "batch {index} of the validation",
    "on_validation_end": "the transition from the validation to training step {step}",
    "on_test_batch_start": "batch {index} of the test",
    "on_predict_batch_start": "batch {index} of the prediction",
    "on_train_epoch_end": "the end of epoch {epoch}",
    "on_train_end": "the end of the training",
}


def phase_hooks(run: Run) -> dict[str, Callable[..., None]]:
    """Hooks of a callback before all others: they note what this rank does, for messages."""

    def entering(text: str) -> Callable[..., None]:
        def hook(
            trainer: Any, _module: Any = None, _batch: Any = None, index: int = 0, *_: Any
        ) -> None:
            plans = ", which captures and plans" if run.engine is None else ""
            step, epoch = trainer.global_step + 1, trainer.current_epoch
            HERE.enter(text.format(step=step, epoch=epoch, index=index, plans=plans))

        return hook

    hooks = {name: entering(text) for name, text in _PHASES.items()}
    return {**hooks, "on_save_checkpoint": lambda *_: HERE.interrupt(SAVING)}
