"""Workers that are started as functions (``spawn``, ``fork``), not as scripts.

Lightning handles exceptions where ``fit`` was called, which is not in the worker: there nobody
would tell the other ranks, and the parent reports whichever process ended first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_tspipe.strategy.worlds import installed_worlds, world_of


@dataclass
class InWorker:
    """A function of a Trainer, such as its fit, that handles exceptions as a script would."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it.

        Raises:
            BaseException: Whatever the function raises, when callbacks and ranks know of it.
        """
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
