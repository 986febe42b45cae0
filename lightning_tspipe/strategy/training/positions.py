"""How far a training is, as numbers that note what a step asks about them.

::

    if self.global_step >= 1000:        noted: global_step >= 1000, which it was not
    if batch_idx % 100 == 0:            noted: batch_idx % 100 == 0, which it was
    momentum = 0.99 + 1e-6 * self.global_step          not noted: nothing is decided

As long as all that was noted has the same answers, a step goes the same way.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning_tspipe.capture.trace import Step

Expression = Any
"""The name of a position, a number, or an operation: (function, expressions...); it is pickled."""
Questions = dict[Expression, None]

_COMPUTING = ("add", "sub", "mul", "truediv", "floordiv", "mod")
_COMPARING = ("lt", "le", "eq", "ne", "ge", "gt")


def answers(asked: Questions, positions: Mapping[str, int]) -> tuple[bool | None, ...]:
    """What some questions have as answers at some positions; None: they can't be asked there."""
    found: list[bool | None] = []
    for question in asked:
        try:
            found.append(bool(_value(question, positions)))
        except ArithmeticError:
            found.append(None)
    return tuple(found)


def _value(expression: Expression, positions: Mapping[str, int]) -> Any:
    if isinstance(expression, str):
        return positions[expression]
    if isinstance(expression, tuple):
        function, *given = expression
        return function(*(_value(each, positions) for each in given))
    return expression


class _Noting:
    """A number that knows how it was made, and notes what it is asked."""

    made: Expression
    asked: Questions

    def __bool__(self) -> bool:
        return self._asked(operator.truth, self)

    def _asked(self, function: Callable[..., Any], *given: Any) -> bool:
        self.asked[function, *map(_made, given)] = None
        return bool(function(*map(_plain, given)))


class _Int(_Noting, int):
    __hash__ = int.__hash__


class _Float(_Noting, float):
    __hash__ = float.__hash__


def _made(value: Any) -> Expression:
    return value.made if isinstance(value, _Noting) else value


def _plain(value: Any) -> Any:
    if isinstance(value, _Int):
        return int.__pos__(value)
    return float.__pos__(value) if isinstance(value, _Float) else value


def noting(value: float, made: Expression, asked: Questions) -> Any:
    """A number, made by an expression, that adds to what is asked."""
    found: Any = _Int(value) if isinstance(value, int) else _Float(value)
    found.made, found.asked = made, asked
    return found


def _computing(function: Callable[..., Any], *, swapped: bool) -> Callable[[Any, Any], Any]:
    def compute(self: _Noting, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        given = (other, self) if swapped else (self, other)
        result = function(*map(_plain, given))
        return noting(result, (function, *map(_made, given)), self.asked)

    return compute


def _comparing(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def compare(self: _Noting, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        return self._asked(function, self, other)

    return compare


for _kind in (_Int, _Float):
    for _name in _COMPUTING:
        _function = getattr(operator, _name)
        setattr(_kind, f"__{_name}__", _computing(_function, swapped=False))
        setattr(_kind, f"__r{_name}__", _computing(_function, swapped=True))
    for _name in _COMPARING:
        setattr(_kind, f"__{_name}__", _comparing(getattr(operator, _name)))


@contextmanager
def positions_noted(trainer: Any, names: tuple[str, ...], asked: Questions) -> Iterator[None]:
    """While inside, a Trainer's positions note what they are asked.

    Args:
        trainer: The Trainer.
        names: Of its properties, such as ``global_step``.
        asked: Gets the questions.
    """
    kind = type(trainer)

    def noted(name: str) -> property:
        return property(lambda self: noting(getattr(kind, name).fget(self), name, asked))

    heir = type(kind.__name__, (kind,), {name: noted(name) for name in names})
    trainer.__class__ = heir  # properties are of classes
    try:
        yield
    finally:
        trainer.__class__ = kind


def updates_until(trainer: Any, offset: int) -> int:
    """How many updates there will have been when a later batch begins, as things are.

    Args:
        trainer: The Trainer, in a step.
        offset: How many batches later.
    """
    loop, every = trainer.fit_loop.epoch_loop, trainer.accumulate_grad_batches
    ready, length = loop.batch_progress.current.ready, trainer.fit_loop.max_batches
    updates = 0
    for number in range(ready, ready + offset):
        in_epoch = number if math.isinf(length) else (number - 1) % int(length) + 1
        is_last = in_epoch == length or (number == ready and loop.batch_progress.is_last_batch)
        updates += is_last or in_epoch % every == 0
    return updates


def as_of(trainer: Any, updates: int, step: Step) -> Step:
    """A step that sees the ``global_step`` that there will be some updates later."""
    made = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total

    def run(batch: Any) -> Any:
        made.completed += updates
        try:
            return step(batch)
        finally:
            made.completed -= updates

    return run
