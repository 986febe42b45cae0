"""What one rank did when: a few clock readings per action, while a window of steps is recorded."""

from __future__ import annotations

import time

import torch

from lightning_tspipe.ir.action import Action
from lightning_tspipe.simulation.timeline import Pause, Span


class Recorder:
    """Notes actions and pauses while it is on.

    On a GPU each note waits for what was queued before, so that times are those of the device.

    Attributes:
        is_on: Whether a window is being recorded.
    """

    def __init__(self) -> None:
        self.is_on = False
        # Texts and spans are made of them afterwards, when nobody waits.
        self._ran: list[tuple[Action, int, float, float, tuple[int, ...]]] = []
        self._paused: list[tuple[str, float, float]] = []

    def start(self) -> None:
        """Begin a window; what was recorded before is forgotten."""
        self._ran, self._paused = [], []
        self.is_on = True

    def stop(self) -> None:
        """End the window."""
        self.is_on = False

    def ran(self, step: int, action: Action, started: float, *read: int) -> None:
        """An action of a step ran from ``started`` until now.

        Args:
            step: The step.
            action: The action.
            started: When it began.
            read: Where there are several versions of the weights, the one that it read, and how
                many updates were predicted on top of it.
        """
        if self.is_on:
            self._ran.append((action, step, started, _now(), read))

    def paused(self, reason: str, started: float) -> None:
        """From ``started`` until now, the rank did something between actions.

        See :class:`~lightning_tspipe.simulation.timeline.Pause` for the reasons.
        """
        if self.is_on:
            self._paused.append((reason, started, _now()))

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The actions of the window."""
        return tuple(
            Span(rank, str(action), action.op.value, step, started, ended, *read)
            for action, step, started, ended, read in self._ran
        )

    def pauses(self, rank: int) -> tuple[Pause, ...]:
        """The pauses of the window."""
        return tuple(Pause(rank, reason, started, ended) for reason, started, ended in self._paused)


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return time.perf_counter()
