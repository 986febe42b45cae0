"""Workers that are started as functions (``spawn``, ``fork``), not as scripts.

Lightning handles exceptions where ``fit`` was called, which is not in the worker: there nobody
would tell the other ranks, and the parent reports whichever process ended first.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from lightning_tspipe.strategy.worlds import installed_worlds, world_of


class _PassedOn:
    """A SIGTERM is one to the workers, which stop together; then it ends the parent too.

    Ended at once, the parent would take the workers with it before they could save.

    Args:
        launcher: Knows the workers.
    """

    def __init__(self, launcher: Any) -> None:
        self._launcher = launcher
        self._previous = signal.getsignal(signal.SIGTERM)
        self._signum = 0

    def __call__(self, signum: int, _frame: Any) -> None:
        """Handle the signal."""
        if self._launcher.procs:
            self._signum = signum
            self._launcher.kill(signum)
        else:
            self.give_back()
            os.kill(os.getpid(), signum)

    def give_back(self) -> None:
        """Have the signal handled as before."""
        known = self._previous is not None
        signal.signal(signal.SIGTERM, self._previous if known else signal.SIG_DFL)

    @contextmanager
    def during(self) -> Iterator[None]:
        """Be the handler while inside."""
        signal.signal(signal.SIGTERM, self)
        try:
            yield
        finally:
            self.give_back()
            if self._signum:
                os.kill(os.getpid(), self._signum)


def _sigterm_passed_on(launcher: Any) -> AbstractContextManager[None]:
    if threading.current_thread() is not threading.main_thread():
        return nullcontext()  # only the main thread can do something about signals
    return _PassedOn(launcher).during()


@dataclass
class InWorker:
    """A function of a Trainer, such as its fit, that handles exceptions as a script would."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it.

        Raises:
            BaseException: Whatever the function raises, when callbacks and ranks know of it.
        """
        parents = signal.getsignal(signal.SIGTERM)
        if isinstance(parents, _PassedOn):  # inherited by a fork
            parents.give_back()
        try:
            return self.function(*args, **kwargs)
        except BaseException as exception:
            trainer = getattr(self.function, "__self__", None)
            if trainer is not None:
                world_of(trainer.strategy).interrupt(trainer, exception)
            raise


class _Launching:
    """The part of a launcher that gives workers their function."""

    _strategy: Any

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        """Start the workers and wait for them; what rank 0's returns."""
        self._strategy.have_workers_failed = False
        try:
            launch = super().launch  # type: ignore[misc]
            with _sigterm_passed_on(self):
                return launch(InWorker(function), *args, trainer=trainer, **kwargs)
        except BaseException:
            self._strategy.have_workers_failed = True
            raise


def _launcher_class(name: str, base: type) -> type:
    return type(name, (_Launching, base), {"__module__": __name__})


# Under their names, since they travel to the workers.
_NAMES = {world.name: f"Launcher{number}" for number, world in enumerate(installed_worlds())}
globals().update(
    {
        _NAMES[world.name]: _launcher_class(_NAMES[world.name], world.worker_launcher)
        for world in installed_worlds()
    }
)


def worker_launcher(strategy: Any, start_method: str) -> Any:
    """The launcher of a strategy whose workers are functions."""
    return globals()[_NAMES[world_of(strategy).name]](strategy, start_method=start_method)
