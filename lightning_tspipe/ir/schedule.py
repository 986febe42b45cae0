"""A schedule: for each rank, its actions of one step, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import Pipeline


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank in one step.

    Attributes:
        pipeline: The pipeline that the schedule was made for.
        ranks: ``ranks[r]`` are the actions of rank r, in the order in which it runs them.
        asynchronous: Whether a student's forward may run steps before its backward.
    """

    pipeline: Pipeline
    ranks: tuple[tuple[Action, ...], ...]
    asynchronous: bool = False

    @cached_property
    def split(self) -> frozenset[int]:
        """Student stages whose backward runs as I and W."""
        return frozenset(
            action.stage
            for actions in self.ranks
            for action in actions
            if action.op is Op.INPUT_BACKWARD
        )

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)

    @classmethod
    def parse(cls, text: str, pipeline: Pipeline) -> Schedule:
        """Read what ``str(schedule)`` prints: one line per rank.

        Raises:
            ScheduleError: The number of lines is wrong, or a cell is not an action.
        """
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) != pipeline.num_ranks:
            raise ScheduleError(f"{len(lines)} lines for {pipeline.num_ranks} ranks")
        return cls(pipeline, tuple(tuple(map(Action.parse, line.split())) for line in lines))


def walk(
    ranks: Sequence[Sequence[Action]], is_ready: Callable[[Action], bool]
) -> Iterator[tuple[int, Action]]:
    """Walk all ranks at once, until none can move.

    Args:
        ranks: The actions of each rank, in order.
        is_ready: Whether an action may run, given all that were yielded before.

    Yields:
        Rank and action, each as soon as the action may run.
    """
    places = [0] * len(ranks)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(ranks):
            while places[rank] < len(actions) and is_ready(actions[places[rank]]):
                yield rank, actions[places[rank]]
                places[rank] += 1
                moved = True
