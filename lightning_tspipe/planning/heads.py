"""Placement of the heads of a fan-out, and of the trunk's cuts beside them.

A rank is busy with its part of the trunk, with the steps of its heads, and, on the data rank, with
reading; a step takes as long as on the busiest rank. With few heads and ranks, all assignments are
tried; otherwise the largest heads are assigned first, and single heads are moved. For each
assignment the trunk is cut optimally (``partition``)::

    rank 1 | data █ trunk ██████ head c ███     |
    rank 0 | trunk ███      head a ████ head b █|
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.planning.partition import megabytes, partition
from lightning_tspipe.planning.pieces import WHOLE, Pieces
from lightning_tspipe.planning.placement import Placement, default_ranks
from lightning_tspipe.planning.table import aligned

_MOST_WAYS = 4096
_MOST_CUTS = 200
"""Number of assignments for which the trunk is cut, the most even ones first."""


@dataclass(frozen=True)
class HeadCost:
    """Costs of one head.

    Attributes:
        name: Name of the head.
        seconds: Seconds per step: forward, loss, backward and update.
        num_bytes: Parameters, gradients and optimizer state.
    """

    name: str
    seconds: float
    num_bytes: int = 0


@dataclass(frozen=True)
class TrunkCost:
    """Costs of the atoms of the trunk.

    Attributes:
        seconds: Seconds of a forward of the whole batch.
        num_bytes: Bytes of parameters and buffers.
        transfers: Seconds to send the output of each atom.
        names: Names of the atoms, for messages.
        joined: Atoms that must be on the stage of the next one.
    """

    seconds: tuple[float, ...]
    num_bytes: tuple[int, ...]
    transfers: tuple[float, ...]
    names: tuple[str, ...]
    joined: frozenset[int] = frozenset()

    @property
    def num_pieces(self) -> int:
        """The largest number of stages."""
        return len(self.seconds) - len(self.joined)


@dataclass(frozen=True)
class Spread:
    """A placement of the trunk and of the heads.

    Attributes:
        cuts: First atom of each stage of the trunk, and the number of atoms.
        ranks: Rank of each stage of the trunk.
        head_ranks: Rank of each head.
        busy: Seconds per step of each rank.
        num_bytes: Bytes that each rank holds.
    """

    cuts: tuple[int, ...]
    ranks: tuple[int, ...]
    head_ranks: tuple[int, ...]
    busy: tuple[float, ...]
    num_bytes: tuple[int, ...]

    def placement(self, depth: int, num_microbatches: int = 1, pieces: Pieces = WHOLE) -> Placement:
        """The placement that the engine carries out.

        Args:
            depth: Number of batches that the trunk may run ahead.
            num_microbatches: Number of pieces in which a batch goes through the trunk.
            pieces: The atoms within the first stage that a batch goes through in pieces.
        """
        return Placement(
            num_ranks=len(self.busy),
            student_cuts=tuple(range(len(self.head_ranks) + 1)),
            student_ranks=self.head_ranks,
            teacher_cuts=self.cuts,
            teacher_ranks=self.ranks,
            num_microbatches=num_microbatches,
            depth=depth,
            pieces=pieces,
        )

    def describe(self, heads: Sequence[HeadCost]) -> str:
        """Describe each rank, as a table."""
        rows = [("rank", "trunk", "heads", "ms per step", "memory")]
        for rank, (seconds, size) in enumerate(zip(self.busy, self.num_bytes, strict=True)):
            atoms = [
                f"atoms {start}-{stop - 1}"
                for stage, (start, stop) in enumerate(pairwise(self.cuts))
                if self.ranks[stage] == rank
            ]
            own = [h.name for h, where in zip(heads, self.head_ranks, strict=True) if where == rank]
            cells = (", ".join(atoms) or "-", ", ".join(own) or "-")
            rows.append((str(rank), *cells, f"{seconds * 1e3:.1f}", megabytes(size)))
        return "\n".join(aligned(rows))


def spread(  # noqa: PLR0913, PLR0917 - everything that decides who does what
    trunk: TrunkCost,
    heads: Sequence[HeadCost],
    num_ranks: int,
    memory_limit: float = math.inf,
    cuts: tuple[int, ...] | None = None,
    beside: Sequence[float] = (),
) -> Spread:
    """Find the placement whose busiest rank is least busy; among equals, the one with less memory.

    Args:
        trunk: Costs of the trunk.
        heads: Costs of the heads.
        num_ranks: Number of devices.
        memory_limit: Bytes that each device may hold.
        cuts: The trunk's cuts, if given: first atom of each stage, and the number of atoms.
        beside: Seconds that each rank is busy with something else; by default none.

    Raises:
        PartitionError: Nothing fits; names the largest head, or an atom of the trunk.
    """
    _check_sizes(heads, memory_limit)
    task = _Task(
        trunk, tuple(heads), num_ranks, memory_limit, cuts, tuple(beside) or (0.0,) * num_ranks
    )
    best: Spread | None = None
    failure: PartitionError | None = None
    for way in sorted(task.ways(), key=task.evenness)[:_MOST_CUTS]:
        if best is not None and task.evenness(way)[0] >= max(best.busy):
            break
        for num_stages in task.numbers_of_stages:
            try:
                found = task.cut(way, num_stages)
            except PartitionError as error:
                failure = error
                continue
            if best is None or _score(found) < _score(best):
                best = found
    if best is None:
        raise failure or PartitionError("no placement of the heads fits the memory")
    return best


def _check_sizes(heads: Sequence[HeadCost], memory_limit: float) -> None:
    for head in heads:
        if head.num_bytes > memory_limit:
            raise PartitionError(
                f"head {head.name!r} alone needs {megabytes(head.num_bytes)} for parameters, "
                f"gradients and optimizer state, and a rank may hold {megabytes(memory_limit)}"
            )


def _score(found: Spread) -> tuple[float, int]:
    return max(found.busy), max(found.num_bytes)


@dataclass(frozen=True)
class _Task:
    """The arguments of ``spread``; a *way* is an assignment: the rank of each head."""

    trunk: TrunkCost
    heads: tuple[HeadCost, ...]
    num_ranks: int
    memory_limit: float
    given: tuple[int, ...] | None
    beside: tuple[float, ...]

    @property
    def numbers_of_stages(self) -> Sequence[int]:
        """Numbers of stages that the trunk may be cut into."""
        if self.given is not None:
            return (len(self.given) - 1,)
        return range(1, min(self.num_ranks, self.trunk.num_pieces) + 1)

    def ways(self) -> Iterator[tuple[int, ...]]:
        """All assignments of few heads; a good assignment of many, and its neighbours."""
        if self.num_ranks ** len(self.heads) <= _MOST_WAYS:
            yield from product(range(self.num_ranks), repeat=len(self.heads))
            return
        dealt = [0] * len(self.heads)
        busy = list(self.beside)
        for index in sorted(range(len(dealt)), key=lambda i: -self.heads[i].seconds):
            rank = busy.index(min(busy))
            dealt[index] = rank
            busy[rank] += self.heads[index].seconds
        yield tuple(dealt)
        for index in range(len(dealt)):
            for rank in range(self.num_ranks):
                if rank != dealt[index]:
                    yield (*dealt[:index], rank, *dealt[index + 1 :])

    def loads(self, way: tuple[int, ...]) -> tuple[list[float], list[int]]:
        """Seconds and bytes of each rank, without the trunk."""
        seconds, sizes = list(self.beside), [0] * self.num_ranks
        for head, rank in zip(self.heads, way, strict=True):
            seconds[rank] += head.seconds
            sizes[rank] += head.num_bytes
        return seconds, sizes

    def evenness(self, way: tuple[int, ...]) -> tuple[float, float]:
        """A lower bound of the busiest rank for any cut of the trunk; and the fullest rank."""
        seconds, sizes = self.loads(way)
        total = sum(seconds) + sum(self.trunk.seconds)
        return max(*seconds, total / self.num_ranks), max(sizes)

    def cut(self, way: tuple[int, ...], num_stages: int) -> Spread:
        """One assignment, with the trunk cut for it.

        Raises:
            PartitionError: It does not fit the memory.
        """
        trunk = self.trunk
        seconds, sizes = self.loads(way)
        if max(sizes) > self.memory_limit:
            raise PartitionError(f"{megabytes(max(sizes))} of heads on one rank")
        ranks = default_ranks(num_stages, self.num_ranks)
        limits: list[int] | None = None
        if math.isfinite(self.memory_limit):
            limits = [int(self.memory_limit) - sizes[rank] for rank in ranks]
        cuts = self.given or partition(
            trunk.seconds,
            num_stages,
            memory=trunk.num_bytes,
            memory_limits=limits,
            transfers=trunk.transfers,
            loads=[seconds[rank] for rank in ranks],
            joined=trunk.joined,
            names=trunk.names,
        )
        for rank, (start, stop) in zip(ranks, pairwise(cuts), strict=True):
            seconds[rank] += sum(trunk.seconds[start:stop])
            sizes[rank] += sum(trunk.num_bytes[start:stop])
        return Spread(cuts, ranks, way, tuple(seconds), tuple(sizes))
