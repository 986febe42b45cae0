"""What a step's module holds that changes when it is used: random generators, and iterators.

Each step is run more than once, on several ranks, and each run is to draw the same numbers. So the
process's own generators are seeded for each run, and those that objects hold in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_tspipe.errors import CaptureError
from lightning_tspipe.networks.location import current_line
from lightning_tspipe.networks.modules import tables_in
from lightning_tspipe.random_states import Generators

Place = tuple[Any, Any]
"""A dictionary or a list, and a key or an index of it."""


def held_by(modules: Iterable[nn.Module]) -> Iterator[tuple[Place, Any]]:
    """What attributes of modules hold, in lists, dicts and objects of the user's too."""
    for table in tables_in(map(vars, modules)):
        for key, value in list(table.items() if isinstance(table, dict) else enumerate(table)):
            yield (table, key), value


def generators_of(modules: Iterable[nn.Module]) -> Generators:
    """The process's random generators, and those that attributes of modules hold."""
    return Generators(value for _, value in held_by(modules))


@contextmanager
def iterators_refused(modules: Iterable[nn.Module]) -> Iterator[None]:
    """While inside, iterators that modules hold can't be advanced: nobody could take that back.

    Raises:
        CaptureError: Somebody asks one for its next item.
    """
    places = [
        (place, value)
        for place, value in held_by(modules)
        if callable(getattr(type(value), "__next__", None))
        and isinstance(place[0], (dict, MutableSequence))
    ]
    for (table, key), value in places:
        table[key] = _Refused(value)
    try:
        yield
    finally:
        for (table, key), value in places:
            table[key] = value


class _Refused:
    """Stands for an iterator."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __iter__(self) -> _Refused:
        return self

    def __next__(self) -> Any:
        raise CaptureError(
            f"the step takes the next item of an iterator, at {current_line()}. A step is run more "
            "than once for each batch, on several ranks, and would get other items each time. Let "
            "the training loader give both, with a dataset of pairs "
            "(torch.utils.data.StackDataset) or a loader that zips others"
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)
