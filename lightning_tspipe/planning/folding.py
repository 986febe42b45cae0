"""Folded pipelines: two stages per rank, where atoms are too coarse for one.

Twelve equal layers cannot be shared evenly by eight ranks, nor can their thirds be cut wherever one
likes. A rank that holds two short pieces, one of each half of the network, can be given what is
missing in the one by the other::

    stage     0  1  2 .. P-1 | P  P+1 .. 2P-1
    rank    P-1  .. ..     0 | P-1 ..       0

    best[r][i, j] = least busiest rank among the first r, if they hold the atoms before i of the
                    first half and before j of the second

Where one piece is enough, the last ranks get no second one. Stages follow each other round the
ranks, as everywhere (see :func:`~.placement.default_ranks`). Messages are twice as many, and a unit
has a longer way: the simulation has the last word.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

_ENOUGH = 1.005
"""Nothing evener is looked for."""

_Cuts = tuple[int, ...]


def fold(
    costs: Sequence[float],
    speeds: Sequence[float],
    num_stages: int,
    *,
    joined: Collection[int] = (),
    limit: float,
) -> _Cuts | None:
    """Cut a chain of atoms into more stages than ranks, as evenly as that can be.

    Args:
        costs: Seconds of each atom.
        speeds: By stage of the first half: how many times as fast its rank does an atom.
        num_stages: How many stages there may be: up to two for each rank.
        joined: Atoms that must be on one stage with the atom after them.
        limit: Seconds of the busiest rank that must be undercut.

    Returns:
        First atom of each stage, and the number of atoms; None if nothing is below the limit.

    >>> fold([1, 1, 3, 1], [1, 1], 3, limit=4)  # with one stage each, one of them has 4
    (0, 2, 3, 4)
    """
    sums = tuple(accumulate(costs, initial=0.0))
    chain = _Chain(
        positions=tuple(n for n in range(len(costs) + 1) if n - 1 not in joined),
        sums=tuple(sums[n] for n in range(len(costs) + 1) if n - 1 not in joined),
        speeds=tuple(speeds),
        num_second=num_stages - len(speeds),
    )
    best: _Cuts | None = None
    for middle in chain.middles():
        found = chain.solve(middle, limit)
        if found is not None:
            limit, best = found
        if limit <= _ENOUGH * chain.mean:
            break
    return best


@dataclass(frozen=True)
class _Chain:
    """The pieces between which cuts are possible, as running sums."""

    positions: tuple[int, ...]
    sums: tuple[float, ...]
    speeds: tuple[float, ...]
    num_second: int

    @property
    def mean(self) -> float:
        """What the busiest rank works at least."""
        return self.sums[-1] / sum(self.speeds)

    def middles(self) -> list[int]:
        """Where the second half may begin, from the middle outwards."""
        num_ranks, last = len(self.speeds), len(self.positions) - 1
        half = self.sums[-1] / 2
        return sorted(range(num_ranks, last), key=lambda n: abs(self.sums[n] - half))

    def solve(self, middle: int, limit: float) -> tuple[float, _Cuts] | None:
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
            is_last = place + 1 >= self.num_second
            states = {k: v for k, v in after.items() if k[1] == last or not is_last}
        found = states.get((middle, last))
        if found is None or found[0] >= limit:
            return None
        cuts = dict.fromkeys((*found[1], *found[2]))  # empty pieces at the end fall away
        return found[0], tuple(self.positions[n] for n in cuts)

    def _pieces(
        self, held: tuple[int, int], middle: int, most: float, rest: float
    ) -> Iterator[tuple[int, int, float]]:
        """What the next rank may get: the ends of both pieces, and their work, below ``most``.

        Args:
            held: Where its pieces begin.
            middle: Where the first half ends.
            most: Work that it must stay below.
            rest: Work that the ranks after it can do at most.
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
