"""Lowering: a schedule says what is computed; a program also says what is sent and received."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.dependencies import Dependency, depends_on
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Message:
    """A payload sent between ranks. Messages of one channel arrive in the order of sending.

    Attributes:
        producer: The action after which it is sent.
        consumer: The action before which it must have arrived.
        payload: See :class:`~lightning_tspipe.ir.dependencies.Dependency`.
        source: Sending rank.
        target: Receiving rank.
    """

    producer: Action
    consumer: Action
    payload: str
    source: int
    target: int

    @property
    def channel(self) -> tuple[int, int, str, bool]:
        """Source, target, payload, and whether it belongs to the teacher."""
        teacher = Op.TEACHER in {self.producer.op, self.consumer.op}
        return (self.source, self.target, self.payload, teacher)

    def __str__(self) -> str:
        return f"{self.producer}>{self.consumer}@{self.target}"


@dataclass(frozen=True)
class Program:
    """The actions and messages of all ranks in one step.

    Attributes:
        schedule: The schedule that was lowered.
        messages: All messages of the step, in an order that is each channel's order.
    """

    schedule: Schedule
    messages: tuple[Message, ...]

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
        return {
            rank: tuple(message for message in self.messages if message.target == rank)
            for rank in range(self.schedule.pipeline.num_ranks)
        }

    @cached_property
    def needs(self) -> dict[Action, tuple[Dependency, ...]]:
        """Dependencies of each consumer, on the same rank or on others."""
        pipeline, split = self.schedule.pipeline, self.schedule.split
        return {
            action: depends_on(action, pipeline, split)
            for actions in self.schedule.ranks
            for action in actions
        }


def lower(schedule: Schedule) -> Program:
    """Make a message of every dependency between ranks.

    A forward that runs steps early sends its output in the step that runs it, although the next
    stage or the loss reads it in a later step; so messages are found from the producers.
    """
    pipeline = schedule.pipeline
    consumers = _consumers(schedule)
    messages = []
    for rank, actions in enumerate(schedule.ranks):
        for producer in actions:
            for dependency in consumers.get(producer, ()):
                target = pipeline.rank_of(dependency.consumer)
                if target != rank and dependency.payload != "saved":
                    messages.append(
                        Message(producer, dependency.consumer, dependency.payload, rank, target)
                    )
    return Program(schedule, tuple(messages))


def _consumers(schedule: Schedule) -> dict[Action, tuple[Dependency, ...]]:
    """Dependencies on each producer, including those of actions that a later step runs."""
    pipeline = schedule.pipeline
    actions = {action for rank in schedule.ranks for action in rank}
    order = sorted(actions | _later(pipeline, actions), key=_stable)
    found: dict[Action, list[Dependency]] = {}
    for action in order:
        for dependency in depends_on(action, pipeline, schedule.split):
            if action.batch > 0 and _waits_for_its_step(dependency):
                continue
            found.setdefault(dependency.producer, []).append(dependency)
    return {producer: tuple(dependencies) for producer, dependencies in found.items()}


def _waits_for_its_step(dependency: Dependency) -> bool:
    """Whether it is sent in the step of its batch; only the teacher's inputs are sent ahead."""
    student = dependency.consumer.op is Op.FORWARD
    return dependency.payload == "batch" or (dependency.payload == "input" and student)


def _later(pipeline: Pipeline, actions: Collection[Action]) -> set[Action]:
    """Possible consumers in later steps: losses, and forwards of the batches that run ahead."""
    batches = {action.batch for action in actions}
    networks = ((Op.FORWARD, pipeline.student), (Op.TEACHER, pipeline.teacher))
    return {Action(Op.LOSS, rank, batch=b) for rank in pipeline.loss_ranks for b in batches} | {
        Action(op, stage, unit, batch)
        for op, network in networks
        if network is not None
        for stage in range(network.num_stages)
        for unit in network.units_of(stage)
        for batch in batches - {0}
    }


def _stable(action: Action) -> tuple[int, str, int, int]:
    unit = -1 if action.unit is None else action.unit
    return (action.batch, action.op.value, action.stage, unit)
