from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.dependencies import depends_on
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.schedules.tspipe import tspipe

STEADY = """\
0E 1F0 1F1 0L 1B1 1B0 1T0+1 1T1+1 0O
1E 1D 1D+1 0F0 0F1 0T0+1 0T1+1 0B1 0B0 1O"""


def needs(text: str, pipeline: Any, *split: int) -> list[str]:
    return [
        f"{need.producer} {need.payload}"
        for need in depends_on(Action.parse(text), pipeline, frozenset(split))
    ]


def test_dependencies(make_pipeline: Any) -> None:
    pipeline = make_pipeline(2, 1, 2)
    assert needs("0F1", pipeline) == ["1D input"]
    assert needs("0T1+1", pipeline) == ["1D+1 input"]
    assert needs("1T1+1", pipeline) == ["0T1+1 activation"]
    assert needs("0L", pipeline) == [
        "1D batch", "1F0 output", "1F1 output", "1T0 output", "1T1 output"
    ]  # fmt: skip
    assert needs("1B0", pipeline) == ["1F0 saved", "0L gradient"]
    assert needs("0B0", pipeline) == ["0F0 saved", "1B0 gradient"]
    assert needs("0B0", pipeline, 1) == ["0F0 saved", "1I0 gradient"]
    assert needs("1W0", pipeline, 1) == ["1I0 saved"]
    assert needs("0E", pipeline) == needs("0O", pipeline) == []


def test_a_tap_brings_its_gradient_from_the_loss(make_pipeline: Any) -> None:
    pipeline = make_pipeline(2, 1, 1, outputs=frozenset({0}))
    assert needs("0B0", pipeline) == ["0F0 saved", "1B0 gradient", "0L gradient"]
    assert "0F0 output" in needs("0L", pipeline)


def test_schedule_prints_and_parses(make_pipeline: Any) -> None:
    pipeline = make_pipeline(2, 1, 2)
    schedule = Schedule.parse(STEADY, pipeline)
    assert schedule == tspipe(pipeline, teacher_now=False, teacher_next=True)
    assert str(schedule) == STEADY
    assert schedule.split == frozenset()
    with pytest.raises(ScheduleError, match="1 lines for 2 ranks"):
        Schedule.parse("0E", pipeline)


def test_messages_of_a_steady_step(make_pipeline: Any) -> None:
    program = Schedule.parse(STEADY, make_pipeline(2, 1, 2))
    sent = {str(action): list(map(str, messages)) for action, messages in program.sends.items()}
    assert sent == {
        "1D": ["1D>0L@0"],
        "0F0": ["0F0>1F0@0"],
        "0F1": ["0F1>1F1@0"],
        "0T0+1": ["0T0+1>1T0+1@0"],
        "0T1+1": ["0T1+1>1T1+1@0"],
        "1B1": ["1B1>0B1@1"],
        "1B0": ["1B0>0B0@1"],
    }
    assert [str(m) for m in program.receives[1]] == ["1B1>0B1@1", "1B0>0B0@1"]


def test_teacher_outputs_travel_in_the_step_that_makes_them(make_pipeline: Any) -> None:
    # The only teacher stage is on the data rank: its outputs go to the loss of the next step.
    pipeline = make_pipeline(2, 1, 1, teacher_ranks=(1,))
    program = tspipe(pipeline, teacher_now=False, teacher_next=True)
    (message,) = program.sends[Action.parse("0T0+1")]
    assert str(message) == "0T0+1>0L+1@0"
    assert message.channel == (1, 0, "output", True)
    last = tspipe(pipeline, teacher_now=False, teacher_next=False)
    assert Counter(m.payload for m in last.messages) == {"batch": 1, "activation": 1, "gradient": 1}


def test_rank_wide_ops_have_no_unit() -> None:
    with pytest.raises(ScheduleError, match="takes no unit"):
        Action(Op.LOSS, 0, 1)
    with pytest.raises(ScheduleError, match="needs a unit"):
        Action(Op.FORWARD, 0)


def test_nobody_waits_for_gradients_of_a_program_without_backwards(make_pipeline: Any) -> None:
    # The loss reads what is on another rank, too: gradients would travel there.
    pipeline = make_pipeline(2, 1, 1, outputs=frozenset({0}), teacher=False)
    program = Schedule.parse("1F0 0L\n1D 0F0", pipeline)
    assert {message.payload for message in program.messages} == {"batch", "activation", "output"}
