"""What a step's module holds that changes when it is used: random generators, and iterators.

Each step is run more than once, on several ranks, and each run is to draw the same numbers. So the
process's own generators are seeded for each run, and those that objects hold in the same way.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, MutableSequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from lightning_tspipe.errors import CaptureError
from lightning_tspipe.networks.location import current_line
from lightning_tspipe.networks.modules import tables_in
from lightning_tspipe.random_states import RandomStates, random_stream

Place = tuple[Any, Any]
"""A dictionary or a list, and a key or an index of it."""

_NUMPY = (np.random.Generator, np.random.RandomState)


def held_by(modules: Iterable[nn.Module]) -> Iterator[tuple[Place, Any]]:
    """What attributes of modules hold, in lists, dicts and objects of the user's too."""
    for table in tables_in(map(vars, modules)):
        for key, value in list(table.items() if isinstance(table, dict) else enumerate(table)):
            yield (table, key), value


class Generators:
    """The random generators that a step may draw from: the process's, and those of its module.

    Args:
        modules: Whose attributes may hold some. Two of them in the same state stay in step with
            each other.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = {id(value): value for _, value in held_by(modules) if _is_generator(value)}
        self._held = list(found.values())
        states = [repr(_state(generator)) for generator in self._held]
        self._numbers = [states.index(state) for state in states]

    @contextmanager
    def stream(self, seed: int | None) -> Iterator[None]:
        """While inside, all of them draw what belongs to a seed; then they go on as before.

        Args:
            seed: The seed; None leaves them where they are.
        """
        ambient = list(map(_state, self._held))
        with random_stream(seed):
            if seed is not None:
                for number, generator in zip(self._numbers, self._held, strict=True):
                    _seed(generator, seed, number)
            try:
                yield
            finally:
                self._restore(ambient)

    def state(self) -> Any:
        """Where all of them are."""
        return RandomStates.now(), list(map(_state, self._held))

    def restore(self, state: Any) -> None:
        """Put them where they were."""
        state[0].restore()
        self._restore(state[1])

    def _restore(self, states: list[Any]) -> None:
        for generator, state in zip(self._held, states, strict=True):
            _set_state(generator, state)


def _is_generator(value: Any) -> bool:
    return isinstance(value, (torch.Generator, random.Random, *_NUMPY))


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _seed(generator: Any, seed: int, number: int) -> None:
    digest = blake2b(f"{seed}/{number}".encode(), digest_size=4).digest()
    own = int.from_bytes(digest, "little")
    if isinstance(generator, np.random.Generator):
        kind = cast("Any", type(generator.bit_generator))
        generator.bit_generator.state = kind(own).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(own)
    else:
        generator.seed(own)


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
