"""Shutdown: a failure or a signal on one rank ends the run on all of them."""

from __future__ import annotations

import itertools
import logging
import signal
from collections.abc import Callable
from typing import Any

from lightning_tspipe.runtime.faults.failures import Failures, end_with_this_process
from lightning_tspipe.runtime.faults.loader_workers import hear_of_children, let_children_end
from lightning_tspipe.runtime.faults.parents import watch_instead
from lightning_tspipe.runtime.faults.phases import HERE
from lightning_tspipe.runtime.faults.rendezvous import Job, current_job, end_by, tell_before_the_end
from lightning_tspipe.runtime.faults.stopping import END, REQUEUE, Stop
from lightning_tspipe.strategy.checkpoints.saving import CheckpointWriter
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.shutdown.phase_hooks import phase_hooks
from lightning_tspipe.strategy.training.evaluating import Evaluator

log = logging.getLogger("lightning_tspipe")

_SIGTERM_EXIT_CODE = 128 + signal.SIGTERM
_RUNS = itertools.count()
"""Of rank 0 only: the others may have begun runs that it never came to."""


class Shutdown:
    """Ends a run on all ranks, whatever the reason.

    Args:
        run: The run.
        saving: What is being written where a run ends.
        evaluator: Evaluations, which a signal ends too.
        starts_scripts: Whether the other processes are scripts, and not functions.
    """

    def __init__(
        self, run: Run, saving: CheckpointWriter, evaluator: Evaluator, *, starts_scripts: bool
    ) -> None:
        self._run = run
        self._saving = saving
        self._evaluator = evaluator
        self._starts_scripts = starts_scripts
        self._failures: Failures | None = None
        self._requeues = self._hears_no_more = False
        self._muted: list[Any] = []

    # The other ranks

    def begin(self) -> None:
        """A run begins: nothing is known of other ranks."""
        HERE.enter("the start-up")
        self._failures = None

    def watch(self, job: Job) -> Callable[[], bool]:
        """From now on the other ranks can be told apart: look after each other.

        Returns:
            Whether one of them is known to have failed.
        """
        failures = self._watch(job)
        watch_instead()
        return failures.has_failed

    def _watch(self, job: Job | None, run: int = -1) -> Failures:
        failures = self._failures = self._make_failures(job, run)
        failures.watch()
        tell_before_the_end(failures.tell_of_signal)
        return failures

    def connected(self) -> None:
        """The ranks have met, in this run or an earlier one."""
        run = self._run
        run.ends_together = self._requeues = self._saving.has_told = self._hears_no_more = False
        if run.total_ranks == 1:
            run.stop = Stop(self._on_agreed)
            return
        job, number = current_job(), run.broadcast(next(_RUNS))
        run.stop = self._make_stop(job, number)
        if self._failures is None:  # in the first run, they are watched since they met
            self._watch(job, number)

    def reconnected(self) -> None:
        """The ranks have other places: notes of their own, since steps are counted anew."""
        before = self._run.stop
        stop = self._run.stop = self._make_stop(current_job(), self._run.broadcast(next(_RUNS)))
        if before.was_asked:
            stop.ask(END)

    def _make_stop(self, job: Job | None, number: int) -> Stop:
        run = self._run
        return Stop(
            self._on_agreed, job.notes if job is not None else None, run=number,
            replica=run.replica, num_replicas=run.num_replicas,
            batches_per_update=lambda: int(run.trainer.accumulate_grad_batches),
            timeout=run.timeout,
        )  # fmt: skip

    def _make_failures(self, job: Job | None = None, run: int = -1) -> Failures:
        return Failures(
            self._run.global_rank, job, run, self._run.timeout.total_seconds(), self._procs,
            # A launcher that starts functions tells of the process that ended first, and no other.
            ends_last=not self._starts_scripts,
        )  # fmt: skip

    @property
    def _procs(self) -> Any:
        return getattr(self._run.lightning.launcher, "procs", ())

    # Failures

    def begin_end(self, exception: BaseException) -> None:
        """An exception has left the loops: before anything else, the other ranks get to know."""
        run = self._run
        if run.total_ranks == 1 or run.have_workers_failed:  # those have told it themselves
            return
        run.set_world_ranks()  # a worker may fail before it has set up anything
        is_sigterm = type(exception).__name__ == "SIGTERMException"  # of either Lightning
        run.ends_together = is_sigterm and run.stop.has_ended
        failures = self._failures = self._failures or self._make_failures()
        if run.ends_together:
            failures.end_watch()
        else:
            let_children_end()
            failures.settle(exception, self._procs)
            if run.has_transport:
                run.transport.close()

    def await_ends(self) -> None:
        """Where all ranks end together, or one is alone: until each has written what it writes."""
        self._saving.end_writing(waits=True)
        self._saving.finish_files()
        if self._failures is not None:
            self._failures.await_ends()

    def tell_now(self, exception: BaseException) -> bool:
        """Print why this rank ends, where nothing else would; whether because of another rank."""
        return self._failures is not None and self._failures.tell_now(exception)

    def on_exception(self, exception: BaseException) -> None:
        """The run ends by an exception, of which callbacks know by now."""
        self.begin_end(exception)
        for callback in self._muted:
            callback.save_on_exception = True
        self._muted = []
        if self._run.is_failing:
            self._run.transport = None  # the next run needs one that is open
        if type(exception).__name__ == "SIGTERMException":
            assert isinstance(exception, SystemExit)
            # Not 0: whoever started the job must not take it for complete.
            exception.code = _SIGTERM_EXIT_CODE
            end_with_this_process(self._procs)

    def _mute(self, trainer: Any) -> None:
        """Keep checkpoint callbacks from saving, and from removing what they saved before."""
        for callback in trainer.checkpoint_callbacks:
            if getattr(callback, "save_on_exception", False):
                callback.save_on_exception = False
                self._muted.append(callback)
        if self._muted:
            self._saving.tell_unsaved()

    def end_of_run(self) -> None:
        """The run is over, also by an exception: wait for files, then for ranks that are there."""
        run = self._run
        self._saving.end_writing(waits=not run.is_failing)
        self._saving.finish_files()
        if run.lightning.lightning_module is not None:
            # A process that ends takes what it sent with it, unless it has arrived.
            run.barrier("teardown")
        if self._failures is not None:
            self._failures.end_watch()

    # Signals

    def prepare(self, trainer: Any) -> None:
        """Let exceptions and signals be heard here first; once for each run."""
        hear_of_children()
        self._catch_signals(trainer)
        if any(getattr(callback, "is_end_hook", False) for callback in trainer.callbacks):
            return
        run, namespace = self._run, self._run.lightning.namespace

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
            self._run.stop.ask(END)

        # Lightning takes them as handlers when the loops begin.
        connector._sigterm_notifier_fn = on_sigterm  # noqa: SLF001
        connector._slurm_sigusr_handler_fn = lambda *_: self._run.stop.ask(REQUEUE)  # noqa: SLF001

    def _on_agreed(self, word: str) -> None:
        if word == REQUEUE:
            self._requeues = True
            return
        if self._run.is_global_zero:
            log.warning("SIGTERM: all ranks stop after this batch")
        self._run.trainer._signal_connector.received_sigterm = True  # noqa: SLF001

    def end_if_asked(self) -> None:
        """After the last batch of a run no header tells of a signal; every rank calls it."""
        self._hears_no_more = True
        if self._run.decide(self._run.stop.was_asked, unanimous=False):
            self._run.stop.hear(END)
        self._evaluator.end_if_agreed()

    def _requeue_if_due(self, trainer: Any) -> None:
        """Save and requeue, as Lightning does it in the signal handler of each rank on its own."""
        if self._requeues:
            self._requeues = False
            connector = trainer._signal_connector  # noqa: SLF001
            type(connector)._slurm_sigusr_handler_fn(connector, signal.SIGUSR1, None)  # noqa: SLF001
