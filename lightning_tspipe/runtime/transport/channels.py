"""The channels between two ranks: one for each kind of message, so that none takes another's.

Whatever may be asked for before, or taken after, something else between the same two ranks has a
channel of its own. An evaluation comes between two steps and uses those of a step: what is under
way across the end of a step must not travel on them.
"""

from __future__ import annotations

from enum import IntEnum, unique
from functools import cache
from itertools import permutations
from typing import TYPE_CHECKING, NamedTuple

from lightning_tspipe.ir.lowering import Message, Program

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@unique
class Channel(IntEnum):
    """All channels that there are; the numbers are tags on the wire."""

    CONTROL = 0
    """Objects that ranks exchange in turn."""

    # Of the programs of steps and evaluations, for each network
    STUDENT_INPUT = 1
    STUDENT_ACTIVATION = 2
    STUDENT_OUTPUT = 3
    STUDENT_GRADIENT = 4
    TEACHER_INPUT = 5
    TEACHER_ACTIVATION = 6
    TEACHER_OUTPUT = 7

    # Beside them
    FIELDS = 8
    """Fields of a batch for the loss, in an evaluation or the step of a relay."""
    EARLY_FIELDS = 9
    """The same in training, where they may travel steps before their batch."""
    HEADERS = 10
    """Objects: what the data rank says of batches to come."""
    MORE = 11
    """Objects: whether there is another batch, of a loader without a length."""

    # Between ranks that train parts with losses of their own
    PACE = 12
    """Objects: how far they are."""
    LOGS = 13
    """Objects: what they log."""

    # Of a relay
    RELAY_INPUT = 14
    RELAY_ACTIVATION = 15
    SHARED_GRADIENTS = 16
    SHARED_STATISTICS = 17
    """Between the ranks of one stage."""

    SUMS = 18
    """Between two steps: numbers that all ranks add up."""
    PROBES = 19
    """Before all else: messages whose time is measured."""


@unique
class Lane(IntEnum):
    """The queues of an edge, for transports that know no tags: in each, order is everything.

    A program lists what its sender sends in the order in which it does; whatever has no fixed place
    among that has a lane of its own.
    """

    PROGRAM = 0
    FIELDS = 1
    EARLY_FIELDS = 2
    SHARED_STATISTICS = 3
    SHARED_GRADIENTS = 4


_BESIDE = {
    Channel.FIELDS: Lane.FIELDS,
    Channel.EARLY_FIELDS: Lane.EARLY_FIELDS,
    Channel.SHARED_STATISTICS: Lane.SHARED_STATISTICS,
    Channel.SHARED_GRADIENTS: Lane.SHARED_GRADIENTS,
}


def lane_of(channel: Channel) -> Lane:
    """The queue that tensors of a channel wait in."""
    return _BESIDE.get(channel, Lane.PROGRAM)


class Edge(NamedTuple):
    """One queue of tensors from one rank to another, by their places in the pipeline."""

    source: int
    target: int
    lane: Lane


def program_edges(program: Program) -> set[Edge]:
    """The edges over which a program's tensors travel."""
    return {
        Edge(message.source, message.target, Lane.PROGRAM)
        for message in program.messages
        if message.payload != "batch"
    }


def edges_from(source: int, targets: Iterable[int], lane: Lane) -> set[Edge]:
    """The edges from one rank to others; none to itself."""
    return {Edge(source, target, lane) for target in targets if target != source}


def edges_among(ranks: Sequence[int], *lanes: Lane) -> set[Edge]:
    """The edges from each of some ranks to each other one."""
    return {Edge(a, b, lane) for a, b in permutations(ranks, 2) for lane in lanes}


@cache
def edges_along(num_ranks: int) -> frozenset[Edge]:
    """The edges between neighbours, there and back: most programs use all of them anyway."""
    return frozenset(
        Edge(source, target, Lane.PROGRAM)
        for source, target in permutations(range(num_ranks), 2)
        if abs(source - target) == 1
    )


_STUDENT = {
    "input": Channel.STUDENT_INPUT,
    "activation": Channel.STUDENT_ACTIVATION,
    "output": Channel.STUDENT_OUTPUT,
    "gradient": Channel.STUDENT_GRADIENT,
}
_TEACHER = {
    "input": Channel.TEACHER_INPUT,
    "activation": Channel.TEACHER_ACTIVATION,
    "output": Channel.TEACHER_OUTPUT,
}


def channel_of(message: Message) -> Channel:
    """The channel on which a message of a program travels."""
    *_, payload, is_teacher = message.channel
    return (_TEACHER if is_teacher else _STUDENT)[payload]
