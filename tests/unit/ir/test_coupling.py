"""Stages of the student that read the teacher: heads (fan-out) and blocks (blockwise)."""

from __future__ import annotations

import pytest

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Action
from lightning_tspipe.ir.dependencies import depends_on
from lightning_tspipe.ir.pipeline import Coupling, NetworkLayout, Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.ir.validation import validate
from lightning_tspipe.plain import from_plain, plain
from lightning_tspipe.schedules.sequential import sequential
from lightning_tspipe.schedules.tspipe import tspipe
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.simulator import simulate

BLOCKWISE = """\
0E 1T0 1F0 0L 1B0 0O
1E 1D 0T0 0F0 1L 0B0 1O"""


def network(*ranks: int, units: int = 1) -> NetworkLayout:
    return NetworkLayout(ranks, 1, units, frozenset(range(len(ranks))))


def fan(heads: tuple[int, ...], num_ranks: int = 2, units: int = 1) -> Pipeline:
    trunk = NetworkLayout(tuple(reversed(range(num_ranks))), 1, units, frozenset({num_ranks - 1}))
    return Pipeline(num_ranks, network(*heads), trunk, num_ranks - 1, coupling=Coupling.FANOUT)


def relay(units: int = 1) -> Pipeline:
    blocks = network(1, 0, units=units)
    return Pipeline(2, blocks, blocks, 1, coupling=Coupling.BLOCKWISE)


def needs(text: str, pipeline: Pipeline) -> list[str]:
    found = depends_on(Action.parse(text), pipeline)
    return [f"{need.producer} {need.payload}" for need in found]


def test_heads_wait_for_the_whole_output_of_the_trunk() -> None:
    pipeline = fan((0, 1, 1), units=2)
    assert pipeline.loss_ranks == (0, 1)
    assert pipeline.stages_of(1) == (1, 2)
    assert needs("0F0", pipeline) == needs("1F0", pipeline) == ["1T0 output", "1T1 output"]
    assert needs("2F0", pipeline) == ["1F0 saved"]  # it is on this rank already
    assert needs("1F0+2", pipeline) == ["1T0+2 output", "1T1+2 output"]
    assert needs("1L", pipeline) == ["1D batch", "1F0 output", "2F0 output"]
    assert needs("2B0", pipeline) == ["2F0 saved", "1L gradient"]
    assert needs("0T0", pipeline) == ["1D input"]


def test_blocks_read_what_the_teachers_read() -> None:
    pipeline = relay(units=2)
    assert pipeline.loss_ranks == (0, 1)
    assert needs("0F1", pipeline) == ["0T1 saved"]
    assert needs("1F1", pipeline) == ["1T1 saved"]
    assert needs("0L", pipeline) == [
        "1D batch", "1F0 output", "1F1 output", "1T0 output", "1T1 output"
    ]  # fmt: skip
    assert needs("1B1", pipeline) == ["1F1 saved", "0L gradient"]


def test_features_and_labels_travel_once_to_each_rank() -> None:
    pipeline = fan((0, 0, 1, 2, 2), num_ranks=3)
    text = """\
0E 2T0+1 0F0 1F0 0L 0B0 1B0 0O
1E 1T0+2 2F0 1L 2B0 1O
2E 2D 2D+3 0T0+3 3F0 4F0 2L 3B0 4B0 2O"""
    program = Schedule.parse(text, pipeline)
    validate(program)
    assert sorted(map(str, program.messages)) == [
        "0T0+3>1T0+3@1", "1T0+2>2T0+2@0", "2D>0L@0", "2D>1L@1", "2T0+1>2F0+1@1", "2T0+1>3F0+1@2"
    ]  # fmt: skip


def test_a_relay_sends_each_activation_once() -> None:
    program = Schedule.parse(BLOCKWISE, relay())
    validate(program)
    assert sorted(map(str, program.messages)) == ["0T0>1T0@0", "1D>0L@0"]
    ends = {span.action: span.end for span in simulate([program], _costs(relay())).spans}
    assert ends["1O"] == ends["0O"] - 1  # nobody waits for rank 0


def _costs(pipeline: Pipeline) -> CostTable:
    return CostTable.uniform(pipeline)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1F0 0L", "0L 1F0", "rank 0 has 0L before 1F0"),
        (" 1L", "", "1L is missing"),
        ("1T0 1F0", "1F0 1T0", "rank 0 has 1F0 before 1T0"),
        ("0L", "1L", "1L belongs to rank 1"),
        ("0T0", "0T0+2", r"1D\+2 is missing"),
    ],
)
def test_validation_follows_the_coupling(old: str, new: str, message: str) -> None:
    assert old in BLOCKWISE
    with pytest.raises(ScheduleError, match=message):
        validate(Schedule.parse(BLOCKWISE.replace(old, new, 1), relay()))


def test_what_can_not_be_coupled() -> None:
    with pytest.raises(ScheduleError, match="a fanout pipeline without a teacher"):
        Pipeline(1, network(0), None, 0, coupling=Coupling.FANOUT)


def test_is_json() -> None:
    for pipeline in (fan((0, 1, 1)), relay()):
        assert from_plain(Pipeline, plain(pipeline)) == pipeline
    old = {name: value for name, value in plain(relay()).items() if name != "coupling"}
    assert from_plain(Pipeline, old).is_chain


def test_a_frozen_part_comes_before_the_rest_and_may_run_ahead() -> None:
    frozen = NetworkLayout((1, 0), 1, 2, frozenset())
    student = NetworkLayout((1, 0), 1, 2, frozenset({1}))
    pipeline = Pipeline(2, student, frozen, 1, coupling=Coupling.PREFIX)
    assert pipeline.loss_ranks == (0,)
    assert needs("0T0", pipeline) == ["1D input"]
    assert needs("0F1", pipeline) == ["1T1 activation"]
    assert needs("1F1", pipeline) == ["0F1 activation"]
    assert needs("0L", pipeline) == ["1D batch", "1F0 output", "1F1 output"]
    for now, ahead in ((True, False), (True, True), (False, True)):
        program = tspipe(pipeline, teacher_now=now, teacher_next=ahead)
        validate(program)
        # What runs ahead goes to the first stage at once, which waits for it in the next step.
        sent = {str(message) for message in program.messages}
        assert ("1T0+1>0F0+1@1" in sent) == ahead
    validate(sequential(pipeline))
    with pytest.raises(ScheduleError, match="equally many"):
        Pipeline(2, student, network(1, 0), 1, coupling=Coupling.PREFIX)
