"""Validation of a schedule before it runs: it computes the right thing, and it terminates.

Five checks, in this order, so that each may rely on those before it:

1. every cell is on the rank that holds its stage;
2. every action occurs exactly once: all student work of a batch, and all or none of the teacher's
   work for this batch and for the next (per stage of the teacher, where stages work on batches of
   their own; asynchronously, per stage and batch of the forwards: ``versions`` then checks all
   steps of an epoch together);
3. a rank's step begins with the effects and ends with the optimizer, so that every action reads the
   weights that :func:`weight_versions` returns;
4. walking all ranks at once terminates: dependencies come earlier (missing forwards of the teacher,
   or asynchronous ones, ran in a step before);
5. the messages are those that the order requires, in the order of sending on each channel.

An error shows the schedule and marks the cells::

    rank 0 has 0L before 0F1, which it waits for
    rank 0: 0E 0F0 0L 0F1 0B1 0B0 0O
                   ^^ ^^^
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.dependencies import depends_on
from lightning_tspipe.ir.lowering import Message, Program, lower
from lightning_tspipe.ir.pipeline import NetworkLayout, Pipeline
from lightning_tspipe.ir.schedule import Schedule, walk


def validate(checked: Program | Schedule, *, before: Schedule | None = None) -> None:
    """Check one step.

    Args:
        checked: A schedule, or a program whose messages are checked too.
        before: The step before, if known; then the teacher of this batch must have run in exactly
            one of the two. Without it, forwards that this step doesn't run count as done.

    Raises:
        ScheduleError: Shows the schedule and marks what is wrong.
    """
    schedule = checked.schedule if isinstance(checked, Program) else checked
    _check_places(schedule)
    _check_complete(schedule)
    _check_frame(schedule)
    if before is not None:
        _check_teacher_ran_once(schedule, before)
    _check_order(schedule)
    if isinstance(checked, Program):
        _check_messages(checked)


def weight_versions(schedule: Schedule) -> dict[Action, int]:
    """The version of the weights that each forward and backward reads.

    Versions count from the current weights of this step: for the student those after the optimizer
    step before it, for the teacher those after this step's effects. So ``batch - version`` is an
    action's staleness in updates: 0 for the student, and 1 for a teacher that ran ahead.
    """
    versions: dict[Action, int] = {}
    for actions in schedule.ranks:
        effects, updates = -1, 0
        for action in actions:
            effects += action.op is Op.EFFECTS
            updates += action.op is Op.OPTIMIZER
            if not action.op.is_rank_wide:
                versions[action] = effects if action.op is Op.TEACHER else updates
    return versions


def draw(schedule: Schedule, marked: Collection[Action] = ()) -> str:
    """One line per rank, with carets below the marked cells."""
    lines = []
    for rank, actions in enumerate(schedule.ranks):
        head = f"rank {rank}: "
        cells = [str(action) for action in actions]
        lines.append(head + " ".join(cells))
        carets = [
            "^" * len(c) if a in marked else " " * len(c)
            for a, c in zip(actions, cells, strict=True)
        ]
        if "^" in "".join(carets):
            lines.append(" " * len(head) + " ".join(carets).rstrip())
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
    return (
        layout is not None
        and action.stage < layout.num_stages
        and action.unit in layout.units_of(action.stage)
    )


def _check_complete(schedule: Schedule) -> None:
    counts = Counter(action for actions in schedule.ranks for action in actions)
    expected = dict.fromkeys(_expected(schedule))
    for action in expected:
        if action not in counts:
            raise _fail(schedule, f"{action} is missing", *_kin(action, counts))
    for action, count in counts.items():
        if count > 1:
            raise _fail(schedule, f"{action} is there {count} times", action)
        if action not in expected:
            raise _fail(schedule, f"{action} does not belong into this step", action)


def _kin(action: Action, others: Collection[Action]) -> list[Action]:
    """The cells of the other units of the same stage and batch."""
    return [
        other
        for other in others
        if (other.op, other.stage, other.batch) == (action.op, action.stage, action.batch)
    ]


def _expected(schedule: Schedule) -> Iterator[Action]:
    """All actions that must occur, given the split and the batches of the teacher that occur."""
    pipeline, split = schedule.pipeline, schedule.split
    for rank in range(pipeline.num_ranks):
        yield Action(Op.EFFECTS, rank)
        yield Action(Op.OPTIMIZER, rank)
    for rank in pipeline.loss_ranks:
        yield Action(Op.LOSS, rank)
    for stage, unit in _cells(pipeline.student):
        halves = [Op.INPUT_BACKWARD, Op.WEIGHT_BACKWARD] if stage in split else [Op.BACKWARD]
        yield from (Action(op, stage, unit) for op in halves)
    if schedule.asynchronous:
        yield from _forwards_of_any_batch(schedule)
        return
    yield Action(Op.DATA, pipeline.data_rank)
    yield from _grid(Op.FORWARD, pipeline.student)
    if pipeline.teacher is not None:
        expected = _expected_at_once if pipeline.is_chain else _expected_of_queues
        yield from expected(schedule, pipeline.teacher)


def _expected_at_once(schedule: Schedule, teacher: NetworkLayout) -> Iterator[Action]:
    """Teacher actions of chains: all stages work on a batch, or none."""
    present = {
        action.batch for actions in schedule.ranks for action in actions if action.op is Op.TEACHER
    }
    for batch in sorted({0, 1} & present):
        yield from _grid(Op.TEACHER, teacher, batch)
        if batch:
            yield Action(Op.DATA, schedule.pipeline.data_rank, batch=batch)


def _expected_of_queues(schedule: Schedule, teacher: NetworkLayout) -> Iterator[Action]:
    """Teacher actions of other couplings: on each batch a stage runs all units, or none."""
    cells = {
        (action.stage, action.batch)
        for actions in schedule.ranks
        for action in actions
        if action.op is Op.TEACHER
    }
    for stage, batch in sorted(cells):
        for unit in teacher.units_of(stage):
            yield Action(Op.TEACHER, stage, unit, batch)
        if stage == 0 and batch:
            yield Action(Op.DATA, schedule.pipeline.data_rank, batch=batch)


def _forwards_of_any_batch(schedule: Schedule) -> Iterator[Action]:
    """Asynchronous forwards: if a stage runs one unit of a batch, all units of it."""
    for action in {action for actions in schedule.ranks for action in actions}:
        if action.op is Op.DATA:
            yield action
        elif action.op in {Op.FORWARD, Op.TEACHER}:
            for unit in range(schedule.pipeline.layout(action.op).num_units):
                yield Action(action.op, action.stage, unit, action.batch)


def _cells(layout: NetworkLayout) -> Iterator[tuple[int, int]]:
    for stage in range(layout.num_stages):
        yield from product((stage,), layout.units_of(stage))


def _grid(op: Op, layout: NetworkLayout, batch: int = 0) -> Iterator[Action]:
    return (Action(op, stage, unit, batch) for stage, unit in _cells(layout))


def _check_frame(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.ranks):
        first, last = actions[0], actions[-1]
        if first.op is not Op.EFFECTS:
            message = (
                f"rank {rank} runs {first} before its effects: with the weights of the step before"
            )
            raise _fail(schedule, message, first)
        if last.op is not Op.OPTIMIZER:
            message = (
                f"rank {rank} runs {last} after its optimizer step: with the next step's weights"
            )
            raise _fail(schedule, message, last)


def _check_teacher_ran_once(schedule: Schedule, before: Schedule) -> None:
    ran = {action for rank in before.ranks for action in rank if action.op is Op.TEACHER}
    twice = [
        action
        for rank in schedule.ranks
        for action in rank
        if replace(action, batch=action.batch + 1) in ran
    ]
    if twice:
        raise _fail(schedule, "the teacher of this batch already ran in the step before", *twice)
    if not schedule.pipeline.is_chain:
        return  # it may have run in a step before that one
    now = _teacher_cells(schedule, batch=0)
    ahead = _teacher_cells(before, batch=1)
    if schedule.pipeline.teacher is not None and not now and not ahead:
        loss = Action(Op.LOSS, schedule.pipeline.loss_rank)
        message = "nobody runs the teacher of this batch, neither this step nor the one before"
        raise _fail(schedule, message, loss)


def _teacher_cells(schedule: Schedule, batch: int) -> list[Action]:
    return [
        action
        for actions in schedule.ranks
        for action in actions
        if action.op is Op.TEACHER and action.batch == batch
    ]


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
    present = {action for actions in schedule.ranks for action in actions}
    early = _EARLY if schedule.asynchronous else {Op.TEACHER}
    return {
        action: {
            need.producer
            for need in depends_on(action, schedule.pipeline, schedule.split)
            if need.producer.op not in early or need.producer in present
        }
        for actions in schedule.ranks
        for action in actions
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


def _check_messages(program: Program) -> None:
    expected = _by_channel(lower(program.schedule).messages)
    found = _by_channel(program.messages)
    for channel in sorted(expected.keys() | found.keys()):
        sent, posted = expected.get(channel, []), found.get(channel, [])
        if sent != posted:
            pairs = [(a, b) for a, b in zip(sent, posted, strict=False) if a != b]
            first = pairs[0][0] if pairs else (sent + posted)[min(len(sent), len(posted))]
            source, target, payload, _ = channel
            message = (
                f"rank {source} sends {payload}s to rank {target} in the order "
                f"{' '.join(map(str, sent))}; the program has {' '.join(map(str, posted))}"
            )
            raise _fail(program.schedule, message, first.producer, first.consumer)


def _by_channel(messages: tuple[Message, ...]) -> dict[tuple[int, int, str, bool], list[Message]]:
    channels: dict[tuple[int, int, str, bool], list[Message]] = {}
    for message in messages:
        channels.setdefault(message.channel, []).append(message)
    return channels
