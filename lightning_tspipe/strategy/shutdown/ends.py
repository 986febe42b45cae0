"""How a run ends other than well: a failure, a signal, a checkpoint that can't be read."""

from __future__ import annotations

import itertools
import logging
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_tspipe.errors import TransportError
from lightning_tspipe.runtime.faults.failures import (
    Failures,
    end_with_this_process,
    first_line,
    waiting,
)
from lightning_tspipe.runtime.faults.loader_workers import hear_of_children, let_children_end
from lightning_tspipe.runtime.faults.parents import watch_instead
from lightning_tspipe.runtime.faults.phases import HERE, SAVING
from lightning_tspipe.runtime.faults.rendezvous import Job, current_job, end_by, tell_before_the_end
from lightning_tspipe.runtime.faults.stopping import END, REQUEUE, Stop
from lightning_tspipe.strategy.checkpoints.files import explain_damage, whole_files
from lightning_tspipe.strategy.checkpoints.saving import CheckpointHooks
from lightning_tspipe.strategy.lightning.namespaces import world_of
from lightning_tspipe.strategy.lightning.phase_hooks import phase_hooks

if TYPE_CHECKING:
    from torch.optim import Optimizer

log = logging.getLogger("lightning_tspipe")

_SIGTERM_EXIT_CODE = 128 + signal.SIGTERM
_RUNS = itertools.count()
"""Of rank 0 only: the others may have begun runs that it never came to."""


class EndHooks(CheckpointHooks):
    """The part of the strategy that ends a run on all ranks, whatever the reason."""

    _failures: Failures | None
    _ends_together: bool
    _requeues: bool
    _has_told: bool
    _hears_no_more: bool
    have_workers_failed: bool
    _muted: list[Any]

    @override
    def setup_environment(self) -> None:
        HERE.enter("the start-up")
        self._failures = None
        super().setup_environment()
        self._ends_together = self._requeues = self._has_told = self._hears_no_more = False
        if self.total_ranks == 1:
            self._stop = Stop(self._on_agreed)
            return
        job, run = current_job(), self.broadcast(next(_RUNS))
        self._stop = self._make_stop(job, run)
        # In the first run, they have been looked after since they met.
        failures: Any = self._failures
        if failures is None:
            self._failures = self._make_failures(job, run)
            self._failures.watch()
            tell_before_the_end(self._failures.tell_of_signal)

    @override
    def watch_others(self, job: Job) -> Callable[[], bool]:
        failures = self._failures = self._make_failures(job)
        failures.watch()
        tell_before_the_end(failures.tell_of_signal)
        watch_instead()
        return failures.has_failed

    @override
    def reconnect(self, num_ranks: int) -> None:
        HERE.interrupt("moving to another mesh")
        super().reconnect(num_ranks)
        before = self._stop
        # Its own notes: replicas count their steps and evaluations anew.
        self._stop = self._make_stop(current_job(), self.broadcast(next(_RUNS)))
        if before.was_asked:
            self._stop.ask(END)
        HERE.go_on()

    def _make_stop(self, job: Job | None, run: int) -> Stop:
        return Stop(
            self._on_agreed, job.notes if job is not None else None, run=run, replica=self.replica,
            num_replicas=self.num_replicas,
            batches_per_update=lambda: int(self._trainer.accumulate_grad_batches),
            timeout=self._timeout,
        )  # fmt: skip

    def _make_failures(self, job: Job | None = None, run: int = -1) -> Failures:
        return Failures(
            self.global_rank, job, run, self._timeout.total_seconds(),
            getattr(self._launcher, "procs", ()),
            # A launcher that starts functions tells of the process that ended first, and no other.
            ends_last=self._start_method != "popen",
        )  # fmt: skip

    # Failures

    @property
    def is_failing(self) -> bool:
        """Whether this rank ends by an exception that the others don't share.

        Then they may be gone: nothing can be collected from them, and nobody is to be waited for.
        """
        # Its property raises where it is not attached yet, as in the parent of workers.
        trainer = getattr(self.lightning_module, "_trainer", None)
        interrupted = trainer is not None and trainer.interrupted
        failing = interrupted and self.total_ranks > 1 and not self._ends_together
        return failing or self.have_workers_failed

    def begin_end(self, exception: BaseException) -> None:
        """An exception has left the loops: before anything else, the other ranks get to know."""
        if self.total_ranks == 1 or self.have_workers_failed:  # those have told it themselves
            return
        self.set_world_ranks()  # a worker may fail before it has set up anything
        is_sigterm = type(exception).__name__ == "SIGTERMException"  # of either Lightning
        self._ends_together = is_sigterm and self._stop.has_ended
        failures = self._failures = self._failures or self._make_failures()
        if self._ends_together:
            failures.end_watch()
        else:
            let_children_end()
            failures.settle(exception, getattr(self._launcher, "procs", ()))
            if self._transport is not None:
                self._transport.close()

    def await_ends(self) -> None:
        """Where all ranks end together, or one is alone: until each has written what it writes."""
        self.end_writing(waits=True)
        self.finish_files()
        if self._failures is not None:
            self._failures.await_ends()

    def tell_now(self, exception: BaseException) -> bool:
        """Print why this rank ends, where nothing else would; whether because of another rank."""
        return self._failures is not None and self._failures.tell_now(exception)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.begin_end(exception)
        for callback in self._muted:
            callback.save_on_exception = True
        self._muted = []
        if self.is_failing:
            self._transport = None  # the next run needs one that is open
        if type(exception).__name__ == "SIGTERMException":
            assert isinstance(exception, SystemExit)
            # Not 0: whoever started the job must not take it for complete.
            exception.code = _SIGTERM_EXIT_CODE
            end_with_this_process(getattr(self._launcher, "procs", ()))

    def _mute(self, trainer: Any) -> None:
        """Keep checkpoint callbacks from saving, and from removing what they saved before."""
        for callback in trainer.checkpoint_callbacks:
            if getattr(callback, "save_on_exception", False):
                callback.save_on_exception = False
                self._muted.append(callback)
        if self._muted:
            self._tell_unsaved()

    def _tell_unsaved(self) -> None:
        if self.is_global_zero and self._transport is not None and not self._has_told:
            self._has_told = True
            log.warning(
                "no checkpoint of this failure: other ranks hold parts of the model, and they may "
                "be gone. The last checkpoint before it is complete"
            )

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.is_failing:
            return {}
        HERE.interrupt(SAVING)
        with waiting("collecting the weights"):
            return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self.is_failing:
            return {}
        with waiting("collecting the optimizer's state"):
            return super().optimizer_state(optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        if self.is_failing:
            self._tell_unsaved()
            return
        if self.is_torn:
            log.warning(
                "no checkpoint of this failure: it came in the middle of a batch, of which "
                "gradients, statistics or the teacher hold a part already. The last one is complete"
            )
            return
        HERE.interrupt(SAVING)
        with waiting(SAVING):
            super().save_checkpoint(checkpoint, filepath, storage_options)
        HERE.checkpoint = str(filepath)
        HERE.go_on()

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        with explain_damage(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only)

    @override
    def barrier(self, name: str | None = None) -> None:
        if self.is_failing:
            return
        try:
            super().barrier(name)
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.global_rank} waited at the barrier {name!r} for a rank that ended or "
                f"stalled ({first_line(error)})"
            ) from error

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self.is_failing else super().broadcast(obj, src)

    # Files

    @property  # type: ignore[explicit-override] # of the setter; it is below
    @override
    def checkpoint_io(self) -> Any:
        """How files are written: whole or not at all, unless the user brings a way."""
        found: Any = self._checkpoint_io
        if found is None:
            found = self._checkpoint_io = whole_files(self)
        elif not getattr(found, "_base_checkpoint_io_configured", True):
            found.checkpoint_io = whole_files(self)
        return found

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    def finish_files(self) -> None:
        """Wait for files that are still being written.

        Raises:
            Exception: One of them was not, and no rank has ended yet; later it is too late to say.
        """
        try:
            self.checkpoint_io.teardown()
        except Exception as error:
            if self._trainer.interrupted:
                if not self._has_told:
                    log.warning("a checkpoint was not saved: %s", first_line(error))
                return
            raise

    # Signals

    def prepare_ends(self, trainer: Any) -> None:
        """Let exceptions and signals be heard here first; once for each run."""
        hear_of_children()
        self._catch_signals(trainer)
        if any(getattr(callback, "is_end_hook", False) for callback in trainer.callbacks):
            return
        world = world_of(self)

        def on_exception(trainer: Any, _module: Any, exception: BaseException) -> None:
            self.begin_end(exception)
            if self.is_failing:
                self._mute(trainer)

        def end_of_batch(trainer: Any, *_: Any) -> None:
            # Lightning itself looks after training batches, and after all but the last of others.
            loop = trainer._active_loop  # noqa: SLF001
            if trainer.predicting or loop.batch_progress.is_last_batch:
                self.end_if_agreed()

        first = world.callback(
            is_end_hook=True, on_exception=on_exception,
            on_validation_start=lambda *_: self.begin_validation(), **phase_hooks(self),
        )  # fmt: skip
        last = world.callback(
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
            self._stop.ask(END)

        # Lightning takes them as handlers when the loops begin.
        connector._sigterm_notifier_fn = on_sigterm  # noqa: SLF001
        connector._slurm_sigusr_handler_fn = lambda *_: self._stop.ask(REQUEUE)  # noqa: SLF001

    def _on_agreed(self, word: str) -> None:
        if word == REQUEUE:
            self._requeues = True
            return
        if self.is_global_zero:
            log.warning("SIGTERM: all ranks stop after this batch")
        self._trainer._signal_connector.received_sigterm = True  # noqa: SLF001

    def _end_if_asked(self) -> None:
        """After the last batch of a run no header tells of a signal; every rank calls it."""
        self._hears_no_more = True
        if self.reduce_boolean_decision(self._stop.was_asked, all=False):
            self._stop.hear(END)
        self.end_if_agreed()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._end_if_asked()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self._trainer.state.fn != "fit":  # there, more steps follow
            self._end_if_asked()

    @override
    def on_test_end(self) -> None:
        super().on_test_end()
        self._end_if_asked()

    @override
    def on_predict_end(self) -> None:
        super().on_predict_end()
        self._end_if_asked()

    def _requeue_if_due(self, trainer: Any) -> None:
        """Save and requeue, as Lightning does it in the signal handler of each rank on its own."""
        if self._requeues:
            self._requeues = False
            connector = trainer._signal_connector  # noqa: SLF001
            type(connector)._slurm_sigusr_handler_fn(connector, signal.SIGUSR1, None)  # noqa: SLF001
