"""Data-parallel groups: replicas of a pipeline, or the processes of DDP."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_tspipe.callbacks.common import derives_from, pipelined_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class DataParallelGroup:
    """The members that do the same work on different samples, as seen by one of them.

    A strategy that shards a module over its processes (FSDP) needs all of them for each batch:
    there the group has one member, and every process does everything.

    Args:
        trainer: The trainer, whose strategy decides.

    Attributes:
        rank: Rank of this member.
        size: Number of members.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._pipelined = pipelined_of(trainer)
        self.rank, self.size = 0, 1
        if self._pipelined is not None:
            self.rank, self.size = self._pipelined.replica, self._pipelined.data_parallel_size
        elif derives_from(trainer, "DDPStrategy"):
            self.rank, self.size = trainer.global_rank, trainer.world_size

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all members, on each of them.

        Args:
            tensor: Of equal shape on all members except in the first dimension; a member without
                data may give an empty tensor with any other sizes.
        """
        if self.size == 1:
            return [tensor]
        is_double = tensor.dtype == torch.float64 and len(tensor) > 0
        header = torch.tensor([is_double, *tensor.shape], device=tensor.device)
        headers = self._gather(header)
        (any_double, *shape) = headers.amax(dim=0).tolist()
        if any_double:
            tensor = tensor.double()
        padded = tensor.new_zeros(shape)
        if len(tensor):
            padded[: len(tensor)] = tensor
        sizes = headers[:, 1].tolist()
        return [part[:size] for part, size in zip(self._gather(padded), sizes, strict=True)]

    def _gather(self, tensor: Tensor) -> Tensor:
        with warnings.catch_warnings():
            # Lightning 2.6 gathers by a function that torch 2.14 calls deprecated.
            warnings.filterwarnings("ignore", message=".*all_gather is deprecated")
            return self._trainer.strategy.all_gather(tensor)

    @contextmanager
    def buffers_of_first(self, module: nn.Module) -> Iterator[None]:
        """Give all members the buffers of the first one, for as long as the context lasts.

        BatchNorm statistics differ between members. With this, features come from one network: the
        one that is saved.
        """
        if self.size == 1:
            yield
            return
        own = {k: b for k, b in module.named_buffers() if not b.is_meta}
        before = {name: buffer.clone() for name, buffer in own.items()}
        _fill(own, self._of_first(before))
        try:
            yield
        finally:
            _fill(own, before)

    def _of_first(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        on_host = {name: value.cpu() for name, value in values.items()}
        if self._pipelined is not None:
            found: dict[str, Tensor] = self._pipelined.of_first_replica(on_host)
            return found
        return self._trainer.strategy.broadcast(on_host)


def _fill(buffers: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(values[name])
