"""Each replica its part of every global batch, whatever the number of replicas.

torch's ``DistributedSampler`` deals samples out one by one, and repeats some so that the numbers
are equal; another number of replicas then means other batches. Here the batches are those of one
device, and are cut::

    batch of one device   | 3 1 4 1 5 9 2 |
    two replicas          | 3 1 4 1 | 5 9 2 |
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.transport.replicas import Replicas


@dataclass
class BatchShare:
    """A batch sampler that yields one replica's part of what another one yields.

    Attributes:
        batches: The user's: lists of indices.
        replicas: Who gets a part; the first one's order is everybody's.
        num_joined: So many batches in a row are one global batch.
    """

    batches: Any
    replicas: Replicas
    num_joined: int

    @property
    def sampler(self) -> Any:
        """What the user's draws from."""
        return getattr(self.batches, "sampler", None)

    def __len__(self) -> int:
        return math.ceil(len(self.batches) / self.num_joined)

    def __iter__(self) -> Iterator[list[int]]:
        # All draw, so that their generators stay in step, and read in the order of the first.
        order = self.replicas.broadcast([list(batch) for batch in self.batches])
        for start in range(0, len(order), self.num_joined):
            joined = [i for batch in order[start : start + self.num_joined] for i in batch]
            yield part_of(joined, self.replicas.index, self.replicas.number)


def part_of(batch: list[int], index: int, number: int) -> list[int]:
    """One part of a batch; the first ones are larger by one sample where it can't be divided.

    Raises:
        ConfigurationError: Fewer samples than parts.

    >>> part_of([3, 1, 4, 1, 5], 0, 2), part_of([3, 1, 4, 1, 5], 1, 2)
    ([3, 1, 4], [1, 5])
    """
    if len(batch) < number:
        raise ConfigurationError(
            f"a batch of {len(batch)} samples can't be divided among {number} replicas. Set "
            "drop_last=True in the loader, or use larger batches"
        )
    return list(np.array_split(batch, number)[index].tolist())


def share_batches(loader: Any, replicas: Replicas, num_joined: int) -> Any:
    """A loader like the given one that reads one replica's part of every batch.

    Raises:
        ConfigurationError: Nobody knows its samples before they are read, or they are dealt out
            already.
    """
    remedy = "Give the Trainer an ordinary DataLoader, or FreezeAndRepack(repack=False)"
    batches = getattr(loader, "batch_sampler", None)
    if batches is None or isinstance(getattr(loader, "dataset", None), IterableDataset):
        raise ConfigurationError(
            f"FreezeAndRepack(repack=True) gives each replica its part of every batch, but the "
            f"batches of {type(loader).__name__} are not known before they are read. {remedy}"
        )
    if callable(getattr(loader, "state_dict", None)):
        raise ConfigurationError(
            f"FreezeAndRepack(repack=True) redistributes the samples of a loader, but "
            f"{type(loader).__name__} has state of its own, which would not match. {remedy}"
        )
    if isinstance(getattr(batches, "sampler", None), DistributedSampler):
        raise ConfigurationError(
            "the training loader has a DistributedSampler, and FreezeAndRepack(repack=True) "
            "changes the number of replicas: it distributes samples itself. Remove the sampler"
        )
    share = copy.copy(loader)
    # DataLoader refuses to have it set, since its other attributes would not fit any more.
    vars(share)["batch_sampler"] = BatchShare(batches, replicas, num_joined)
    vars(share)["_iterator"] = None
    return share
