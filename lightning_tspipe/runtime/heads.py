"""The heads of a fan-out on their ranks: each is a stage of the student, and runs where it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lightning_tspipe.capture import swap
from lightning_tspipe.heads.student import StudentFanout


@dataclass(frozen=True)
class HeadAtom:
    """One head, with names as in the LightningModule."""

    name: str
    parameter_names: tuple[str, ...]
    buffer_names: tuple[str, ...]


class Heads:
    """The heads of a module, as engine and shards see them.

    Args:
        module: The LightningModule.
        block: The name of its ``StudentFanout``.
        device: Where heads run.

    Attributes:
        student: The heads.
        atoms: One for each head, in their order.
        block_names: The submodule that holds them.
    """

    def __init__(self, module: nn.Module, block: str, device: torch.device) -> None:
        student = module.get_submodule(block)
        assert isinstance(student, StudentFanout)
        self.student = student
        self._device = device
        self.block_names = (block,)
        self.atoms = tuple(
            HeadAtom(
                name,
                tuple(f"{block}.heads.{name}.{key}" for key, _ in head.named_parameters()),
                tuple(f"{block}.heads.{name}.{key}" for key, _ in head.named_buffers()),
            )
            for name, head in student.heads.items()
        )

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """While inside, a step is for all heads, those of other ranks too; values mean nothing."""
        make = partial(_filled, device=self._device)
        with (
            swap.TensorSwap(list(self.student.modules()), make)(),
            self.student.trains(self.student.names, rehearses=True),
        ):
            yield

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """While inside, a step is for one head: enough to see what it gives the trunk."""
        with self.student.trains(self.student.names[:1], rehearses=True):
            yield


def _filled(tensor: Tensor, device: torch.device) -> Tensor:
    return swap.arbitrary_like(tensor, device) if tensor.is_meta else tensor
