from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.lowering import Program, lower
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.ir.validation import draw, validate, weight_versions
from lightning_tspipe.schedules.gpipe import gpipe
from lightning_tspipe.schedules.tspipe import tspipe
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.simulator import simulate

STEADY = """\
0E 1F0 1F1 0L 1B1 1B0 1T0+1 1T1+1 0O
1E 1D 1D+1 0F0 0F1 0T0+1 0T1+1 0B1 0B0 1O"""


def changed(make_pipeline: Any, old: str, new: str, text: str = STEADY) -> Schedule:
    assert old in text
    return Schedule.parse(text.replace(old, new), make_pipeline(2, 1, 2))


def test_the_unchanged_step_is_valid(make_pipeline: Any) -> None:
    schedule = changed(make_pipeline, "", "")
    validate(schedule, before=schedule)
    validate(lower(schedule))


@pytest.mark.parametrize(
    ("old", "new", "message", "marked"),
    [
        ("1F1 0L", "0L 1F1", "rank 0 has 0L before 1F1", {"0L", "1F1"}),
        (" 1T1+1", "", r"1T1\+1 is missing", {"1T0+1"}),
        ("1B1 1B0", "1B1", "1B0 is missing", {"1B1"}),
        ("1B1 1B0", "1B1 1B0 1B0", "1B0 is there 2 times", {"1B0"}),
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
    validate(steady, before=first)
    validate(last, before=steady)
    validate(first, before=last)
    with pytest.raises(ScheduleError, match="already ran in the step before"):
        validate(first, before=steady)
    with pytest.raises(ScheduleError, match="nobody runs the teacher"):
        validate(steady, before=last)


def test_messages_keep_the_order_of_sending(make_pipeline: Any) -> None:
    program = lower(changed(make_pipeline, "", ""))
    first, second = (m for m in program.messages if m.producer.op is Op.BACKWARD)
    kept = [m for m in program.messages if m.producer.op is not Op.BACKWARD]
    with pytest.raises(ScheduleError, match="sends gradients to rank 1 in the order 1B1>0B1@1 "):
        validate(Program(program.schedule, (*kept, second, first)))
    with pytest.raises(ScheduleError, match="the program has 1B1>0B1@1\n"):
        validate(Program(program.schedule, (*kept, first)))
    # Channels are independent of each other.
    validate(Program(program.schedule, (first, second, *kept)))


def test_weight_versions(make_pipeline: Any) -> None:
    pipeline = make_pipeline(2, 1, 2)
    ahead = weight_versions(tspipe(pipeline, teacher_now=True, teacher_next=True))
    staleness = {str(action): action.batch - version for action, version in ahead.items()}
    assert {text for text, updates in staleness.items() if updates} == {
        "0T0+1", "0T1+1", "1T0+1", "1T1+1"
    }  # fmt: skip
    assert set(staleness.values()) == {0, 1}
    assert len(staleness) == 16
    # What a wrong order would read.
    text = "0E 1F0 0L 1B0 0O 1F1 1B1 1T0+1 1T1+1\n1T0 1E 1D 1O"
    wrong = weight_versions(Schedule.parse(text, pipeline))
    assert wrong[Action.parse("1F0")] == 0
    assert wrong[Action.parse("1F1")] == 1
    assert wrong[Action.parse("1T0")] == -1


@given(data=st.data())
def test_validation_and_simulation_agree_on_deadlocks(
    make_pipeline: Any, data: st.DataObject
) -> None:
    schedule = gpipe(make_pipeline(2, 1, 2))
    inner = data.draw(st.permutations(schedule.ranks[0][1:-1]))
    first, last = schedule.ranks[0][0], schedule.ranks[0][-1]
    shuffled = replace(schedule, ranks=((first, *inner, last), schedule.ranks[1]))
    try:
        simulate([lower(shuffled)], CostTable.uniform(schedule.pipeline))
    except ScheduleError:
        with pytest.raises(ScheduleError, match=r"which it waits for|for ever"):
            validate(shuffled)
    else:
        validate(lower(shuffled))
