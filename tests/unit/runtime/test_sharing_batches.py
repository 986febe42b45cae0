from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.batches.global_batches import BatchShare, share_batches
from lightning_tspipe.runtime.transport.replicas import Replicas


class Alone(Replicas):
    """One of several replicas, with nobody to talk to."""

    def broadcast(self, value: Any) -> Any:
        return value


class Told(Alone):
    """A replica that hears what the first one says."""

    said: Any = None

    def broadcast(self, value: Any) -> Any:
        if self.index == 0:
            Told.said = value
        return Told.said


def state(generator: torch.Generator) -> torch.Tensor:
    return generator.get_state()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(("number", "joined"), [(1, 2), (2, 1), (3, 2)])
def test_parts_of_batches_are_the_batches(number: int, joined: int) -> None:
    batches = BatchSampler(SequentialSampler(range(17)), 4, drop_last=True)
    shares = [BatchShare(batches, Alone(index, number), joined) for index in range(number)]
    assert len({len(share) for share in shares}) == 1
    found = [[i for part in parts for i in part] for parts in zip(*shares, strict=True)]
    size = 4 * joined
    assert found == [list(range(16))[start : start + size] for start in range(0, 16, size)]


def test_replicas_that_shuffle_differently_read_in_the_order_of_the_first() -> None:
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    shares = [
        BatchShare(BatchSampler(RandomSampler(range(10), generator=g), 4, False), Told(index, 2), 1)  # type: ignore[arg-type]
        for index, g in enumerate(generators)
    ]
    read = [[i for part in share for i in part] for share in shares]
    assert sorted(read[0] + read[1]) == list(range(10))
    # Both have drawn, so that their next orders differ from these.
    fresh = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    assert not any(map(torch.equal, map(state, generators), map(state, fresh)))


def test_a_batch_of_fewer_samples_than_replicas() -> None:
    batches = BatchSampler(SequentialSampler(range(5)), 4, drop_last=False)
    with pytest.raises(ConfigurationError, match="drop_last=True"):
        list(BatchShare(batches, Alone(0, 2), 1))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(Stream(), 2), "not known before they are read"),
        ([1, 2], "not known before they are read"),
        (DataLoader(range(4), 2, sampler=DistributedSampler(range(4), 2, 0)), "Remove the sampler"),  # type: ignore[arg-type]
    ],
)
def test_loaders_that_cannot_be_dealt_out(loader: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        share_batches(loader, Alone(0, 2), 1)
