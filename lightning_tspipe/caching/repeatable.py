"""Checks that a dataset gives the same sample each time it is read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_tspipe.errors import ConfigurationError


def check_repeatable(dataset: Any, num_samples: int = 4, num_readings: int = 2) -> None:
    """Read some samples several times, and refuse a dataset whose samples change.

    The random states are restored afterwards.

    Args:
        dataset: A dataset with a length, and samples by index.
        num_samples: Number of samples to read, spread over the dataset.
        num_readings: Number of readings of each sample.

    Raises:
        ConfigurationError: The samples differ, or reading them draws random numbers.
    """
    before = _random_states()
    length = len(dataset)
    try:
        for index in sorted({n * length // num_samples for n in range(num_samples)}):
            first, *others = [dataset[index] for _ in range(num_readings)]
            if not all(_equal(first, other) for other in others):
                raise ConfigurationError(f"sample {index} is different each time it is read{_HOW}")
        if not _equal(before, _random_states()):
            raise ConfigurationError(f"the dataset draws random numbers when it is read{_HOW}")
    finally:
        _restore(before)


_HOW = (
    ": random augmentation. Its activations can't be cached. Train with fixed inputs (resize and "
    "centre crop), with a few fixed views of each sample (WithIds(dataset, views=4)), augment "
    "behind the frozen layers, or train without the cache (cache=None)"
)


@contextmanager
def fixed_random_numbers(seed: int) -> Iterator[None]:
    """Seed the random numbers inside of the context; afterwards they continue as before."""
    before = _random_states()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - what datasets of others use
    try:
        yield
    finally:
        _restore(before)


def _random_states() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), np.random.get_state()]  # noqa: NPY002 - what datasets of others use


def _restore(states: list[Any]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # noqa: NPY002 - as above


def _equal(one: Any, other: Any) -> bool:
    """Whether two samples are the same, as far as values can be compared."""
    leaves, others = pytree.tree_leaves(one), pytree.tree_leaves(other)
    return len(leaves) == len(others) and all(map(_same, leaves, others))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and _same_numbers(one.numpy(), other.numpy())
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and _same_numbers(one, other)
    if isinstance(one, int | float | str | bytes):
        return repr(one) == repr(other)  # NaN is NaN
    return True  # objects of unknown kind


def _same_numbers(one: Any, other: Any) -> bool:
    same: bool = one.shape == other.shape and one.tobytes() == other.tobytes()
    return same
