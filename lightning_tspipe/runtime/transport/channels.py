"""The channels between two ranks: one for each kind of message, so that none takes another's.

Whatever may be asked for before, or taken after, something else between the same two ranks has a
channel of its own. An evaluation comes between two steps and uses those of a step: what is under
way across the end of a step must not travel on them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum, unique
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from lightning_tspipe.ir.schedule import Message, Schedule


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
    PRINTS = 18
    """Objects: what networks get that was made of the teacher's outputs, where it is compared."""
    LOSS = 19
    """What a step has returned, for the hooks of other ranks."""
    SET = 20
    """Objects: attributes that a step has set, for the same."""

    # Between ranks that train parts with losses of their own
    PACE = 12
    """Objects: how far they are."""
    LOGS = 13
    """Objects: what they log."""

    # Of a relay
    RELAY = 14
    """What the teacher's blocks get; asked for while the step before is computed."""
    SHARED = 15
    """Between the ranks of one stage: statistics, then gradients."""

    ORDERS = 21
    """Objects: in which order of memory gradients come, see ``orders``."""
    SUMS = 16
    """Between two steps: numbers that all ranks add up."""
    PROBES = 17
    """Before all else: messages whose time is measured."""


@unique
class Lane(IntEnum):
    """The queues of an edge, for transports that know no tags: in each, order is everything.

    A program lists what its sender sends in the order in which it does, and sums come between two
    steps; whatever has no fixed place among that has a lane of its own.
    """

    PROGRAM = 0
    FIELDS = 1
    EARLY_FIELDS = 2
    RELAY = 3
    LOSS = 4


MAX_COMMUNICATORS = 8
"""How many communicators a rank has at most, whatever the number of ranks."""

_SMALL = frozenset({Lane.FIELDS, Lane.EARLY_FIELDS, Lane.LOSS})


def lane_of(channel: Channel) -> Lane:
    """The queue that tensors of a channel wait in."""
    return Lane.__members__.get(channel.name, Lane.PROGRAM)


class Edge(NamedTuple):
    """One queue of tensors from one rank to another, by their places in the pipeline."""

    source: int
    target: int
    lane: Lane


def program_edges(program: Schedule) -> set[Edge]:
    """The edges over which a program's tensors travel."""
    return {
        Edge(message.source, message.target, Lane.PROGRAM)
        for message in program.messages
        if message.payload != "batch"
    }


def edges_from(source: int, targets: Iterable[int], lane: Lane) -> set[Edge]:
    """The edges from one rank to others; none to itself."""
    return {Edge(source, target, lane) for target in targets if target != source}


def edges_around(ranks: Sequence[int], lane: Lane) -> set[Edge]:
    """The edges of a ring: from each rank to the next one, and from the last one to the first."""
    following = zip(ranks, [*ranks[1:], ranks[0]], strict=True)
    return {Edge(a, b, lane) for a, b in following if a != b}


@cache
def edges_along(num_ranks: int) -> frozenset[Edge]:
    """The edges between neighbours, there and back: most programs use all of them anyway."""
    pairs = list(pairwise(range(num_ranks)))
    return frozenset(Edge(*pair, Lane.PROGRAM) for a, b in pairs for pair in ((a, b), (b, a)))


def connected(edges: Collection[Edge], before: Iterable[Edge] = ()) -> set[Edge]:
    """Those of some edges that get a communicator, so that no rank has more than eight.

    A communicator holds memory of both GPUs. A rank of a chain needs six; one that feeds many
    heads, or many ranks of a relay, would need one for each. Activations come first and fields of
    a batch, which are small, last; near ranks come before far ones.

    Args:
        edges: The edges that are to be used.
        before: The edges that have a communicator already.
    """

    def precedence(edge: Edge) -> tuple[bool, Lane, int, Edge]:
        return edge.lane in _SMALL, edge.lane, abs(edge.source - edge.target), edge

    uses = Counter(rank for edge in before for rank in edge[:2])
    found = set()
    for edge in sorted(edges, key=precedence):
        if all(uses[rank] < MAX_COMMUNICATORS for rank in edge[:2]):
            uses.update(edge[:2])
            found.add(edge)
    return found


def channel_of(message: Message) -> Channel:
    """The channel on which a message of a program travels."""
    *_, payload, is_teacher = message.channel
    return Channel[f"{'TEACHER' if is_teacher else 'STUDENT'}_{payload.upper()}"]
