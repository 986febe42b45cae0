"""What steps ask about how far a training is."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from lightning_tspipe.strategy.training.positions import (
    Questions,
    answers,
    noting,
    positions_noted,
)


@pytest.mark.parametrize(
    ("ask", "changes"),
    [
        (lambda n: n >= 10, [10]),
        (lambda n: 100 - n <= 90, [10]),
        (lambda n: n % 4 == 0, [1, 4, 5, 8, 9, 12, 13]),
        (lambda n: n / 20 < 0.25, [5]),
        (lambda n: (100 - n) // 2 > 45, [9]),
        (bool, [1]),
        (lambda n: max(n, 3) > 5, [3]),  # from there on, it asks again
        (lambda n: math.cos(n / 10) * n, []),
        (lambda n: f"{n:03d}" + str([0] * n), []),
        (lambda n: n == "a", []),
    ],
)
def test_where_answers_change(ask: Callable[[Any], Any], changes: list[int]) -> None:
    asked: Questions = {}
    given = ask(noting(0, "n", asked))
    assert given == ask(0)
    asked = dict.fromkeys(pickle.loads(pickle.dumps(list(asked))))  # noqa: S301
    found = [answers(asked, {"n": n}) for n in range(15)]
    assert [n for n in range(1, 15) if found[n] != found[n - 1]] == changes


def test_what_can_not_be_asked_everywhere() -> None:
    asked: Questions = {}
    assert 6 % noting(4, "n", asked) == 2
    assert answers(asked, {"n": 0}) == (None,)
    assert answers(asked, {"n": 3}) == (False,)


class Trainer:
    steps = 3

    @property
    def global_step(self) -> int:
        return self.steps


def test_a_trainer_is_as_before() -> None:
    asked: Questions = {}
    trainer = Trainer()
    with positions_noted(trainer, ("global_step",), asked):
        assert isinstance(trainer, Trainer)
        assert trainer.global_step > 2
        assert trainer.steps == 3
    assert type(trainer) is Trainer
    assert type(trainer.global_step) is int
    assert answers(asked, {"global_step": 2}) == (False,)
