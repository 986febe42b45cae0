"""The executor: walks one rank's actions of a step, by one table of handlers.

::

    for action in schedule:  wait for what it needs ──► handlers[op] ──► send what it made
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.runtime.execution.context import StepContext
from lightning_tspipe.runtime.recording import Recorder

Handler = Callable[[Any, Action], bool | None]
"""Runs an action of a step; False if that is not over yet, or was no work of its own."""


class Exchange(ABC):
    """What moves between ranks, before and after the actions of a step."""

    @abstractmethod
    def take(self, step: Any, action: Action) -> None:
        """Wait until what an action needs of other ranks is here."""

    @abstractmethod
    def send(self, step: Any, action: Action) -> None:
        """Send what an action has made to whoever waits for it."""


class Executor:
    """Runs the actions of one rank.

    Args:
        handlers: What runs each op; ops that have none are left out.
        exchange: How actions get what others made.
        recorder: Notes when what ran.
        read: Of an action, the version of the weights that it has read and the updates predicted
            on top of it; empty where there is only one version.
    """

    def __init__(
        self,
        handlers: Mapping[Op, Handler],
        exchange: Exchange,
        recorder: Recorder,
        read: Callable[[Action], tuple[int, int] | tuple[()]] = lambda _: (),
    ) -> None:
        self._handlers = handlers
        self._exchange = exchange
        self._recorder = recorder
        self._read = read

    def run(self, step: StepContext, actions: Sequence[Action]) -> None:
        """Run some of the step's actions, in order."""
        for action in actions:
            handler = self._handlers.get(action.op)
            if handler is None or not step.runs(action):
                continue
            self._exchange.take(step, action)
            started = time.perf_counter()
            if handler(step, action) is not False:
                self._recorder.ran(step.index, action, started, *self._read(action))
                self._exchange.send(step, action)
