"""What the data rank tells the others about batches, before anything else of them travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_tspipe.capture.plan import Inputs, Specs, StepPlan, TensorSpec, places_in
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.replay.purity import Fingerprints
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.transport.base import Receipt, Transport
from lightning_tspipe.runtime.transport.channels import Channel


class Known(NamedTuple):
    """What the data rank knows of a batch before it runs, where activations are kept.

    Attributes:
        ids: Of its samples, in order; None where nothing is kept.
        num_atoms: What all of these samples gave behind so many atoms of a frozen part is known,
            so that nothing before has to run.
        rows: Those that go through the trunk of heads; None: all of them.
        is_checked: Whether what is known is compared with what comes out now.
    """

    ids: Any = None
    num_atoms: int = 0
    rows: tuple[int, ...] | None = None
    is_checked: bool = False

    def select(self, inputs: Inputs) -> Inputs:
        """Of the networks' inputs, those that have to go through them."""
        if self.rows is None or len(self.rows) == len(self.ids):
            return inputs
        rows = list(self.rows)
        return tuple(tuple(tensor[rows] for tensor in tensors) for tensors in inputs)


NOTHING_KNOWN = Known()


@dataclass(frozen=True)
class StepHeader:
    """One batch, in shapes.

    Attributes:
        structure: Pytree structure of the batch.
        leaves: Its leaves; tensors as specs.
        inputs: Specs of the tensors that each call gets.
        stop: In an evaluation, what all ranks do after this batch, see ``stopping``; empty: go on.
        known: What is known of it before it runs.
        fingerprints: Of the call inputs, if the rank with the loss compares them.
    """

    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]
    inputs: tuple[Specs, ...]
    stop: str = ""
    known: Known = NOTHING_KNOWN
    fingerprints: Fingerprints = ()

    @classmethod
    def of(
        cls,
        batch: Any,
        inputs: Inputs,
        *,
        stop: str = "",
        known: Known = NOTHING_KNOWN,
        fingerprints: Fingerprints = (),
    ) -> StepHeader:
        """Describe a batch and the call inputs that were made of it."""
        leaves, structure = pytree.tree_flatten(batch)
        return cls(
            structure,
            tuple(TensorSpec.of(x) if isinstance(x, Tensor) else x for x in leaves),
            tuple(tuple(map(TensorSpec.of, tensors)) for tensors in inputs),
            stop,
            known,
            fingerprints,
        )

    @property
    def batch_size(self) -> int:
        """Samples of the largest call."""
        if self.known.rows is not None:
            return len(self.known.ids)
        return max(first.shape[0] for first, *_ in self.inputs)

    def fields(self, plan: StepPlan) -> tuple[int, ...]:
        """Leaves of the batch that the step reads; all its tensors, if call inputs are compared."""
        if self.fingerprints or self.structure != plan.batch:
            unread = frozenset() if self.fingerprints else plan.unread
            own = zip(places_in(self.structure), self.leaves, strict=True)
            return tuple(
                index
                for index, (place, leaf) in enumerate(own)
                if isinstance(leaf, TensorSpec) and place not in unread
            )
        return plan.batch_fields

    def exchange_fields(
        self, plan: StepPlan, batch: Any, transport: Transport, channel: Channel, pipeline: Pipeline
    ) -> Receipt | None:
        """Send the fields that the step reads (data rank), or ask for them (loss ranks)."""
        fields, rank = self.fields(plan), transport.rank
        data_rank, loss_ranks = pipeline.data_rank, pipeline.loss_ranks
        if fields and rank == data_rank:
            leaves = pytree.tree_leaves(batch)
            sent = [leaves[i] for i in fields]
            for target in loss_ranks:
                if target != rank:
                    transport.send(sent, target, channel, list(map(TensorSpec.of, sent)))
        if not fields or rank == data_rank or rank not in loss_ranks:
            return None
        return transport.receive([self.leaves[i] for i in fields], data_rank, channel)

    def batch(self, plan: StepPlan | None = None, receipt: Receipt | None = None) -> Any:
        """The batch as a rank without data has it: meta tensors, and the fields it received."""
        leaves = [x.empty("meta") if isinstance(x, TensorSpec) else x for x in self.leaves]
        if receipt is not None and plan is not None:
            with waiting("the loss needs the batch"):
                received = receipt.wait()
            for index, tensor in zip(self.fields(plan), received, strict=True):
                leaves[index] = tensor
        return pytree.tree_unflatten(leaves, self.structure)
