"""Folded pipelines: two stages per rank, where atoms are too coarse for one.

Twelve equal layers cannot be divided evenly among eight ranks, nor can a layer be cut anywhere. A
rank that holds two short pieces, one from each half of the network, can balance one with the
other::

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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

_ENOUGH = 1.005
"""A balance this close to the mean ends the search."""

_Cuts = tuple[int, ...]


@dataclass(frozen=True)
class Folding:
    """A chain of atoms to be cut into more stages than ranks.

    Attributes:
        costs: Seconds of each atom.
        speeds: Relative speed of the rank of each stage of the first half.
        num_stages: Largest number of stages: up to two for each rank.
        joined: Atoms that must be on one stage with the atom after them.
    """

    costs: Sequence[float]
    speeds: Sequence[float]
    num_stages: int
    joined: Collection[int] = ()

    def cut(self, limit: float) -> _Cuts | None:
        """Cut as evenly as possible.

        Args:
            limit: Seconds that the busiest rank must stay below.

        Returns:
            First atom of each stage, and the number of atoms; None if nothing is below the limit.

        >>> Folding([1, 1, 3, 1], [1, 1], 3).cut(4)  # with one stage each, one of them has 4
        (0, 2, 3, 4)
        """
        best: _Cuts | None = None
        num_ranks, last = len(self.speeds), len(self.positions) - 1
        half = self.sums[-1] / 2
        # Where the second half may begin, from the middle outwards.
        for middle in sorted(range(num_ranks, last), key=lambda n: abs(self.sums[n] - half)):
            found = self._solve(middle, limit)
            if found is not None:
                limit, best = found
            if limit <= _ENOUGH * self.sums[-1] / sum(self.speeds):  # if divided evenly
                break
        return best

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Positions where cuts are possible."""
        return tuple(n for n in range(len(self.costs) + 1) if n - 1 not in self.joined)

    @cached_property
    def sums(self) -> tuple[float, ...]:
        """Running sums at these positions."""
        sums = tuple(accumulate(self.costs, initial=0.0))
        return tuple(sums[n] for n in self.positions)

    def _solve(self, middle: int, limit: float) -> tuple[float, _Cuts] | None:
        """The busiest rank and the cuts, if it is below ``limit``."""
        states: dict[tuple[int, int], tuple[float, _Cuts, _Cuts]] = {
            (0, middle): (0.0, (0,), (middle,))
        }
        last = len(self.positions) - 1
        for place, speed in enumerate(self.speeds):
            after: dict[tuple[int, int], tuple[float, _Cuts, _Cuts]] = {}
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
        return found[0], tuple(self.positions[n] for n in cuts)

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
        (i, j), sums, last = held, self.sums, len(self.positions) - 1
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
