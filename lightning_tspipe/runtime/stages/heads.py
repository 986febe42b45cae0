"""The heads of a fan-out on their ranks: each is a stage of the student, and runs where it is.

Where features are kept, only those samples of a batch go through the trunk that are known nowhere,
and every rank with heads reads the others by itself::

    data rank   batch 7: samples 3 1 4 2   kept: 3 4   through the trunk: 1 2
    rank 0      features of 1 2, received  ─┬─ features of the batch
                features of 3 4, read      ─┘
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_tspipe.capture.plan import Inputs
from lightning_tspipe.heads.student import StudentFanout
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.moving import arbitrary_like
from lightning_tspipe.networks.program import Atom
from lightning_tspipe.replacing import TensorSwap
from lightning_tspipe.runtime.batches.metadata import Known
from lightning_tspipe.runtime.transport.base import Transport


class FeatureCache(Protocol):
    """Something that keeps what the trunk returns for a sample."""

    def consider(self, seconds: float, features: Sequence[Tensor]) -> None:
        """On the data rank, before the first batch: whether to keep anything.

        Args:
            seconds: That a step would save, were all features known.
            features: Stand-ins for those of a batch.
        """

    def place(self, transport: Transport, pipeline: Pipeline) -> None:
        """All ranks have their parts of the trunk, or begin an epoch; every rank calls it.

        Args:
            transport: How to reach the other ranks.
            pipeline: Which rank reads the data, and which have heads.
        """

    def see(self, batch: Any, inputs: Inputs) -> Known:
        """On the data rank: what is known of a batch."""

    def whole(self, known: Known, computed: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """On a rank with heads: the features of a batch.

        Args:
            known: What the data rank said of it.
            computed: Those that came out of the trunk; empty if no row went through it.
            device: Where they are wanted.
        """


class Heads:
    """The heads of a module, as engine and shards see them.

    Args:
        module: The LightningModule.
        block: The name of its ``StudentFanout``.
        device: Where heads run.
        cache: Keeps features; None: the trunk makes all of them.

    Attributes:
        student: The heads.
        atoms: One for each head, in their order.
        block_names: The submodule that holds them.
        cache: See above.
        device: Where heads run.
    """

    def __init__(
        self, module: nn.Module, block: str, device: torch.device, cache: FeatureCache | None = None
    ) -> None:
        student = module.get_submodule(block)
        assert isinstance(student, StudentFanout)
        self.student = student
        self.cache = cache
        self.device = device
        self.block_names = (block,)
        self.atoms = tuple(
            Atom(
                name,
                module,
                tuple(f"{block}.heads.{name}.{key}" for key, _ in head.named_parameters()),
                tuple(f"{block}.heads.{name}.{key}" for key, _ in head.named_buffers()),
            )
            for name, head in student.heads.items()
        )

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """While inside, a step is for all heads, those of other ranks too; values mean nothing."""

        def filled(tensor: Tensor) -> Tensor:
            return arbitrary_like(tensor, self.device) if tensor.is_meta else tensor

        with (
            TensorSwap(list(self.student.modules()), filled)(),
            self.student.trains(self.student.names, rehearses=True),
        ):
            yield
