"""Placement of the heads of a fan-out, and of the trunk's cuts beside them.

A rank is busy with its part of the trunk, with the steps of its heads, and, on the data rank, with
reading; a step takes as long as on the busiest rank. With few heads and ranks, all assignments are
tried; otherwise the largest heads are assigned first, and single heads are moved. For each
assignment the trunk is cut optimally (``partition``)::

    rank 1 | data █ trunk ██████ head c ███     |
    rank 0 | trunk ███      head a ████ head b █|

Without heads the same search places a network whose forwards alone run, beside others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from operator import attrgetter

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.planning.cluster import Link
from lightning_tspipe.planning.partition import Chain
from lightning_tspipe.planning.placement import WHOLE, Cuts, Pieces, default_ranks
from lightning_tspipe.planning.profile import NetworkProfile, seconds_at
from lightning_tspipe.planning.table import aligned, megabytes

_MOST_WAYS = 4096
_MOST_CUTS = 200
"""Number of assignments for which the trunk is cut, the most even ones first."""

_ABOUT = 1.02
_COPIED_PER_SECOND = 4.0e9
_SECONDS_PER_PIECE = 5e-5


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


def trunk_chain(
    profile: NetworkProfile,
    seconds: Sequence[float],
    samples: int,
    link: Link,
    num_messages: int = 1,
) -> Chain:
    """A network that was measured, as a chain of atoms to be cut.

    Args:
        profile: The network.
        seconds: Seconds per step of each atom, for forwards of the whole batch.
        samples: Samples per step.
        link: Between two ranks.
        num_messages: Messages per step between two stages.
    """
    sizes = [samples * atom.output_bytes_per_sample for atom in profile.atoms]
    return Chain(
        seconds,
        memory=[atom.parameter_bytes for atom in profile.atoms],
        transfers=[num_messages * link.latency + size / link.bandwidth for size in sizes],
        names=[atom.name for atom in profile.atoms],
        joined=profile.joined,
    )


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

    cuts: Cuts
    ranks: tuple[int, ...]
    head_ranks: tuple[int, ...]
    busy: tuple[float, ...]
    num_bytes: tuple[float, ...]

    @property
    def score(self) -> tuple[float, float]:
        """Seconds of the busiest rank, and bytes of the fullest one, to be minimised."""
        return max(self.busy), max(self.num_bytes)

    def describe(self, heads: Sequence[HeadCost]) -> str:
        """Describe each rank, as a table."""
        rows = [("rank", "trunk", "heads", "ms per step", "memory")]
        for rank, (seconds, size) in enumerate(zip(self.busy, self.num_bytes, strict=True)):
            stages = zip(pairwise(self.cuts), self.ranks, strict=True)
            atoms = [f"atoms {start}-{stop - 1}" for (start, stop), at in stages if at == rank]
            own = [h.name for h, where in zip(heads, self.head_ranks, strict=True) if where == rank]
            cells = (", ".join(atoms) or "-", ", ".join(own) or "-")
            rows.append((str(rank), *cells, f"{seconds * 1e3:.1f}", megabytes(size)))
        return "\n".join(aligned(rows))


@dataclass(frozen=True)
class Task:
    """A trunk and its heads to be placed; a *way* is an assignment: the rank of each head.

    Attributes:
        trunk: The trunk.
        heads: Costs of the heads.
        num_ranks: Number of devices.
        memory_limit: Bytes that each device may hold.
        cuts: The trunk's cuts, if given: first atom of each stage, and the number of atoms.
        beside: Seconds that each rank is busy with something else; () for none.
    """

    trunk: Chain
    heads: Sequence[HeadCost]
    num_ranks: int
    memory_limit: float = math.inf
    cuts: Cuts | None = None
    beside: Sequence[float] = ()

    def best(self) -> Spread:
        """The placement whose busiest rank is least busy; among equals, the one with less memory.

        Raises:
            PartitionError: Nothing fits; names the largest head, or an atom of the trunk.
        """
        self._check_sizes()
        most = len(self.trunk.costs) - len(self.trunk.joined)
        numbers = [len(self.cuts) - 1] if self.cuts else range(1, min(self.num_ranks, most) + 1)
        best: Spread | None = None
        failure = PartitionError("no placement of the heads fits the memory")
        for way in sorted(self._ways(), key=self._evenness)[:_MOST_CUTS]:
            if best is not None and self._evenness(way)[0] >= max(best.busy):
                break
            for num_stages in numbers:
                try:
                    found = self._cut(way, num_stages)
                except PartitionError as error:
                    failure = error
                else:
                    best = found if best is None else min(best, found, key=attrgetter("score"))
        if best is None:
            raise failure
        return best

    def _check_sizes(self) -> None:
        """Refuse a head that is too large for any rank."""
        limit = self.memory_limit
        for head in self.heads:
            if head.num_bytes > limit:
                raise PartitionError(
                    f"head {head.name!r} alone needs {megabytes(head.num_bytes)} for parameters, "
                    f"gradients and optimizer state, but a rank may hold {megabytes(limit)}"
                )

    def _ways(self) -> Iterator[tuple[int, ...]]:
        """All assignments of few heads; a good assignment of many, and its neighbours."""
        if self.num_ranks ** len(self.heads) <= _MOST_WAYS:
            yield from product(range(self.num_ranks), repeat=len(self.heads))
            return
        dealt = [0] * len(self.heads)
        busy = list(self.beside) or [0.0] * self.num_ranks
        for index in sorted(range(len(dealt)), key=lambda i: -self.heads[i].seconds):
            rank = busy.index(min(busy))
            dealt[index] = rank
            busy[rank] += self.heads[index].seconds
        yield tuple(dealt)
        for index, rank in product(range(len(dealt)), range(self.num_ranks)):
            if rank != dealt[index]:
                yield (*dealt[:index], rank, *dealt[index + 1 :])

    def _loads(self, way: tuple[int, ...]) -> tuple[list[float], list[float]]:
        """Seconds and bytes of each rank, without the trunk."""
        seconds = list(self.beside) or [0.0] * self.num_ranks
        sizes: list[float] = [0] * self.num_ranks
        for head, rank in zip(self.heads, way, strict=True):
            seconds[rank] += head.seconds
            sizes[rank] += head.num_bytes
        return seconds, sizes

    def _evenness(self, way: tuple[int, ...]) -> tuple[float, float]:
        """A lower bound of the busiest rank for any cut of the trunk; and the fullest rank."""
        seconds, sizes = self._loads(way)
        total = sum(seconds) + sum(self.trunk.costs)
        return max(*seconds, total / self.num_ranks), max(sizes)

    def _cut(self, way: tuple[int, ...], num_stages: int) -> Spread:
        """One assignment, with the trunk cut for it.

        Raises:
            PartitionError: It does not fit the memory.
        """
        trunk = self.trunk
        seconds, sizes = self._loads(way)
        if max(sizes) > self.memory_limit:
            raise PartitionError(f"{megabytes(max(sizes))} of heads on one rank")
        ranks = default_ranks(num_stages, self.num_ranks)
        cuts = self.cuts
        if cuts is None:
            free, loads = [self.memory_limit - sizes[r] for r in ranks], [seconds[r] for r in ranks]
            chain = replace(trunk, num_stages=num_stages, memory_limits=free, loads=loads)
            cuts = chain.cut()
        for rank, (start, stop) in zip(ranks, pairwise(cuts), strict=True):
            seconds[rank] += sum(trunk.costs[start:stop])
            sizes[rank] += sum(trunk.memory[start:stop])
        return Spread(cuts, ranks, way, tuple(seconds), tuple(sizes))


def choose_pieces(
    profile: NetworkProfile, batch_size: int, input_bytes: int, ends: Collection[int]
) -> Pieces:
    """The choice with the least memory among those about as fast as the fastest.

    Args:
        profile: The trunk, measured at the sizes that pieces may have, and for a whole batch.
        batch_size: Samples in a batch.
        input_bytes: Bytes per sample of the first atom's input.
        ends: Possible numbers of atoms.
    """
    bytes_between = [input_bytes, *(atom.output_bytes_per_sample for atom in profile.atoms)]
    smaller = [size for size in profile.sizes if size < batch_size]
    ways = [WHOLE]
    ways += [Pieces(end, math.ceil(batch_size / size)) for size in smaller for end in ends]

    def seconds(way: Pieces) -> float:
        total = sum(seconds_in_pieces(way, profile, batch_size))
        if way.num_atoms:
            copied = batch_size * bytes_between[way.num_atoms]
            total += copied / _COPIED_PER_SECOND + way.number * _SECONDS_PER_PIECE
        return total

    fastest = min(map(seconds, ways))
    fast = [way for way in ways if seconds(way) <= _ABOUT * fastest]
    return min(fast, key=lambda way: (_peak(way, batch_size, bytes_between), way.num_atoms))


def seconds_in_pieces(
    pieces: Pieces, profile: NetworkProfile, batch_size: int
) -> tuple[float, ...]:
    """Seconds of each atom, for a whole batch."""
    size = math.ceil(batch_size / pieces.number)
    first, others = profile.atoms[: pieces.num_atoms], profile.atoms[pieces.num_atoms :]
    divided = (pieces.number * seconds_at(atom.forward, size) for atom in first)
    return (*divided, *(seconds_at(atom.forward, batch_size) for atom in others))


def _peak(way: Pieces, batch_size: int, bytes_between: list[int]) -> float:
    """Peak bytes: the input and output of one atom, and the outputs of finished pieces."""
    pairs = [a + b for a, b in pairwise(bytes_between)]
    whole = batch_size * max(pairs[way.num_atoms :], default=0)
    if not way.num_atoms:
        return whole
    done = batch_size * bytes_between[way.num_atoms]
    return max(whole, 2 * done, done + batch_size * max(pairs[: way.num_atoms]) / way.number)
