"""Shares of a batch that several ranks divide, and their overlaps.

A stage of width r divides the samples of a batch into r contiguous shares that differ by at most
one sample. A stage of another width needs intersections of these intervals, for any two widths and
any batch::

    width 3   [ 0  1 | 2  3 | 4  5  6 ]
                   └──┐  └──┐
    width 2   [ 0  1  2 | 3  4  5  6 ]
"""

from __future__ import annotations


def share(unit: int, width: int, size: int) -> tuple[int, int]:
    """The samples of one share: the first, and the one after the last.

    >>> [share(unit, 3, 7) for unit in range(3)]
    [(0, 2), (2, 4), (4, 7)]
    """
    return unit * size // width, (unit + 1) * size // width


def largest_share(width: int, size: int) -> int:
    """Number of samples in the largest share, for which all ranks wait."""
    return -(-size // width)


def overlap(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    """The intersection of two intervals; of length 0 if they are disjoint.

    >>> overlap((0, 3), (2, 5)), overlap((0, 2), (2, 5))
    ((2, 3), (2, 2))
    """
    start = max(first[0], second[0])
    return start, max(start, min(first[1], second[1]))


def may_overlap(unit: int, width: int, other_unit: int, other_width: int) -> bool:
    """Whether two shares can have samples in common, for some batch size.

    Shares begin at rounded fractions of the batch. Rounding is monotonic, so that shares whose
    fractions don't overlap have nothing in common, for any batch size.

    >>> [may_overlap(1, 3, unit, 2) for unit in range(2)]
    [True, True]
    """
    return unit * other_width < (other_unit + 1) * width and other_unit * width < (
        (unit + 1) * other_width
    )
