"""The exact min-max partitions of a chain of atoms: contiguous, and folded.

*Contiguous*, under memory limits (TSPipe, section 3.4): dynamic programming over (stages, atoms).
The best partition of the first ``n`` atoms into ``s`` stages is the best partition of some first
``m`` of them into ``s - 1`` stages, and the rest as stage s::

    best[s][n] = min over m of max(best[s - 1][m], cost of atoms m .. n - 1 on stage s)

Devices may differ in speed and memory: stages are assigned in order, so each option is priced for
its device.

*Folded*, two stages per rank, where atoms are too coarse for one: twelve equal layers cannot be
divided evenly among eight ranks, nor can a layer be cut anywhere. A rank that holds two short
pieces, one from each half of the network, can balance one with the other::

    stage     0  1  2 .. P-1 | P  P+1 .. 2P-1
    rank    P-1  .. ..     0 | P-1 ..       0

    best[r][i, j] = least busiest rank among the first r, if they hold the atoms before i of the
                    first half and before j of the second

If one piece is enough, the last ranks get no second one. Stages are placed round-robin, as
everywhere (see :func:`~.placement.default_ranks`). There are twice as many messages, and a unit
takes a longer path, so that the simulation decides.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.planning.placement import Cuts
from lightning_tspipe.planning.table import megabytes

_ENOUGH = 1.005
"""A balance of folded stages this close to the mean ends the search."""


def too_few_atoms(num_atoms: int, num_stages: int) -> PartitionError:
    """The error for a network that cannot be cut finely enough."""
    return PartitionError(
        f"the network can be cut into {num_atoms} "
        f"{'piece' if num_atoms == 1 else 'pieces'} at most, but {num_stages} stages are "
        f"requested. Use devices={num_atoms} or fewer, or write the network so that fewer values "
        "are alive between its layers (a cut never breaks a skip connection)"
    )


@dataclass(frozen=True)
class Chain:
    """Atoms to be cut so that the slowest stage is as fast as possible.

    Attributes:
        costs: Seconds of each atom.
        num_stages: Stages to make.
        memory: Bytes of each atom; () if they don't matter.
        memory_limits: Bytes that each stage may hold; () if they don't matter.
        transfers: Seconds to send the output of each atom, if the next one is on another stage.
            A stage costs the larger of its compute and its transfer: they overlap. () for 0.
        loads: Seconds that each stage is busy with something else; () for 0.
        speeds: Relative speed of each stage's device; () for 1.
        fits: Additional condition on a stage: whether the atoms ``start`` to ``end - 1`` may be on
            it, called with start, end and stage.
        joined: Atoms that must be on one stage with the atom after them.
        names: Names of the atoms, for errors.
        allow_empty: Whether a stage may get no atom.
    """

    costs: Sequence[float]
    num_stages: int = 1
    memory: Sequence[float] = ()
    memory_limits: Sequence[float] = ()
    transfers: Sequence[float] = ()
    loads: Sequence[float] = ()
    speeds: Sequence[float] = ()
    fits: Callable[[int, int, int], bool] | None = None
    joined: Collection[int] = ()
    names: Sequence[str] = ()
    allow_empty: bool = False

    def cut(self) -> Cuts:
        """First atom of each stage, and the number of atoms: ``num_stages + 1`` numbers.

        Raises:
            PartitionError: Too few atoms, or no cut fits the memory; names the atom and the amount.

        >>> Chain([1, 1, 1, 3], 2).cut()
        (0, 3, 4)
        """
        cuts = self._positions
        if not self.allow_empty and len(cuts) <= self.num_stages:
            raise too_few_atoms(len(cuts) - 1, self.num_stages)
        best: dict[int, _Option] = {0: (0.0, 0.0, (0,))}
        for stage in range(self.num_stages):
            is_last = stage == self.num_stages - 1
            ends = cuts[-1:] if is_last else cuts
            reached = {end: self._best(best, end, stage, is_last=is_last) for end in ends}
            best = {end: option for end, option in reached.items() if option is not None}
        if cuts[-1] not in best:
            raise self._does_not_fit()
        return best[cuts[-1]][2]

    @cached_property
    def _positions(self) -> tuple[int, ...]:
        """Positions where cuts are possible."""
        return tuple(n for n in range(len(self.costs) + 1) if n - 1 not in self.joined)

    @cached_property
    def _seconds(self) -> tuple[float, ...]:
        return tuple(accumulate(self.costs, initial=0.0))

    @cached_property
    def _held(self) -> tuple[float, ...]:
        return tuple(accumulate(self.memory, initial=0))

    def _best(
        self, before: dict[int, _Option], end: int, stage: int, *, is_last: bool
    ) -> _Option | None:
        """The best partition of the atoms before ``end``, of which the last are on ``stage``."""
        seconds, held = self._seconds, self._held
        load = self.loads[stage] if self.loads else 0.0
        speed = self.speeds[stage] if self.speeds else 1.0
        best: _Option | None = None
        # From the shortest stage on: when one is too large or too slow, so are all longer ones.
        for start in reversed(before):
            if start > end or (start == end and not self.allow_empty):
                continue
            if self.memory_limits and held[end] - held[start] > self.memory_limits[stage]:
                break
            compute = load + (seconds[end] - seconds[start]) / speed
            if best is not None and compute > best[0]:
                break
            if self.fits is not None and not self.fits(start, end, stage):
                continue
            sends = self.transfers and not is_last and end > start
            cost = max(compute, self.transfers[end - 1]) if sends else compute
            slowest, squares, cuts = before[start]
            score = max(slowest, cost), squares + cost * cost
            if best is None or score <= best[:2]:
                option = (*score, (*cuts, end))
                best = option if best is None else min(best, option)
        return best

    def _does_not_fit(self) -> PartitionError:
        memory, limits = self.memory, self.memory_limits
        if not memory:
            return PartitionError(f"no cut into {self.num_stages} stages fits")
        largest = max(range(len(memory)), key=memory.__getitem__)
        name, size = self.names[largest] if self.names else str(largest), memory[largest]
        remedy = "Use more devices, smaller batches, or a smaller network"
        if size > max(limits):
            return PartitionError(
                f"atom {name!r} alone needs {megabytes(size)}, but a stage may hold "
                f"{megabytes(max(limits))}. An atom is never divided. {remedy}"
            )
        return PartitionError(
            f"no cut into {len(limits)} stages fits: the network needs {megabytes(sum(memory))}, "
            f"atom {name!r} alone {megabytes(size)}; the stages may hold "
            f"{', '.join(map(megabytes, limits))}. {remedy}"
        )

    def fold(self, limit: float) -> Cuts | None:
        """Cut into up to ``num_stages`` stages, two on some of the ranks, as evenly as possible.

        Each of ``speeds`` is that of a rank: of a stage of the first half.

        Args:
            limit: Seconds that the busiest rank must stay below.

        Returns:
            First atom of each stage, and the number of atoms; None if nothing is below the limit.

        >>> Chain([1, 1, 3, 1], 3, speeds=[1, 1]).fold(4)  # with one stage each, one of them has 4
        (0, 2, 3, 4)
        """
        best: Cuts | None = None
        sums, num_ranks = self._sums, len(self.speeds)
        half, last = sums[-1] / 2, len(sums) - 1
        # Where the second half may begin, from the middle outwards.
        for middle in sorted(range(num_ranks, last), key=lambda n: abs(sums[n] - half)):
            found = self._folded(middle, limit)
            if found is not None:
                limit, best = found
            if limit <= _ENOUGH * sums[-1] / sum(self.speeds):  # if divided evenly
                break
        return best

    @cached_property
    def _sums(self) -> tuple[float, ...]:
        """Running sums of the seconds at the positions where cuts are possible."""
        return tuple(self._seconds[n] for n in self._positions)

    def _folded(self, middle: int, limit: float) -> tuple[float, Cuts] | None:
        """The busiest rank and the cuts, if it is below ``limit``."""
        states: _Folds = {(0, middle): (0.0, (0,), (middle,))}
        last = len(self._positions) - 1
        for place, speed in enumerate(self.speeds):
            after: _Folds = {}
            rest = limit * sum(self.speeds[place + 1 :])
            for held, (busiest, first, second) in states.items():
                for end, other, work in self._pieces(held, middle, limit * speed, rest):
                    score = max(busiest, work / speed)
                    known = after.get((end, other))
                    if known is None or score < known[0]:
                        after[end, other] = (score, (*first, end), (*second, other))
            is_last = place + 1 >= self.num_stages - len(self.speeds)
            states = {k: v for k, v in after.items() if k[1] == last or not is_last}
        found = states.get((middle, last))
        if found is None or found[0] >= limit:
            return None
        cuts = dict.fromkeys((*found[1], *found[2]))  # drops empty pieces at the end
        return found[0], tuple(self._positions[n] for n in cuts)

    def _pieces(
        self, held: tuple[int, int], middle: int, most: float, rest: float
    ) -> Iterator[tuple[int, int, float]]:
        """Choices for the next rank: the ends of both its pieces, and their work.

        Args:
            held: Beginnings of its pieces.
            middle: End of the first half.
            most: Its work must stay below this.
            rest: The most work that the ranks after it can do.
        """
        (i, j), sums, last = held, self._sums, len(self._positions) - 1
        least = sums[middle] - sums[i] + sums[last] - sums[j] - rest
        for end in range(i + 1, middle + 1):
            own = sums[end] - sums[i]
            if own >= most:
                return
            # Only behind the last atom may the second piece be empty.
            start = bisect_left(sums, sums[j] + least - own, lo=min(j + 1, last))
            for other in range(start, last + 1):
                work = own + sums[other] - sums[j]
                if work >= most:
                    break
                yield end, other, work


_Option = tuple[float, float, Cuts]
"""Seconds of the slowest stage, sum of squares (to prefer even cuts), and the cuts."""

_Folds = dict[tuple[int, int], tuple[float, Cuts, Cuts]]
"""By the ends of both pieces of the ranks so far: the busiest one, and the cuts of both halves."""
