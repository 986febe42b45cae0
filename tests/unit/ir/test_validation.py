from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.ir.validation import draw, validate
from lightning_tspipe.schedules.gpipe import gpipe
from lightning_tspipe.schedules.tspipe import tspipe
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.simulator import simulate
from tests.unit.versions import versions

STEADY = """\
0E 1F0 1F1 0L 1B1 1B0 1T0+1 1T1+1 0O
1E 1D 1D+1 0F0 0F1 0T0+1 0T1+1 0B1 0B0 1O"""


def changed(make_pipeline: Any, old: str, new: str, text: str = STEADY) -> Schedule:
    assert old in text
    return Schedule.parse(text.replace(old, new), make_pipeline(2, 1, 2))


def test_students_that_read_the_teacher_wait_for_a_prologue(make_pipeline: Any) -> None:
    fed = replace(make_pipeline(2, 1, 2), is_fed=True)
    text = STEADY.replace("1D+1", "1D+1 1P")
    validate(Schedule.parse(text, fed))
    with pytest.raises(ScheduleError, match="1P is missing"):
        validate(Schedule.parse(STEADY, fed))
    with pytest.raises(ScheduleError, match="1P does not belong"):
        validate(Schedule.parse(text, make_pipeline(2, 1, 2)))
    with pytest.raises(ScheduleError, match="rank 1 has 0F0 before 1P"):
        validate(Schedule.parse(STEADY.replace("0F1 0T", "0F1 1P 0T"), fed))
    # The last stage of the teacher is on rank 0, which sends what it gives.
    sent = {str(message) for message in Schedule.parse(text, fed).messages}
    assert {"1T0+1>1P+1@1", "1T1+1>1P+1@1"} <= sent


def test_the_unchanged_step_is_valid(make_pipeline: Any) -> None:
    schedule = changed(make_pipeline, "", "")
    validate(schedule)


@pytest.mark.parametrize(
    ("old", "new", "message", "marked"),
    [
        ("1F1 0L", "0L 1F1", "rank 0 has 0L before 1F1", {"0L", "1F1"}),
        (" 1T1+1", "", r"1T1\+1 is missing", {"1T0+1"}),
        ("1B1 1B0", "1B1", "1B0 is missing", {"1B1"}),
        ("1B1 1B0", "1B1 1B0 1B0", "1B0 appears 2 times", {"1B0"}),
        ("1B1 1B0", "1B1 1B0 1W0", "1W0 does not belong", {"1W0"}),
        ("1B1", "1I1", "1I0 is missing", {"1I1"}),
        ("0E 1F0", "1F0 0E", "runs 1F0 before its effects", {"1F0"}),
        ("1T1+1 0O", "0O 1T1+1", r"runs 1T1\+1 after its optimizer", {"1T1+1"}),
        ("0L", "0L 0F0", "0F0 belongs to rank 1", {"0F0"}),
        ("0L", "0L 2F0", "2F0: no such stage or unit", {"2F0"}),
        ("0L", "0L 1F2", "1F2: no such stage or unit", {"1F2"}),
        ("1D+1 ", "", r"1D\+1 is missing", {"1D"}),
        ("1D 1D+1 0F0", "1D+1 0F0 1D", "rank 1 has 0F0 before 1D", {"0F0", "1D"}),
        ("0T0+1", "0T0+2", r"0T0\+1 is missing", {"0T1+1"}),
    ],
)
def test_marks_what_is_wrong(
    make_pipeline: Any, old: str, new: str, message: str, marked: set[str]
) -> None:
    schedule = changed(make_pipeline, old, new)
    with pytest.raises(ScheduleError, match=message) as caught:
        validate(schedule)
    shown = str(caught.value).split("\n", 1)[1]
    if marked != {"1D"}:  # nothing is left of the row to point at
        assert shown == draw(schedule, [a for r in schedule.ranks for a in r if str(a) in marked])
        assert "^" in shown


def test_names_a_circle(make_pipeline: Any) -> None:
    text = """\
0E 1F0 1F1 1T0+1 1T1+1 0L 1B1 1B0 0O
1E 1D 1D+1 0F0 0F1 0B1 0B0 0T0+1 0T1+1 1O"""
    with pytest.raises(ScheduleError, match="wait for each other for ever") as caught:
        validate(changed(make_pipeline, "", "", text))
    assert str(caught.value) == (
        "the ranks wait for each other for ever: rank 0 at 1T0+1 for 0T0+1; rank 1 at 0B1 for 1B1\n"
        "rank 0: 0E 1F0 1F1 1T0+1 1T1+1 0L 1B1 1B0 0O\n"
        "                   ^^^^^\n"
        "rank 1: 1E 1D 1D+1 0F0 0F1 0B1 0B0 0T0+1 0T1+1 1O\n"
        "                           ^^^"
    )


def test_the_number_of_ranks(make_pipeline: Any) -> None:
    schedule = Schedule(make_pipeline(2, 1, 1), ((),))
    with pytest.raises(ScheduleError, match="has 1 ranks, the pipeline 2"):
        validate(schedule)


def test_the_teacher_runs_once_across_the_step_boundary(make_pipeline: Any) -> None:
    pipeline = make_pipeline(2, 2, 1)
    first = tspipe(pipeline, teacher_now=True, teacher_next=True)
    steady = tspipe(pipeline, teacher_now=False, teacher_next=True)
    last = tspipe(pipeline, teacher_now=False, teacher_next=False)
    versions([first, steady, steady, last])
    with pytest.raises(ScheduleError, match="is done twice"):
        versions([first, first, last])
    with pytest.raises(ScheduleError, match="wait for each other for ever"):
        versions([first, last, last])


@given(data=st.data())
def test_validation_and_simulation_agree_on_deadlocks(
    make_pipeline: Any, data: st.DataObject
) -> None:
    schedule = gpipe(make_pipeline(2, 1, 2))
    inner = data.draw(st.permutations(schedule.ranks[0][1:-1]))
    first, last = schedule.ranks[0][0], schedule.ranks[0][-1]
    shuffled = replace(schedule, ranks=((first, *inner, last), schedule.ranks[1]))
    try:
        simulate([shuffled], CostTable.uniform(schedule.pipeline))
    except ScheduleError:
        with pytest.raises(ScheduleError, match=r"which it waits for|for ever"):
            validate(shuffled)
    else:
        validate(shuffled)
