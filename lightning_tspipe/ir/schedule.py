"""A schedule: for each rank, its actions of one step, in order, and what ranks send each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.dependencies import Dependency, depends_on
from lightning_tspipe.ir.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Message(Dependency):
    """A payload sent between ranks: after its producer, and before its consumer runs.

    Messages of one channel arrive in the order of sending.

    Attributes:
        source: Sending rank.
        target: Receiving rank.
    """

    source: int
    target: int

    @property
    def channel(self) -> tuple[int, int, str, bool]:
        """Source, target, payload, and whether it belongs to the teacher."""
        teacher = self.producer.op is Op.TEACHER or self.consumer.op is Op.TEACHER
        return (self.source, self.target, self.payload, teacher)

    def __str__(self) -> str:
        return f"{self.producer}>{self.consumer}@{self.target}"


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank in one step.

    Attributes:
        pipeline: The pipeline that the schedule was made for.
        ranks: ``ranks[r]`` are the actions of rank r, in the order in which it runs them.
        asynchronous: Whether a student's forward may run steps before its backward.
        halves: Student stages whose backward runs as I and W, if in other steps only.
    """

    pipeline: Pipeline
    ranks: tuple[tuple[Action, ...], ...]
    asynchronous: bool = False
    halves: frozenset[int] = frozenset()

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """All actions, rank by rank."""
        return tuple(chain.from_iterable(self.ranks))

    @cached_property
    def split(self) -> frozenset[int]:
        """Student stages whose backward runs as I and W."""
        return self.halves | {a.stage for a in self.actions if a.op is Op.INPUT_BACKWARD}

    @cached_property
    def needs(self) -> dict[Action, tuple[Dependency, ...]]:
        """Dependencies of each action, on the same rank or on others."""
        return {action: depends_on(action, self.pipeline, self.split) for action in self.actions}

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """A message for each dependency between ranks, in an order that is each channel's order.

        A forward that runs steps early sends its output in the step that runs it, although the next
        stage or the loss reads it in a later step; so messages are found from the producers.
        """
        consumers = _consumers(self)
        return tuple(
            Message(producer, need.consumer, need.payload, rank, target)
            for rank, actions in enumerate(self.ranks)
            for producer in actions
            for need in consumers.get(producer, ())
            if (target := self.pipeline.rank_of(need.consumer)) != rank and need.payload != "saved"
        )

    @cached_property
    def sends(self) -> dict[Action, tuple[Message, ...]]:
        """Messages sent right after each producer."""
        by_producer: dict[Action, tuple[Message, ...]] = {}
        for message in self.messages:
            by_producer[message.producer] = (*by_producer.get(message.producer, ()), message)
        return by_producer

    @cached_property
    def receives(self) -> dict[int, tuple[Message, ...]]:
        """Messages that each rank receives, in the order in which they must be posted."""
        ranks = range(self.pipeline.num_ranks)
        return {rank: tuple(m for m in self.messages if m.target == rank) for rank in ranks}

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


def _consumers(schedule: Schedule) -> dict[Action, list[Dependency]]:
    """Dependencies on each producer, including those of actions that a later step runs."""
    pipeline = schedule.pipeline
    actions = set(schedule.actions)
    found: dict[Action, list[Dependency]] = {}
    for action in sorted(actions | _later(schedule, actions), key=_stable):
        for dependency in depends_on(action, pipeline, schedule.split):
            if not (action.batch > 0 and _waits_for_its_step(dependency)):
                found.setdefault(dependency.producer, []).append(dependency)
    return found


def _waits_for_its_step(dependency: Dependency) -> bool:
    """Whether it is sent in the step of its batch; only the teacher's inputs are sent ahead."""
    student = dependency.consumer.op is Op.FORWARD
    return dependency.payload == "batch" or (dependency.payload == "input" and student)


def _later(schedule: Schedule, actions: Collection[Action]) -> set[Action]:
    """Possible consumers in later steps.

    Losses, prologues, forwards of batches that run ahead, and backwards whose loss has run.
    """
    pipeline = schedule.pipeline
    batches = {action.batch for action in actions}
    networks = ((Op.FORWARD, pipeline.student), (Op.TEACHER, pipeline.teacher))
    readers = [(Op.LOSS, rank) for rank in pipeline.loss_ranks]
    readers += [(Op.PROLOGUE, pipeline.data_rank)] * pipeline.is_fed
    begun = {batch for batch in batches if batch <= 0} if schedule.asynchronous else ()
    return (
        {Action(*reader, batch=b) for reader in readers for b in batches}
        | {
            Action(op, stage, unit, batch)
            for op, network in networks
            if network is not None
            for stage in range(network.num_stages)
            for unit in network.units_of(stage)
            for batch in batches - {0}
        }
        | {
            Action(_backward_of(stage, schedule), stage, unit, batch)
            for stage in range(pipeline.student.num_stages)
            for unit in pipeline.student.units_of(stage)
            for batch in begun
        }
    )


def _backward_of(stage: int, schedule: Schedule) -> Op:
    return Op.INPUT_BACKWARD if stage in schedule.split else Op.BACKWARD


def _stable(action: Action) -> tuple[int, str, int, int]:
    unit = -1 if action.unit is None else action.unit
    return (action.batch, action.op.value, action.stage, unit)


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
