"""What the data rank tells the others about a step, before anything else of it travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.runtime.failures import waiting
from lightning_tspipe.runtime.transport import Receipt, Transport


@dataclass(frozen=True)
class StepHeader:
    """One step, in shapes.

    Attributes:
        structure: Pytree structure of the batch.
        leaves: Its leaves; tensors as specs.
        inputs: Specs of the call inputs.
        ahead: Those of the next batch, if its teacher runs ahead.
        continues: Whether the teacher of this batch ran ahead in the step before.
        stop: What all ranks do after this step, see ``stopping``; empty: go on.
    """

    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]
    inputs: tuple[TensorSpec, ...]
    ahead: tuple[TensorSpec, ...] | None = None
    continues: bool = False
    stop: str = ""

    @classmethod
    def of(
        cls,
        batch: Any,
        inputs: Sequence[Tensor],
        ahead: Sequence[Tensor] | None = None,
        *,
        continues: bool = False,
        stop: str = "",
    ) -> StepHeader:
        """Describe a batch and the call inputs that were made of it."""
        leaves, structure = pytree.tree_flatten(batch)
        return cls(
            structure,
            tuple(TensorSpec.of(x) if isinstance(x, Tensor) else x for x in leaves),
            tuple(map(TensorSpec.of, inputs)),
            tuple(map(TensorSpec.of, ahead)) if ahead is not None else None,
            continues,
            stop,
        )

    def send(self, transport: Transport) -> None:
        """Tell all other ranks."""
        for rank in range(transport.num_ranks):
            if rank != transport.rank:
                transport.send_object(self, rank)

    @classmethod
    def receive(cls, transport: Transport, data_rank: int) -> StepHeader:
        """Hear from the data rank."""
        with waiting("the start of a step"):
            header = transport.receive_object(data_rank)
        assert isinstance(header, StepHeader), f"expected the header of a step, got {header!r}"
        return header

    def exchange_fields(  # noqa: PLR0913, PLR0917 - who gives what to whom
        self,
        fields: Sequence[int],
        batch: Any,
        transport: Transport,
        data_rank: int,
        channel: int,
        loss_rank: int = 0,
    ) -> Receipt | None:
        """Send the fields that the step reads (data rank), or ask for them (loss rank)."""
        if data_rank == loss_rank or not fields:
            return None
        if transport.rank == data_rank:
            leaves = pytree.tree_leaves(batch)
            transport.send([leaves[i] for i in fields], loss_rank, channel)
        elif transport.rank == loss_rank:
            return transport.receive([self.leaves[i] for i in fields], data_rank, channel)
        return None

    def batch(self, fields: Sequence[int] = (), receipt: Receipt | None = None) -> Any:
        """The batch as a rank without data has it: meta tensors, and the fields it received."""
        leaves = [
            torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, TensorSpec) else x
            for x in self.leaves
        ]
        if receipt is not None:
            with waiting("the loss needs the batch"):
                received = receipt.wait()
            for index, tensor in zip(fields, received, strict=True):
                leaves[index] = tensor
        return pytree.tree_unflatten(leaves, self.structure)
