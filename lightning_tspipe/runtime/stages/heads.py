"""The heads of a fan-out on their ranks: each is a stage of the student, and runs where it is.

Where features are kept, only those samples of a batch go through the trunk that are known nowhere,
and every rank with heads reads the others by itself::

    data rank   batch 7: samples 3 1 4 2   kept: 3 4   through the trunk: 1 2
    rank 0      features of 1 2, received  ─┬─ features of the batch
                features of 3 4, read      ─┘
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from lightning_tspipe.capture import swap
from lightning_tspipe.heads.student import StudentFanout
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.channels import Channel

if TYPE_CHECKING:
    from lightning_tspipe.runtime.execution.engine import Engine


@dataclass(frozen=True)
class Kept:
    """What is known of a batch's features.

    Attributes:
        ids: Of its samples.
        rows: Those that go through the trunk.
        compares: Whether what is known goes through it too, to see that it is the same.
    """

    ids: tuple[Hashable, ...]
    rows: tuple[int, ...]
    compares: bool = False

    def select(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Of the inputs of a whole batch, those that go through the trunk."""
        if len(self.rows) == len(self.ids):
            return tuple(inputs)
        return tuple(tensor[list(self.rows)] for tensor in inputs)


class FeatureCache(Protocol):
    """Something that keeps what the trunk returns for a sample."""

    def consider(self, seconds: float, features: Sequence[Tensor]) -> None:
        """On the data rank, before the first batch: whether to keep anything.

        Args:
            seconds: That a step would save, were all features known.
            features: Stand-ins for those of a batch.
        """

    def place(self, engine: Engine) -> None:
        """All ranks have their parts of the trunk, or begin an epoch; every rank calls it."""

    def see(self, batch: Any, inputs: Sequence[Tensor]) -> Kept | None:
        """On the data rank: what is known of a batch; None: all of it goes through the trunk."""

    def whole(self, kept: Kept, computed: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """On a rank with heads: the features of a batch.

        Args:
            kept: What the data rank said of it.
            computed: Those that came out of the trunk; empty if no row went through it.
            device: Where they are wanted.
        """


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
        cache: Keeps features; None: the trunk makes all of them.

    Attributes:
        student: The heads.
        atoms: One for each head, in their order.
        block_names: The submodule that holds them.
    """

    def __init__(
        self,
        module: nn.Module,
        block: str,
        device: torch.device,
        cache: FeatureCache | None = None,
    ) -> None:
        student = module.get_submodule(block)
        assert isinstance(student, StudentFanout)
        self.student = student
        self.cache = cache
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


class Pace:
    """Keeps ranks from running ahead of those that read what they make: queues are bounded.

    A rank begins a step when those have begun the one that is ``slack`` steps before it.

    Args:
        transport: How to reach the other ranks.
        pipeline: Who holds what.
        slack: Steps that a rank may be ahead, at least 1.
    """

    def __init__(self, transport: Transport, pipeline: Pipeline, slack: int) -> None:
        assert pipeline.teacher is not None
        stages = pipeline.teacher.ranks
        edges = [*pairwise(stages)]
        edges += [(stages[-1], rank) for rank in pipeline.loss_ranks]
        own = transport.rank
        self._transport = transport
        self._before = sorted({a for a, b in edges if b == own != a})
        self._behind = sorted({b for a, b in edges if a == own != b})
        self._num_begun = 0
        self._slack = slack

    def begin_step(self) -> None:
        """Wait until the step may begin; every rank calls it."""
        for rank in self._before:
            self._transport.send_object(None, rank, Channel.PACE)
        self._num_begun += 1
        if self._num_begun > self._slack:
            with waiting("the ranks that read what this one makes"):
                for rank in self._behind:
                    self._transport.receive_object(rank, Channel.PACE)
