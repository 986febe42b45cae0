"""Validation of a schedule before it runs: it computes the right thing, and it terminates.

Four checks, in this order, so that each may rely on those before it:

1. every cell is on the rank that holds its stage;
2. every action occurs exactly once: all student work of a batch, and all or none of the teacher's
   work for this batch and for the next (per stage of the teacher, where stages work on batches of
   their own; asynchronously, per stage and batch of the forwards: ``versions`` then checks all
   steps of an epoch together);
3. a rank's step begins with the effects and ends with the optimizer, so that every action reads the
   weights after the update before: a teacher that runs ahead is one update late;
4. walking all ranks at once terminates: dependencies come earlier (missing forwards of the teacher,
   or asynchronous ones, ran in a step before).
An error shows the schedule and marks the cells::

    rank 0 has 0L before 0F1, which it waits for
    rank 0: 0E 0F0 0L 0F1 0B1 0B0 0O
                   ^^ ^^^
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import product

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule, walk


def validate(schedule: Schedule) -> None:
    """Check one step. Forwards of the teacher that it doesn't run count as done in the one before.

    Raises:
        ScheduleError: Shows the schedule and marks what is wrong.
    """
    _check_places(schedule)
    _check_complete(schedule)
    _check_frame(schedule)
    _check_order(schedule)


def validate_window(schedule: Schedule, number: int, beyond: int = 0) -> None:
    """Check all of a window at once, whose batches are offsets from its first one.

    Args:
        schedule: The window.
        number: Its batches.
        beyond: Batches of the next window whose teacher runs.

    Raises:
        ScheduleError: Shows the schedule and marks what is wrong.
    """
    _check_places(schedule)
    expected = {action for batch in range(number) for action in _of_batch(schedule, batch)}
    for batch in range(number, number + beyond):
        own = _of_batch(schedule, batch)
        expected |= {action for action in own if action.op in {Op.DATA, Op.TEACHER}}
    counts = Counter(action for action in schedule.actions if action.op not in FRAME)
    for action, count in counts.items():
        if count > 1 or action not in expected:
            fault = f"appears {count} times" if count > 1 else "does not belong in this window"
            raise _fail(schedule, f"{action} {fault}", action)
    for action in sorted(expected - counts.keys(), key=str):
        raise _fail(schedule, f"{action} is missing")
    _check_frame(schedule)
    _check_order(schedule)


def _of_batch(schedule: Schedule, batch: int) -> Iterator[Action]:
    """All that is done for a batch."""
    pipeline = schedule.pipeline
    yield Action(Op.DATA, pipeline.data_rank, batch=batch)
    for rank in pipeline.loss_ranks:
        yield Action(Op.LOSS, rank, batch=batch)
    students = ((stage, _halves(schedule, stage)) for stage in range(pipeline.student.num_stages))
    cells = [(op, stage) for stage, halves in students for op in (Op.FORWARD, *halves)]
    if pipeline.teacher is not None:
        cells += [(Op.TEACHER, stage) for stage in range(pipeline.teacher.num_stages)]
    for op, stage in cells:
        for unit in pipeline.layout(op).units_of(stage):
            yield Action(op, stage, unit, batch)


def _halves(schedule: Schedule, stage: int) -> tuple[Op, ...]:
    """What a backward of a stage consists of."""
    is_split = stage in schedule.split
    return (Op.INPUT_BACKWARD, Op.WEIGHT_BACKWARD) if is_split else (Op.BACKWARD,)


FRAME = frozenset({Op.EFFECTS, Op.OPTIMIZER})
"""What begins and ends a step on each rank."""


def draw(schedule: Schedule, marked: Collection[Action] = ()) -> str:
    """One line per rank, with carets below the marked cells."""
    lines = []
    for rank, actions in enumerate(schedule.ranks):
        head = f"rank {rank}: "
        lines.append(head + " ".join(map(str, actions)))
        carets = " ".join(("^" if cell in marked else " ") * len(str(cell)) for cell in actions)
        if "^" in carets:
            lines.append(" " * len(head) + carets.rstrip())
    return "\n".join(lines)


def _fail(schedule: Schedule, message: str, *marked: Action) -> ScheduleError:
    return ScheduleError(f"{message}\n{draw(schedule, marked)}")


def _check_places(schedule: Schedule) -> None:
    pipeline = schedule.pipeline
    if len(schedule.ranks) != pipeline.num_ranks:
        message = f"the schedule has {len(schedule.ranks)} ranks, the pipeline {pipeline.num_ranks}"
        raise _fail(schedule, message)
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if not _exists(action, pipeline):
                raise _fail(schedule, f"{action}: no such stage or unit in the pipeline", action)
            owner = pipeline.rank_of(action)
            if owner != rank:
                raise _fail(schedule, f"{action} belongs to rank {owner}, not {rank}", action)


def _exists(action: Action, pipeline: Pipeline) -> bool:
    if action.unit is None:
        return action.stage < pipeline.num_ranks
    layout = pipeline.teacher if action.op is Op.TEACHER else pipeline.student
    if layout is None or action.stage >= layout.num_stages:
        return False
    return action.unit in layout.units_of(action.stage)


def _check_complete(schedule: Schedule) -> None:
    counts = Counter(schedule.actions)
    expected = dict.fromkeys(_expected(schedule))
    for action in expected:
        if action not in counts:
            # The other units of the same stage and batch show where it belongs.
            place = (action.op, action.stage, action.batch)
            kin = [other for other in counts if (other.op, other.stage, other.batch) == place]
            raise _fail(schedule, f"{action} is missing", *kin)
    for action, count in counts.items():
        if count > 1:
            raise _fail(schedule, f"{action} appears {count} times", action)
        if action not in expected:
            raise _fail(schedule, f"{action} does not belong in this step", action)


def _expected(schedule: Schedule) -> Iterator[Action]:
    """All actions that must occur, given the split, and what runs ahead on which stages."""
    pipeline = schedule.pipeline
    for rank in range(pipeline.num_ranks):
        yield Action(Op.EFFECTS, rank)
        yield Action(Op.OPTIMIZER, rank)
    for rank in pipeline.loss_ranks:
        yield Action(Op.LOSS, rank)
    if pipeline.is_fed:
        yield Action(Op.PROLOGUE, pipeline.data_rank)
    cells = _forwards(schedule)
    read_by = Op.FORWARD if schedule.asynchronous else Op.TEACHER
    batches = {batch for op, stage, batch in cells if op is read_by and stage == 0}
    for batch in sorted(batches if schedule.asynchronous else batches | {0}):
        yield Action(Op.DATA, pipeline.data_rank, batch=batch)
    for stage in range(pipeline.student.num_stages):
        cells |= {(op, stage, 0) for op in _halves(schedule, stage)}
    order = {op: place for place, op in enumerate(Op)}
    for op, stage, batch in sorted(cells, key=lambda cell: (*cell[1:], order[cell[0]])):
        for unit in pipeline.layout(op).units_of(stage):
            yield Action(op, stage, unit, batch)


def _forwards(schedule: Schedule) -> set[tuple[Op, int, int]]:
    """The op, stage and batch of all forwards: a stage runs all units of a batch, or none."""
    pipeline = schedule.pipeline
    present = {(a.op, a.stage, a.batch) for a in schedule.actions}
    if schedule.asynchronous:
        return {cell for cell in present if cell[0] in {Op.FORWARD, Op.TEACHER}}
    students = {(Op.FORWARD, stage, 0) for stage in range(pipeline.student.num_stages)}
    teachers = {cell for cell in present if cell[0] is Op.TEACHER}
    if pipeline.is_chain and pipeline.teacher is not None:
        # All stages work on a batch, or none: this one or the next.
        batches = {batch for *_, batch in teachers if batch <= 1}
        teachers = set(product((Op.TEACHER,), range(pipeline.teacher.num_stages), batches))
    return students | teachers


def _check_frame(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.ranks):
        for action, op, fault in (
            (actions[0], Op.EFFECTS, "before its effects: with the weights of the step before"),
            (actions[-1], Op.OPTIMIZER, "after its optimizer step: with the next step's weights"),
        ):
            if action.op is not op:
                raise _fail(schedule, f"rank {rank} runs {action} {fault}", action)


def _check_order(schedule: Schedule) -> None:
    """Walk all ranks as far as possible; remaining actions are deadlocked."""
    needs = _needs(schedule)
    done: set[Action] = set()
    for _, ran in walk(schedule.ranks, lambda action: needs[action] <= done):
        done.add(ran)
    blocked = [
        (rank, next(action for action in actions if action not in done))
        for rank, actions in enumerate(schedule.ranks)
        if not done.issuperset(actions)
    ]
    if blocked:
        raise _deadlock(schedule, blocked, {action: needs[action] - done for _, action in blocked})


def _needs(schedule: Schedule) -> dict[Action, set[Action]]:
    """Dependencies of each action within this step, without those that ran in a step before."""
    early = _EARLY if schedule.asynchronous else {Op.TEACHER}
    return {
        action: {
            need.producer
            for need in needs
            if need.producer.op not in early or need.producer in schedule.needs
        }
        for action, needs in schedule.needs.items()
    }


_EARLY = frozenset({Op.DATA, Op.FORWARD, Op.TEACHER})


def _deadlock(
    schedule: Schedule, blocked: list[tuple[int, Action]], missing: dict[Action, set[Action]]
) -> ScheduleError:
    for rank, action in blocked:
        late = [cell for cell in schedule.ranks[rank] if cell in missing[action]]
        if late:
            message = f"rank {rank} has {action} before {late[0]}, which it waits for"
            return _fail(schedule, message, action, *late)
    waits = "; ".join(
        f"rank {rank} at {action} for {', '.join(sorted(map(str, missing[action])))}"
        for rank, action in blocked
    )
    return _fail(schedule, f"the ranks wait for each other for ever: {waits}", *missing)
