"""The exact min-max contiguous partition, under memory limits (TSPipe, section 3.4).

Dynamic programming over (stages, atoms): the best partition of the first ``n`` atoms into ``s``
stages is the best partition of some first ``m`` of them into ``s - 1`` stages, and the rest as
stage s::

    best[s][n] = min over m of max(best[s - 1][m], cost of atoms m .. n - 1 on stage s)

Devices may differ in speed and memory: stages are assigned in order, so each option is priced for
its device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lightning_tspipe.errors import PartitionError

Fits = Callable[[int, int, int], bool]
"""Whether atoms ``start`` to ``end - 1`` may be on a stage: called with start, end and stage."""


def partition(  # noqa: PLR0913 -- what a stage costs, and what it may hold
    costs: Sequence[float],
    num_stages: int,
    *,
    memory: Sequence[int] | None = None,
    memory_limits: Sequence[int] | None = None,
    transfers: Sequence[float] | None = None,
    loads: Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
    fits: Fits | None = None,
    joined: Collection[int] = (),
    names: Sequence[str] | None = None,
    allow_empty: bool = False,
) -> tuple[int, ...]:
    """Cut a chain of atoms so that the slowest stage is as fast as possible.

    Args:
        costs: Seconds of each atom.
        num_stages: Stages to make.
        memory: Bytes of each atom.
        memory_limits: Bytes that each stage may hold.
        transfers: Seconds to send the output of each atom, if the next one is on another stage.
            A stage costs the larger of its compute and its transfer: they overlap.
        loads: Seconds that each stage is busy with something else.
        speeds: Relative speed of each stage's device; 1 if not given.
        fits: Additional condition on the atoms of a stage.
        joined: Atoms that must be on one stage with the atom after them.
        names: Names of the atoms, for errors.
        allow_empty: Whether a stage may get no atom.

    Returns:
        First atom of each stage, and the number of atoms: ``num_stages + 1`` numbers.

    Raises:
        PartitionError: Too few atoms, or no cut fits the memory; names the atom and the amount.

    >>> partition([1, 1, 1, 3], 2)
    (0, 3, 4)
    """
    chain = _Chain(
        seconds=tuple(accumulate(costs, initial=0.0)),
        memory=tuple(accumulate(memory or [0] * len(costs), initial=0)),
        limits=tuple(memory_limits or [math.inf] * num_stages),
        transfers=(*(transfers or [0.0] * len(costs)),),
        loads=tuple(loads or [0.0] * num_stages),
        speeds=tuple(speeds or [1.0] * num_stages),
        fits=fits,
        cuts=tuple(n for n in range(len(costs) + 1) if n - 1 not in joined),
        allow_empty=allow_empty,
    )
    if not allow_empty and len(chain.cuts) <= num_stages:
        raise too_few_atoms(len(chain.cuts) - 1, num_stages)
    found = chain.solve(num_stages)
    if found is None and memory is None:
        raise PartitionError(f"no cut into {num_stages} stages fits")
    if found is None:
        labels = names or [str(atom) for atom in range(len(costs))]
        raise _does_not_fit(labels, memory or (), memory_limits or ())
    return found


def too_few_atoms(num_atoms: int, num_stages: int) -> PartitionError:
    """The error for a network that cannot be cut finely enough."""
    return PartitionError(
        f"the network can be cut into {num_atoms} "
        f"{'piece' if num_atoms == 1 else 'pieces'} at most, and {num_stages} stages are "
        f"requested. Use devices={num_atoms} or fewer, or write the network so that fewer values "
        "are alive between its layers (a cut never breaks a skip connection)"
    )


def megabytes(amount: float) -> str:
    """Format bytes for people.

    >>> megabytes(1_500_000)
    '1.5 MB'
    """
    return f"{amount / 1e6:,.1f} MB" if amount < 1e9 else f"{amount / 1e9:,.2f} GB"


@dataclass(frozen=True)
class _Chain:
    """Running sums over the atoms, and the limits of each stage."""

    seconds: tuple[float, ...]
    memory: tuple[int, ...]
    limits: tuple[float, ...]
    transfers: tuple[float, ...]
    loads: tuple[float, ...]
    speeds: tuple[float, ...]
    fits: Fits | None
    cuts: tuple[int, ...]
    allow_empty: bool

    def solve(self, num_stages: int) -> tuple[int, ...] | None:
        """The best cuts, or None if none fit."""
        best: dict[int, _Option] = {0: (0.0, 0.0, (0,))}
        for stage in range(num_stages):
            is_last = stage == num_stages - 1
            ends = self.cuts[-1:] if is_last else self.cuts
            reached = {end: self._best(best, end, stage, is_last=is_last) for end in ends}
            best = {end: option for end, option in reached.items() if option is not None}
        found = best.get(self.cuts[-1])
        return None if found is None else found[2]

    def _best(
        self, before: dict[int, _Option], end: int, stage: int, *, is_last: bool
    ) -> _Option | None:
        """The best partition of the atoms before ``end``, of which the last are on ``stage``."""
        best: _Option | None = None
        # From the shortest stage on: when one is too large or too slow, so are all longer ones.
        for start in reversed(before):
            if start > end:
                continue
            if self.memory[end] - self.memory[start] > self.limits[stage]:
                break
            compute = self.loads[stage] + self._seconds(start, end) / self.speeds[stage]
            if best is not None and compute > best[0]:
                break
            if not self._is_stage(start, end, stage):
                continue
            sends = not is_last and end > start
            cost = max(compute, self.transfers[end - 1]) if sends else compute
            slowest, squares, cuts = before[start]
            score = max(slowest, cost), squares + cost * cost
            if best is None or score <= best[:2]:
                option = (*score, (*cuts, end))
                best = option if best is None else min(best, option)
        return best

    def _is_stage(self, start: int, end: int, stage: int) -> bool:
        has_atoms = end > start or (self.allow_empty and end == start)
        return has_atoms and (self.fits is None or self.fits(start, end, stage))

    def _seconds(self, start: int, end: int) -> float:
        return self.seconds[end] - self.seconds[start]


_Option = tuple[float, float, tuple[int, ...]]
"""Seconds of the slowest stage, sum of squares (to prefer even cuts), and the cuts."""


def _does_not_fit(
    names: Sequence[str], memory: Sequence[int], limits: Sequence[int]
) -> PartitionError:
    largest = max(range(len(memory)), key=memory.__getitem__)
    remedy = "Use more devices, smaller batches, or a smaller network"
    if memory[largest] > max(limits):
        return PartitionError(
            f"atom {names[largest]!r} alone needs {megabytes(memory[largest])}, and a stage may "
            f"hold {megabytes(max(limits))}. An atom is never divided. {remedy}"
        )
    return PartitionError(
        f"no cut into {len(limits)} stages fits: the network needs {megabytes(sum(memory))}, of "
        f"which atom {names[largest]!r} {megabytes(memory[largest])}; the stages may hold "
        f"{', '.join(map(megabytes, limits))}. {remedy}"
    )
