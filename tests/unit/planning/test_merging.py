"""Cells of what several ways through networks read."""

from __future__ import annotations

import pytest

from lightning_tspipe.planning.merging import merged


@pytest.mark.parametrize(
    ("ways", "cells", "positions"),
    [
        (["ab", "ac"], ["a", "b", "c"], [(0, 1, 2, 2), (0, 1, 1, 2)]),  # two heads
        (["a", "b"], ["a", "b"], [(0, 1, 1), (0, 0, 1)]),  # two networks
        (["ab", "ba"], ["ab"], [(0, 2), (0, 2)]),  # no order serves both
        (["aba"], ["ab"], [(0, 3)]),  # passed twice
        (["abcd", "ad", "ce"], ["a", "b", "c", "d", "e"],
         [(0, 1, 2, 3, 4, 4), (0, 1, 1, 1, 2, 2), (0, 0, 0, 1, 1, 2)]),
    ],
)  # fmt: skip
def test_cells(ways: list[str], cells: list[str], positions: list[tuple[int, ...]]) -> None:
    ranks = {name: rank for rank, name in enumerate("abcde")}
    found, places = merged(ways, ranks)
    assert ["".join(names) for names in found] == cells
    assert places == positions


def test_atoms_without_parameters_lie_with_the_one_before() -> None:
    found, places = merged([[[], ["a"], [], ["b", "c"], []], [["c"]]], {})
    assert found == [["a"], ["b", "c"]]
    assert places == [(0, 3, 5), (0, 0, 1)]
