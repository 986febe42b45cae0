"""Shares of a batch, and what travels between stages of other widths."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from lightning_tspipe.ir.shares import largest_share, may_overlap, overlap, share

WIDTHS = tuple(product(range(1, 7), range(1, 7)))


@pytest.mark.parametrize("width", range(1, 7))
def test_shares_cover_the_batch_and_differ_by_one(width: int) -> None:
    for size in range(20):
        shares = [share(unit, width, size) for unit in range(width)]
        assert shares[0][0] == 0
        assert shares[-1][1] == size
        assert all(one[1] == other[0] for one, other in pairwise(shares))
        lengths = [stop - start for start, stop in shares]
        assert max(lengths) == largest_share(width, size)
        assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(("width", "other"), WIDTHS)
def test_every_share_is_relayed_whole_and_in_order(width: int, other: int) -> None:
    for size in (0, 1, 2, 3, 5, 7, 12, 31):
        for unit in range(other):
            wanted = share(unit, other, size)
            parts = [
                overlap(share(source, width, size), wanted)
                for source in range(width)
                if may_overlap(source, width, unit, other)
            ]
            samples = [sample for start, stop in parts for sample in range(start, stop)]
            assert samples == list(range(*wanted))


@pytest.mark.parametrize(("width", "other"), WIDTHS)
def test_only_neighbours_talk(width: int, other: int) -> None:
    talking = {
        (unit, target)
        for unit, target in product(range(width), range(other))
        if may_overlap(unit, width, target, other)
    }
    size = width * other  # where nothing is rounded
    assert talking == {
        (unit, target)
        for unit, target in product(range(width), range(other))
        for start, stop in [overlap(share(unit, width, size), share(target, other, size))]
        if start < stop
    }
