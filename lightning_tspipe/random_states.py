"""The random states of a process, to have them back later."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import torch

_NUMPY = (np.random.Generator, np.random.RandomState)


@dataclass(frozen=True)
class RandomStates:
    """The states of torch's, Python's and NumPy's global generators, and of this process's GPU.

    They are taken with each batch that is read, and written at times only.

    Attributes:
        states: By generator, as each of them gives it.
    """

    states: dict[str, Any]

    @classmethod
    def now(cls) -> RandomStates:
        """The present states."""
        found = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),  # noqa: NPY002 - the global generator is meant
        }
        if torch.cuda.is_initialized():  # asking whether there is a GPU takes much longer
            found["cuda"] = torch.cuda.get_rng_state()
        return cls(found)

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> RandomStates:
        """What a checkpoint has of them."""
        version, words, gauss = written["python"]
        name, keys, *rest = written["numpy"]
        numpy = (name, keys.numpy().astype("uint32"), *rest)
        python = (version, tuple(words.tolist()), gauss)
        return cls({**written, "python": python, "numpy": numpy})

    @property
    def written(self) -> dict[str, Any]:
        """Plain values and tensors, as a checkpoint loaded with ``weights_only`` needs them."""
        version, words, gauss = self.states["python"]
        name, keys, *rest = self.states["numpy"]
        numpy = [str(name), torch.from_numpy(np.asarray(keys, "int64")), *rest]
        return {**self.states, "python": [version, torch.tensor(words), gauss], "numpy": numpy}

    def restore(self) -> None:
        """Make them the present ones."""
        torch.set_rng_state(self.states["torch"])
        random.setstate(self.states["python"])
        np.random.set_state(self.states["numpy"])  # noqa: NPY002
        if "cuda" in self.states and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.states["cuda"])


@contextmanager
def random_stream(seed: int | None) -> Iterator[RandomStates]:
    """Run with random generators of the given seed; the ambient ones stay untouched.

    Args:
        seed: Seed of the stream; None keeps the ambient values but still restores them.

    Yields:
        The ambient states.
    """
    ambient = RandomStates.now()
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 - the global generator is meant
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed)
    try:
        yield ambient
    finally:
        ambient.restore()


def other_random_state() -> tuple[object, ...]:
    """Where the generators of Python and NumPy are, in a form that can be compared."""
    _, keys, *others = np.random.get_state(legacy=True)  # noqa: NPY002
    return random.getstate(), keys.tobytes(), others  # type: ignore[union-attr]


class Generators:
    """The random generators that a step may draw from: the process's, and others.

    Args:
        values: Among which the others are. Two of them in the same state stay in step with each
            other.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        found = {id(value): value for value in values if _is_generator(value)}
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
