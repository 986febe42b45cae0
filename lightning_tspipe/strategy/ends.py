"""How a run ends other than well: a failure, a signal, a checkpoint that can't be read."""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_tspipe.errors import TransportError
from lightning_tspipe.runtime.failures import (
    Failures,
    end_with_this_process,
    first_line,
    waiting,
)
from lightning_tspipe.runtime.rendezvous import connecting_store
from lightning_tspipe.runtime.stopping import END, REQUEUE, Stop
from lightning_tspipe.strategy.checkpoints import CheckpointHooks
from lightning_tspipe.strategy.files import explain_damage, whole_files
from lightning_tspipe.strategy.worlds import world_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

log = logging.getLogger("lightning_tspipe")

_SIGTERM_EXIT_CODE = 128 + signal.SIGTERM
_HEAD_START = 2.0


class EndHooks(CheckpointHooks):
    """The part of the strategy that ends a run on all ranks, whatever the reason."""

    _failures: Failures | None
    _ends_together: bool
    _requeues: bool
    _has_told: bool
    have_workers_failed: bool
    _muted: list[Any]

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._stop = Stop(
            self._on_agreed, connecting_store() if self.total_ranks > 1 else None,
            self.replica, self.num_replicas,
            lambda: int(self._trainer.accumulate_grad_batches),
        )  # fmt: skip
        self._ends_together = self._requeues = self._has_told = False
        if self.total_ranks > 1:
            self._failures = self._make_failures()
            self._failures.watch()

    def _make_failures(self) -> Failures:
        # A launcher that starts functions tells of the process that ended first, and of no other.
        head_start = 0.0 if self._start_method == "popen" else _HEAD_START
        return Failures(self.global_rank, connecting_store(), head_start)

    # Failures

    @property
    def is_failing(self) -> bool:
        """Whether this rank ends by an exception that the others don't share.

        Then they may be gone: nothing can be collected from them, and nobody is to be waited for.
        """
        # Its property raises where it is not attached yet, as in the parent of workers.
        trainer = getattr(self.lightning_module, "_trainer", None)
        interrupted = trainer is not None and trainer.interrupted
        failing = interrupted or self.have_workers_failed
        return self.total_ranks > 1 and failing and not self._ends_together

    def begin_end(self, exception: BaseException) -> None:
        """An exception has left the loops: before anything else, the other ranks get to know."""
        if self.total_ranks == 1:
            return
        is_sigterm = type(exception).__name__ == "SIGTERMException"  # of either Lightning
        self._ends_together = is_sigterm and self._stop.has_ended
        failures = self._failures = self._failures or self._make_failures()
        failures.end_watch()
        if not self._ends_together:
            failures.settle(exception, getattr(self._launcher, "procs", ()))
            if self._transport is not None:
                self._transport.close()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.begin_end(exception)
        for callback in self._muted:
            callback.save_on_exception = True
        self._muted = []
        if self.is_failing:
            self._transport = None  # the next run needs one that is open
        if self.total_ranks > 1 and type(exception).__name__ == "SIGTERMException":
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
        with waiting("saving a checkpoint"):
            super().save_checkpoint(checkpoint, filepath, storage_options)

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

    # Signals

    def prepare_ends(self, trainer: Any) -> None:
        """Let exceptions and signals be heard here first; once for each run."""
        if self.total_ranks == 1:
            return
        self._catch_signals(trainer)
        if any(getattr(callback, "is_end_hook", False) for callback in trainer.callbacks):
            return
        world = world_of(self)

        def on_exception(trainer: Any, _module: Any, exception: BaseException) -> None:
            self.begin_end(exception)
            if self.is_failing:
                self._mute(trainer)

        first = world.callback(is_end_hook=True, on_exception=on_exception)
        last = world.callback(
            is_end_hook=True, on_train_batch_end=lambda trainer, *_: self._requeue_if_due(trainer)
        )
        trainer.callbacks = [first, *trainer.callbacks, last]

    def _catch_signals(self, trainer: Any) -> None:
        """A signal stops all ranks after the same batch, instead of this one after its own."""
        connector: Any = trainer._signal_connector  # noqa: SLF001 - no public way

        def on_sigterm(signum: int, _frame: Any) -> None:
            self._stop.ask(END)
            if self._engine is None and not (trainer.training and self._stop.is_connected):
                # No step is going to come whose header would tell the others.
                if self._launcher is not None:
                    self._launcher.kill(signum)
                connector.received_sigterm = True

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

    def _requeue_if_due(self, trainer: Any) -> None:
        """Save and requeue, as Lightning does it in the signal handler of each rank on its own."""
        if self._requeues:
            self._requeues = False
            connector = trainer._signal_connector  # noqa: SLF001
            type(connector)._slurm_sigusr_handler_fn(connector, signal.SIGUSR1, None)  # noqa: SLF001
