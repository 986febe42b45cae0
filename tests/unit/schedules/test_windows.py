"""Orders of windows: as their papers say, all of it once, and cut into steps that can follow."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.dependencies import depends_on
from lightning_tspipe.ir.pipeline import NetworkLayout, Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.schedules.window_steps import NOTHING, Progress, When, WindowSteps
from lightning_tspipe.schedules.windows import WINDOWS, most_in_flight, window, window_ranks
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.simulator import steps_seconds
from tests.unit.pipelines import uniform_costs

FRAME = {Op.EFFECTS, Op.OPTIMIZER}
ORDERS = [*((name, False) for name in WINDOWS), ("1f1b", True)]
"""Names, and whether backwards run in halves where an order leaves that open."""


def pipeline(
    name: str, num_ranks: int, rounds: int = 2, *, teachers: int = 0, num_calls: int = 1
) -> Pipeline:
    """Stages on ranks as an order wants them; 1F1B has one on each."""
    ranks = window_ranks(name, num_ranks * (1 if name == "1f1b" else rounds), num_ranks)

    def network(held: tuple[int, ...]) -> NetworkLayout:
        return NetworkLayout(held, num_calls, 1, frozenset({len(held) - 1}))

    teacher = network(ranks[:teachers]) if teachers else None
    return Pipeline(num_ranks, network(ranks), teacher, data_rank=ranks[0])


def halved(made: Pipeline, *, split: bool) -> frozenset[int]:
    """All stages but the first, for which nobody waits."""
    return frozenset(range(1, made.student.num_stages) if split else ())


def work(schedule: Schedule, step: int = 0) -> list[Action]:
    """What is done for batches, by their places in a window."""
    own = (action for action in schedule.actions if action.op not in FRAME)
    return [replace(action, batch=action.batch + step) for action in own]


def utilization(
    name: str, num_ranks: int, number: int, rounds: int = 2, teachers: int = 0
) -> float:
    """The share of time in which ranks work, in windows that follow each other."""
    made = pipeline(name, num_ranks, rounds, teachers=teachers)
    whole, costs = window(name, made, number), CostTable.uniform(made)
    spent = steps_seconds([whole] * 3, costs) - steps_seconds([whole] * 2, costs)
    return sum(map(costs.seconds, whole.actions)) / num_ranks / spent


def test_one_f_one_b_is_as_drawn() -> None:
    whole = window("1f1b", pipeline("1f1b", 3), 4)
    left_out = {*FRAME, Op.DATA}
    ranks = [[str(a) for a in actions if a.op not in left_out] for actions in whole.ranks]
    assert list(map(" ".join, ranks)) == [
        "2F0 0L 2B0 2F0+1 0L+1 2B0+1 2F0+2 0L+2 2B0+2 2F0+3 0L+3 2B0+3",
        "1F0 1F0+1 1B0 1F0+2 1B0+1 1F0+3 1B0+2 1B0+3",
        "0F0 0F0+1 0F0+2 0B0 0F0+3 0B0+1 0B0+2 0B0+3",
    ]  # fmt: skip


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("rounds", [2, 3])
def test_interleaved_fills_as_megatron_does(num_ranks: int, rounds: int) -> None:
    """Forwards before a rank's first backward, of which one is run in turns with it."""
    made = pipeline("interleaved", num_ranks, rounds)
    for rank, actions in enumerate(window("interleaved", made, 2 * num_ranks).ranks):
        ops = [action.op for action in actions if not action.op.is_rank_wide]
        assert ops.index(Op.BACKWARD) == 2 * rank + (rounds - 1) * num_ranks + 1
        forwards = [a for a in actions if a.op is Op.FORWARD]
        own = made.stages_of(rank)
        # So many batches at its first stage, then the same ones at its second.
        assert [(a.stage, a.batch) for a in forwards[: 2 * num_ranks]] == [
            (stage, batch) for stage in own[:2] for batch in range(num_ranks)
        ]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_zero_bubble_v_has_none_with_the_memory_of_one_f_one_b(num_ranks: int) -> None:
    """Qi et al., 2024, section 4.1: if all passes take equally long."""
    assert utilization("zbv", num_ranks, 2 * num_ranks) == pytest.approx(1.0)
    made = pipeline("zbv", num_ranks)
    assert most_in_flight("zbv", made, 4 * num_ranks) == (num_ranks,) * num_ranks


def test_interleaving_divides_the_bubble() -> None:
    """Megatron-LM, section 2.2.2: the bubble is (P - 1) / (V m) of the work."""
    for rounds in (2, 4):
        bubble = 1 / utilization("interleaved", 8, 16, rounds) - 1
        assert bubble == pytest.approx(7 / 16 / rounds)
    assert 1 / utilization("1f1b", 8, 16) - 1 == pytest.approx(7 / 16)


def test_memory_is_bounded_however_long_a_window_is() -> None:
    for number in (16, 64):
        assert most_in_flight("1f1b", pipeline("1f1b", 4), number) == (1, 2, 3, 4)
        assert max(most_in_flight("interleaved", pipeline("interleaved", 4), number)) == 5.5


def test_a_window_in_halves_drains_in_half_the_time() -> None:
    """ZB-H1: F, I and W of one unit each; without halves, a backward of two."""
    made, spent = pipeline("1f1b", 4), []
    costs = CostTable.uniform(made)
    for split in (False, True):
        whole = window("1f1b", made, 8, split=halved(made, split=split))
        spent.append(steps_seconds([whole], costs))
        assert most_in_flight("1f1b", made, 8, whole.split) == (1, 2, 3, 4)
    forward = costs.seconds(Action(Op.FORWARD, 0, 0))
    assert spent[0] - spent[1] == pytest.approx(3 * forward)  # of each stage ahead of the loss


def test_halves_are_as_drawn() -> None:
    made = pipeline("1f1b", 3)
    whole = window("1f1b", made, 3, split=halved(made, split=True))
    ranks = [[str(a) for a in actions if a.op not in {*FRAME, Op.DATA}] for actions in whole.ranks]
    assert list(map(" ".join, ranks)) == [
        "2F0 0L 2I0 2W0 2F0+1 0L+1 2I0+1 2W0+1 2F0+2 0L+2 2I0+2 2W0+2",
        "1F0 1F0+1 1I0 1W0 1F0+2 1I0+1 1W0+1 1I0+2 1W0+2",
        "0F0 0F0+1 0F0+2 0B0 0B0+1 0B0+2",
    ]


@pytest.mark.parametrize(
    ("name", "when", "least"),
    [("1f1b", "now", 0.75), ("1f1b", "ahead", 64 / 69), ("1f1b", "late", 64 / 69),
     ("interleaved", "now", 0.85), ("interleaved", "ahead", 0.96), ("zbv", "ahead", 1.0)],
)  # fmt: skip
def test_a_teacher_ahead_fills_what_stands_idle(name: str, when: When, least: float) -> None:
    """8 ranks, an equal teacher; with 1F1B the student alone takes 23 of 24 slots of 3 units."""
    made = pipeline(name, 8, teachers=8 if name == "1f1b" else 16)
    windows, costs = WindowSteps(name, made, when, 16).windows(16, 4), CostTable.uniform(made)
    spent = steps_seconds(windows, costs) - steps_seconds(windows[:-1], costs)
    busy = sum(map(costs.seconds, window(name, made, 16).actions)) / 8
    assert busy / spent == pytest.approx(least, abs=0.01)


@pytest.mark.parametrize(("name", "in_halves"), ORDERS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("number", [1, 2, 5, 13])
@pytest.mark.parametrize("when", ["ahead", "late"])
def test_teachers_ahead_run_once_and_their_outputs_are_there(
    name: str, num_ranks: int, number: int, when: When, *, in_halves: bool
) -> None:
    made = pipeline(name, num_ranks, teachers=num_ranks, num_calls=2)
    split = halved(made, split=in_halves)
    steps = WindowSteps(name, made, when, number, split=split)
    all_work = set(work(window(name, made, 4 * number, split=split)))
    split = window(name, made, number, split=split).split
    done, now, progress = dict[Action, int](), 0, NOTHING
    drawn = random.Random(number)  # noqa: S311 - no secret
    for first in range(0, 4 * number, number):
        for place in range(number):
            known = min(steps.lookahead, 2 * number - 1 - place)
            if when == "ahead":
                known = drawn.randrange(known + 1)
            ahead = min(known, number - 1 - place)
            beyond = known - ahead if first < 3 * number else 0
            schedule, progress = steps.step(progress, ahead, beyond)
            assert Progress.from_plain(progress.to_plain()) == progress
            for action in work(schedule, first + place):
                assert action not in done
                done[action] = now
            now += 1
        if when == "late" and first < 3 * number:
            teachers = {a.batch for a in done if a.op is Op.TEACHER}
            assert teachers == set(range(first + 2 * number))
    assert done.keys() == all_work
    for action, step in done.items():
        for need in depends_on(action, made, split):
            assert done[need.producer] <= step


CASES = [
    (name, in_halves, num_ranks, number, teachers, num_calls)
    for name, in_halves in ORDERS
    for num_ranks in (1, 2, 3, 4)
    for number in (1, 2, 5, 13)
    for teachers, num_calls in ((0, 1), (num_ranks, 2))
]


@pytest.mark.parametrize(
    ("name", "in_halves", "num_ranks", "number", "teachers", "num_calls"), CASES
)
def test_steps_do_all_of_a_window_once_and_in_order(  # noqa: PLR0913 - what a window is
    name: str, num_ranks: int, number: int, teachers: int, num_calls: int, *, in_halves: bool
) -> None:
    """However much is known of the batches that follow, and whoever ends backwards in between."""
    made = pipeline(name, num_ranks, teachers=teachers, num_calls=num_calls)
    split = halved(made, split=in_halves)
    steps, whole = WindowSteps(name, made, split=split), window(name, made, number, split=split)
    for seed in range(3):
        drawn = random.Random(seed)  # noqa: S311 - no secret
        done: dict[Action, int] = {}
        for step, (schedule, place) in enumerate(_parts(steps, number, drawn if seed else None)):
            for action in work(schedule, place):
                assert action not in done
                done[action] = step
        assert done.keys() == set(work(whole))
        # What a rank gets was asked for in the step that sends it, or before.
        for action, step in done.items():
            for need in depends_on(action, made, whole.split):
                assert done[need.producer] <= step


def _parts(
    steps: WindowSteps, number: int, drawn: random.Random | None
) -> Iterator[tuple[Schedule, int]]:
    """The steps of a window, and the places of their batches."""
    progress = NOTHING
    for place in range(number):
        ahead = min(steps.lookahead, number - 1 - place)
        if drawn is not None:
            ahead = drawn.randrange(ahead + 1)
            if place and drawn.random() < 0.3:
                schedule, progress = steps.rest(progress)
                yield schedule, place - 1
        schedule, progress = steps.step(progress, ahead)
        yield schedule, place
        assert Progress.from_plain(progress.to_plain()) == progress


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("number", [5, 13])
def test_who_ends_backwards_early_moves_no_forward(name: str, number: int) -> None:
    """Forwards draw random numbers: they stay in their steps, whether or not somebody saves."""
    made = pipeline(name, 2)
    steps = WindowSteps(name, made)
    expected = [schedule for schedule, _ in _parts(steps, number, None)]
    for stop in range(1, number):
        progress, early = NOTHING, frozenset[Action]()
        for place in range(number):
            if place == stop:
                rest, progress = steps.rest(progress)
                early = frozenset(work(rest, place - 1))
                again, same = steps.rest(progress)
                assert (work(again), same) == ([], progress)
            schedule, progress = steps.step(progress, min(steps.lookahead, number - 1 - place))
            left = [[a for a in rank if replace(a, batch=a.batch + place) not in early]
                    for rank in expected[place].ranks]  # fmt: skip
            assert [list(rank) for rank in schedule.ranks] == left
        assert not progress.early


@pytest.mark.parametrize("name", WINDOWS)
def test_a_step_has_one_loss_and_nothing_that_waits_for_the_next(name: str) -> None:
    made = pipeline(name, 4)
    progress = NOTHING
    for schedule, _ in _parts(WindowSteps(name, made), 9, None):
        losses = [action for action in schedule.actions if action.op is Op.LOSS]
        assert [action.batch for action in losses] == [0]
        ends = [a.batch for a in schedule.actions if a.op in {Op.BACKWARD, Op.INPUT_BACKWARD}]
        assert max(ends) <= 0
        assert min(a.batch for a in schedule.actions if a.op is Op.FORWARD or a.op is Op.LOSS) >= 0
    assert progress == NOTHING


def test_long_windows_repeat_a_few_steps() -> None:
    made = pipeline("interleaved", 2)
    steps = WindowSteps("interleaved", made)
    seen = [str(schedule) for schedule, _ in _parts(steps, 100, None)]
    assert len(set(seen)) < 15


@pytest.mark.parametrize("name", WINDOWS)
def test_a_teacher_runs_right_before_its_student(name: str) -> None:
    made = pipeline(name, 3, teachers=3)
    for rank, actions in enumerate(window(name, made, 5).ranks):
        places = {action: place for place, action in enumerate(actions)}
        for action, place in places.items():
            if action.op is Op.TEACHER:
                first = made.stages_of(rank)[0]
                assert actions[place + 1] == Action(Op.FORWARD, first, 0, action.batch)


def test_stages_elsewhere_are_refused() -> None:
    wrong = replace(pipeline("interleaved", 2), student=pipeline("zbv", 2).student)
    with pytest.raises(ScheduleError, match="schedule interleaved has its stages on ranks"):
        window("interleaved", wrong, 2)
    with pytest.raises(ScheduleError, match="schedule zbv has its stages on ranks"):
        window("zbv", pipeline("zbv", 2, 1), 2)
    halved = replace(pipeline("1f1b", 2).student, num_microbatches=2)
    with pytest.raises(ScheduleError, match="does not split a batch"):
        window("1f1b", replace(pipeline("1f1b", 2), student=halved), 2)
    teacher = replace(pipeline("1f1b", 2).student, ranks=(0, 1))
    with pytest.raises(ScheduleError, match="follow the order of the student's ranks"):
        window("1f1b", replace(pipeline("1f1b", 2), teacher=teacher), 2)


def test_a_window_costs_one_optimizer_step() -> None:
    made = pipeline("1f1b", 2)
    costs = uniform_costs(made, optimizer=5.0)
    whole = window("1f1b", made, 4)
    assert steps_seconds([whole], costs) == pytest.approx(3 * (4 + 1) + 5)
