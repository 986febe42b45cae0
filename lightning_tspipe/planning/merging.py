"""The order of atoms that serves several ways through the same networks.

Ways that read a parameter in common have to lie on the same stages there. So their atoms are joined
to *cells*, which all ways pass in one order, and cuts lie between cells::

    backbone, head       b0 ──► b1 ──► h0
    backbone, other      b0 ───► b1 ────────► o0
    cells                b0     b1     h0     o0        a way passes cells that are none of its own
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise


class _Cells:
    """Which names are in one cell; each cell is known by one of them."""

    def __init__(self, names: Collection[str]) -> None:
        self._parents = {name: name for name in names}

    def of(self, name: str) -> str:
        """The cell of a name."""
        while self._parents[name] != name:
            self._parents[name] = name = self._parents[self._parents[name]]
        return name

    def join(self, names: Sequence[str]) -> None:
        """Make one cell of those of some names."""
        first, *others = map(self.of, names)
        for other in others:
            self._parents[other] = first


def merged(
    ways: Sequence[Sequence[Sequence[str]]], ranks: Mapping[str, int]
) -> tuple[list[list[str]], list[tuple[int, ...]]]:
    """Order what several ways read.

    Args:
        ways: For each way and each of its atoms, the names of the parameters that it reads.
        ranks: Which of two names that no way connects comes first.

    Returns:
        The names of each cell, and for each way where its atoms begin: for each cell, and behind
        the last one, how many of its atoms lie before.

    Example:
        >>> merged([["a", "", "b"], ["a", "c"]], {"a": 0, "b": 1, "c": 2})
        ([['a'], ['b'], ['c']], [(0, 2, 3, 3), (0, 1, 1, 2)])
    """
    names = list(dict.fromkeys(name for way in ways for atom in way for name in atom))
    cells = _Cells(names)
    for way in ways:
        for atom in filter(None, way):
            cells.join(atom)
    order = _ordered(ways, cells, {name: ranks.get(name, len(ranks)) for name in names})
    places = {cell: place for place, cell in enumerate(order)}
    found: list[list[str]] = [[] for _ in order] or [[]]
    for name in names:
        found[places[cells.of(name)]].append(name)
    return found, [_positions(way, cells, places) for way in ways]


def numbered(way: Sequence[Sequence[str]]) -> list[list[str]]:
    """A way on which a name that comes back later is another one: the tensor is tied.

    Example:
        >>> numbered([["a"], ["a", "b"], ["b"], ["a"]])
        [['a'], ['a', 'b'], ['b'], ['a again']]
    """
    last: dict[str, tuple[str, int]] = {}
    found = []
    for place, atom in enumerate(way):
        for name in atom:
            known, before = last.get(name, (name, place))
            last[name] = known if place - before < 2 else f"{known} again", place
        found.append([last[name][0] for name in atom])
    return found


def _ordered(
    ways: Sequence[Sequence[Sequence[str]]], cells: _Cells, ranks: Mapping[str, int]
) -> list[str]:
    """The cells in an order that all ways follow; those that are passed in turn become one."""
    sorter = _sorter(ways, cells, ranks)
    lowest: dict[str, int] = {}
    for name, rank in ranks.items():
        cell = cells.of(name)
        lowest[cell] = min(rank, lowest.get(cell, rank))
    order: list[str] = []
    ready: list[tuple[int, str]] = []
    while sorter.is_active():
        for cell in sorter.get_ready():
            heapq.heappush(ready, (lowest[cell], cell))
        _, cell = heapq.heappop(ready)
        order.append(cell)
        sorter.done(cell)
    return order


def _sorter(
    ways: Sequence[Sequence[Sequence[str]]], cells: _Cells, names: Iterable[str]
) -> TopologicalSorter[str]:
    while True:
        before: dict[str, set[str]] = {cells.of(name): set() for name in names}
        for way in ways:
            passed = [cells.of(atom[0]) for atom in way if atom]
            for cell, following in pairwise(passed):
                if cell != following:
                    before[following].add(cell)
        sorter = TopologicalSorter(before)
        try:
            sorter.prepare()
        except CycleError as error:
            cells.join(error.args[1])
        else:
            return sorter


def _positions(
    way: Sequence[Sequence[str]], cells: _Cells, places: Mapping[str, int]
) -> tuple[int, ...]:
    own = [places[cells.of(atom[0])] for atom in way if atom]
    lies, place = [], own[0] if own else 0
    for atom in way:
        place = places[cells.of(atom[0])] if atom else place
        lies.append(place)
    return tuple(sum(place < cell for place in lies) for cell in range(max(1, len(places)) + 1))
