"""Windows: the batches between two updates are in the pipeline at once, and it drains behind them.

An order is of a whole window, whose batches are numbered from 0; for each rank it is a sequence
that does not depend on costs:

* ``1f1b``: as many forwards as there are stages up to the loss, then backwards and forwards in
  turns (Narayanan et al., *PipeDream*, SOSP 2019; with a flush, *2BW*, ICML 2021). Backwards may
  run in halves (Qi et al., *Zero Bubble Pipeline Parallelism*, ICLR 2024: ZB-H1), so that a window
  drains in half the time.
* ``interleaved``: the same with several stages on each rank, which work on P batches each in turns
  (Narayanan et al., *Megatron-LM*, SC 2021, section 2.2).
* ``zbv``: stages go to and fro, so that rank 0 has the first and the last; backwards run in halves
  (Qi et al., *Pipeline Parallelism with Controllable Memory*, NeurIPS 2024, section 4)::

    rank 0 |F0F0F0f0I0W0  F0f0I0W0I0W0F0f0I0W0I0W0...     f, i, w: of the last stage
    rank 1 |  F0f0F0f0i0w0...
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate, chain

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.schedules.phases import assemble

Cell = tuple[Op, int, int]
"""An op, a stage and a batch: the same for all units of a batch, which follow each other."""

ACROSS_STEPS = ("interleaved", "zbv")
"""Orders in which backwards end behind the step of their batch."""
WINDOWS = ("1f1b", *ACROSS_STEPS)
"""Names of the orders."""


def window_ranks(name: str, num_stages: int, num_ranks: int) -> tuple[int, ...]:
    """The rank of each stage: one after another, again and again, or (zbv) to and fro.

    >>> window_ranks("interleaved", 4, 2), window_ranks("zbv", 4, 2)
    ((1, 0, 1, 0), (0, 1, 1, 0))
    """
    if name == "zbv":
        ranks = range(num_ranks)
        return (*ranks, *reversed(ranks))[:num_stages]
    return tuple((num_ranks - 1 - stage) % num_ranks for stage in range(num_stages))


def window(
    name: str,
    pipeline: Pipeline,
    number: int,
    beyond: int = 0,
    split: frozenset[int] = frozenset(),
) -> Schedule:
    """The order of a whole window.

    Args:
        name: One of :data:`WINDOWS`.
        pipeline: The pipeline, with stages on ranks as :func:`window_ranks` says.
        number: Batches of the window; the offsets of actions are their places in it.
        beyond: Batches of the next window whose teacher runs at the end of this one.
        split: Stages whose backward runs in two halves; of ``zbv`` all do.

    Raises:
        ScheduleError: Stages are on other ranks, or batches are divided.
    """
    _check_stages(name, pipeline)
    num_stages = pipeline.student.num_stages
    all_in_halves = halves_of(name, num_stages)
    order = _zero_bubble_v if all_in_halves else partial(_one_f_one_b, split=split)
    following = range(number, number + beyond)
    ranks = [_with_teacher(pipeline, rank, order(pipeline, rank, number), following)
             for rank in range(pipeline.num_ranks)]  # fmt: skip
    body = list(chain.from_iterable(_actions(pipeline, cells) for cells in ranks))
    whole = assemble(pipeline, body, batches=range(number + beyond))
    return replace(whole, asynchronous=True, halves=all_in_halves or split)


def halves_of(name: str, num_stages: int) -> frozenset[int]:
    """The stages whose backwards an order runs in two halves: all, or none that it must."""
    return frozenset(range(num_stages if name == "zbv" and num_stages > 1 else 0))


@lru_cache(maxsize=128)  # a search asks for each of its layouts, which all have a few pipelines
def most_in_flight(
    name: str, pipeline: Pipeline, number: int, split: frozenset[int] = frozenset()
) -> tuple[float, ...]:
    """The most batches whose activations each rank holds, if each of its stages has as many.

    Args:
        name: Name of the order.
        pipeline: The pipeline.
        number: Batches of the window.
        split: Stages whose backward runs in two halves.
    """
    whole = window(name, pipeline, number, split=split)
    ends = {Op.BACKWARD, Op.WEIGHT_BACKWARD}
    found = []
    for rank, actions in enumerate(whole.ranks):
        changes = ((a.op is Op.FORWARD) - (a.op in ends) for a in actions)
        per_batch = pipeline.student.num_calls * len(pipeline.stages_of(rank))
        found.append(max(accumulate(changes), default=0) / max(1, per_batch))
    return tuple(found)


def _check_stages(name: str, pipeline: Pipeline) -> None:
    """Refuse a pipeline in which a batch does not go from rank to rank as the order says."""
    student, teacher, num_ranks = pipeline.student, pipeline.teacher, pipeline.num_ranks
    to_and_fro = 2 * num_ranks if num_ranks > 1 else student.num_stages
    wanted = {"1f1b": num_ranks, "zbv": to_and_fro}.get(name, student.num_stages)
    ranks = window_ranks(name, wanted, num_ranks)
    if student.ranks != ranks or student.num_stages % num_ranks:
        raise ScheduleError(
            f"schedule {name} has its stages on ranks {ranks}, and equally many on each; here they "
            f"are on ranks {student.ranks}"
        )
    if student.num_microbatches != 1:
        raise ScheduleError(f"schedule {name} does not split a batch: use num_microbatches=1")
    places = {rank: place for place, rank in enumerate(ranks[:num_ranks])}
    found = [places[rank] for rank in (teacher.ranks if teacher is not None else ())]
    rounds = [found[i : i + num_ranks] for i in range(0, len(found), num_ranks)]
    if name != "zbv" and any(each != sorted(each) for each in rounds):
        raise ScheduleError(
            f"schedule {name}: the teacher's stages must follow the order of the student's ranks, "
            f"not {teacher.ranks if teacher is not None else ()}"
        )


# The orders of one rank


def _one_f_one_b(
    pipeline: Pipeline, rank: int, number: int, split: frozenset[int]
) -> Iterator[Cell]:
    """1F1B, also interleaved: forwards that fill the pipeline, then one of each in turns."""
    num_ranks = pipeline.num_ranks
    own = pipeline.stages_of(rank)
    groups = list(_groups(number, num_ranks))
    forwards = [(Op.FORWARD, s, b) for group in groups for s in own for b in group]
    backwards = [(Op.BACKWARD, s, b) for group in groups for s in reversed(own) for b in group]
    # Ranks between this one and the loss: with several stages per rank, there and back.
    behind = rank if len(own) == 1 else 2 * rank + (len(own) - 1) * len(groups[0])
    fill = min(behind, len(forwards))
    yield from forwards[:fill]
    for forward, backward in zip(forwards[fill:], backwards, strict=False):
        yield forward
        yield from _halves(backward, split)
    for backward in backwards[len(forwards) - fill :]:
        yield from _halves(backward, split)


def _halves(backward: Cell, split: frozenset[int]) -> Iterator[Cell]:
    """A backward, or both of its halves: the stage before need not wait for the second."""
    _, stage, batch = backward
    if stage not in split:
        yield backward
    else:
        yield Op.INPUT_BACKWARD, stage, batch
        yield Op.WEIGHT_BACKWARD, stage, batch


def _groups(number: int, size: int) -> Iterator[range]:
    """Batches that go through a stage one after another: so many, or a few more if some are left.

    >>> [len(group) for group in _groups(11, 4)]
    [6, 5]
    """
    count = max(1, number // size)
    start = 0
    for place in range(count):
        stop = start + number // count + (place < number % count)
        yield range(start, stop)
        start = stop


def _zero_bubble_v(pipeline: Pipeline, rank: int, number: int) -> Iterator[Cell]:
    """Zero bubble, stages to and fro: at most as many batches as 1F1B has at its first stage."""
    size = pipeline.num_ranks
    to, fro = pipeline.stages_of(rank)
    ops = Op.FORWARD, Op.INPUT_BACKWARD, Op.WEIGHT_BACKWARD
    (f, i, w), (f2, i2, w2) = ([(op, stage) for op in ops] for stage in (to, fro))
    phases = (
        (2 * (size - rank) - 1, (f,)),
        (rank, (f2, f)),
        (size - rank, (f2, i2, w2)),
        (number - size, (f, i, w, f2, i2, w2)),
        (rank, (i, i2)),
        (size - rank, (i, w)),
        (number, (i2, i)),
        (number, (w2, w)),
    )
    done: Counter[tuple[Op, int]] = Counter()
    for times, cells in phases:
        for cell in cells * times:
            if done[cell] < number:
                yield *cell, done[cell]
                done[cell] += 1


def _with_teacher(
    pipeline: Pipeline, rank: int, cells: Iterator[Cell], following: Iterable[int]
) -> Iterator[Cell]:
    """A rank's order with its part of the teacher: of a batch, right before the student's.

    That of batches behind the window comes last.
    """
    teacher = pipeline.teacher
    held = [] if teacher is None else [s for s, owner in enumerate(teacher.ranks) if owner == rank]
    own = pipeline.stages_of(rank)
    before: Mapping[int, list[int]] = defaultdict(list)
    for place, stage in enumerate(held):
        before[own[min(place, len(own) - 1)]].append(stage)
    for op, stage, batch in cells:
        for ahead in before[stage] if op is Op.FORWARD else ():
            yield Op.TEACHER, ahead, batch
        yield op, stage, batch
    yield from ((Op.TEACHER, stage, batch) for batch in following for stage in held)


def _actions(pipeline: Pipeline, cells: Iterator[Cell]) -> Iterator[Action]:
    """The units of each cell, and each loss right before the backward of the last stage."""
    last, ends = pipeline.student.num_stages - 1, {Op.BACKWARD, Op.INPUT_BACKWARD}
    for op, stage, batch in cells:
        units = list(pipeline.layout(op).units_of(stage))
        if op in ends:
            units.reverse()
            if stage == last:
                yield Action(Op.LOSS, pipeline.loss_rank, batch=batch)
        for unit in units:
            yield Action(op, stage, unit, batch)
