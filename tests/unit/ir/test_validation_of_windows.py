from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.ir.validation import validate_window

TWO_BATCHES = """\
0E 1T0 1F0 0L 1B0 1T0+1 1F0+1 0L+1 1B0+1 0O
1E 1D 0T0 0F0 1D+1 0T0+1 0F0+1 0B0 0B0+1 1O"""


@pytest.fixture
def whole(make_pipeline: Any) -> Schedule:
    return replace(Schedule.parse(TWO_BATCHES, make_pipeline(2, 1, 1)), asynchronous=True)


def _with(whole: Schedule, rank: int, text: str, instead: str) -> Schedule:
    """The window with other actions on a rank."""
    ranks = list(whole.ranks)
    words = " ".join(map(str, ranks[rank])).split()
    found = " ".join(instead if word == text else word for word in words).split()
    ranks[rank] = tuple(map(Action.parse, found))
    return replace(whole, ranks=tuple(ranks))


def test_a_whole_window_is_valid(whole: Schedule) -> None:
    validate_window(whole, 2)


@pytest.mark.parametrize(
    ("rank", "text", "instead", "fault"),
    [
        (1, "0F0+1", "", "0F0\\+1 is missing"),
        (0, "1T0+1", "", "1T0\\+1 is missing"),
        (0, "0L+1", "", "0L\\+1 is missing"),
        (1, "1D", "", "1D is missing"),
        (0, "1F0", "1F0 1F0", "1F0 appears 2 times"),
        (0, "1B0+1", "1B0+1 1B0+2", "1B0\\+2 does not belong in this window"),
        (0, "1F0", "0L", "0L appears 2 times"),
        (0, "0O", "0O 0E", "after its optimizer step"),
    ],
)
def test_what_a_window_lacks_or_has_too_much_of_is_refused(
    whole: Schedule, rank: int, text: str, instead: str, fault: str
) -> None:
    with pytest.raises(ScheduleError, match=fault):
        validate_window(_with(whole, rank, text, instead), 2)


def test_a_window_of_other_batches_is_refused(whole: Schedule) -> None:
    with pytest.raises(ScheduleError, match="does not belong in this window"):
        validate_window(whole, 1)


def test_a_window_that_waits_for_itself_is_refused(whole: Schedule) -> None:
    first, second = whole.ranks
    ends = (first[0], *reversed(first[1:-1]), first[-1])
    with pytest.raises(ScheduleError, match="which it waits for"):
        validate_window(replace(whole, ranks=(ends, second)), 2)


def test_offsets_behind_are_printed_and_read() -> None:
    assert str(Action(Op.WEIGHT_BACKWARD, 2, 0, -1)) == "2W0-1"
    assert Action.parse("2W0-1") == Action(Op.WEIGHT_BACKWARD, 2, 0, -1)
