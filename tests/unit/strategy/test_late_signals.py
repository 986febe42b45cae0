"""A SIGTERM while the ranks ask each other, after the last batch, whether one got a SIGTERM."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_tspipe.runtime.faults.stopping import Stop
from lightning_tspipe.strategy.shutdown import shutdown
from lightning_tspipe.strategy.training.evaluating import Evaluator


class Asking:
    """A rank at the end of its training; the signal comes while it waits for the other ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, others_were_asked: bool) -> None:
        self.ends: list[int] = []
        monkeypatch.setattr(shutdown, "end_by", self.ends.append)
        self._connector = SimpleNamespace()
        self._others_were_asked = others_were_asked
        trainer: Any = SimpleNamespace(callbacks=[], _signal_connector=self._connector)
        self.run: Any = SimpleNamespace(
            stop=Stop(), global_rank=1, reduce_boolean_decision=self._decide, trainer=trainer,
            namespace=SimpleNamespace(sigterm_exception=SIGTERMException),
        )  # fmt: skip
        evaluator: Any = Evaluator.__new__(Evaluator)
        evaluator._run = self.run
        self.shutdown = shutdown.Shutdown(self.run, None, evaluator)
        self.shutdown._catch_signals(trainer)

    def get_signal(self) -> None:
        self._connector._sigterm_notifier_fn(signal.SIGTERM, None)

    def _decide(self, mine: bool, *, all: bool) -> bool:  # noqa: A002 - Lightning's
        assert not mine
        assert not all
        self.get_signal()
        return self._others_were_asked


def test_it_ends_with_the_others_if_one_of_them_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Asking(monkeypatch, others_were_asked=True)
    with pytest.raises(SIGTERMException):
        rank.shutdown.end_if_asked()
    rank.get_signal()  # in the middle of saving
    assert not rank.ends


def test_it_ends_at_once_if_nobody_else_was(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Asking(monkeypatch, others_were_asked=False)
    rank.shutdown.end_if_asked()
    assert rank.ends == [signal.SIGTERM]
    rank.get_signal()
    assert rank.ends == [signal.SIGTERM] * 2
