"""Micro-batching of the first atoms of a frozen trunk.

Activations are large between the first layers of a network, and small between the last. Pieces of a
batch need less memory, and large activations then stay in the CPU's caches; but most layers take
longer for several pieces than for the whole batch::

    pieces   |a0─a1─a2|a0─a1─a2|
    whole                      |a3──a4──a5|
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from lightning_tspipe.planning.profile import NetworkProfile, seconds_at

_ABOUT = 1.02
_COPIED_PER_SECOND = 4.0e9
_SECONDS_PER_PIECE = 5e-5


@dataclass(frozen=True)
class Pieces:
    """The first atoms of a trunk, which a batch goes through in pieces.

    Attributes:
        num_atoms: Number of these atoms.
        number: Number of pieces of a batch.
    """

    num_atoms: int = 0
    number: int = 1

    def seconds(self, profile: NetworkProfile, batch_size: int) -> tuple[float, ...]:
        """Seconds of each atom, for a whole batch."""
        size = math.ceil(batch_size / self.number)
        return tuple(
            self.number * seconds_at(atom.forward, size)
            if place < self.num_atoms
            else seconds_at(atom.forward, batch_size)
            for place, atom in enumerate(profile.atoms)
        )

    def within(self, num_atoms: int, ends: Collection[int]) -> Pieces:
        """The same, limited to the first atoms.

        Args:
            num_atoms: Largest number of atoms.
            ends: Possible numbers of atoms.
        """
        most = min(self.num_atoms, num_atoms)
        last = max((end for end in ends if end <= most), default=0)
        return replace(self, num_atoms=last) if last else WHOLE


WHOLE = Pieces()
"""No atoms: the batch goes through as a whole."""


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
    ways = [(_seconds(way, profile, batch_size, bytes_between), way)
            for way in _ways(profile, batch_size, ends)]  # fmt: skip
    fastest = min(seconds for seconds, _ in ways)
    fast = [way for seconds, way in ways if seconds <= _ABOUT * fastest]
    return min(fast, key=lambda way: (_peak(way, batch_size, bytes_between), way.num_atoms))


def _ways(profile: NetworkProfile, batch_size: int, ends: Collection[int]) -> Iterator[Pieces]:
    yield WHOLE
    for size in profile.sizes:
        if size < batch_size:
            yield from (Pieces(end, math.ceil(batch_size / size)) for end in ends)


def _seconds(
    way: Pieces, profile: NetworkProfile, batch_size: int, bytes_between: list[int]
) -> float:
    total = sum(way.seconds(profile, batch_size))
    if way.num_atoms:
        copied = batch_size * bytes_between[way.num_atoms]
        total += copied / _COPIED_PER_SECOND + way.number * _SECONDS_PER_PIECE
    return total


def _peak(way: Pieces, batch_size: int, bytes_between: list[int]) -> float:
    """Peak bytes: the input and output of one atom, and the outputs of finished pieces."""
    pairs = [a + b for a, b in pairwise(bytes_between)]
    whole = batch_size * max(pairs[way.num_atoms :], default=0)
    if not way.num_atoms:
        return whole
    done = batch_size * bytes_between[way.num_atoms]
    return max(whole, 2 * done, done + batch_size * max(pairs[: way.num_atoms]) / way.number)
