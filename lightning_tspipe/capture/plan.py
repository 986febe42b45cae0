"""What a traced step looks like: the calls, the chain of each network, what the loss needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_tspipe.networks.arguments import ONE_TENSOR, Arguments

NetworkName = Literal["student", "teacher"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, type and memory format of a tensor, without its values.

    Attributes:
        shape: Its sizes.
        dtype: Its type.
        requires_grad: Whether gradients are wanted of it.
        channels_last: Whether dimension 1 lies innermost in memory, as ``torch.channels_last`` and
            ``torch.channels_last_3d`` have it; otherwise the tensor is contiguous.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    channels_last: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec of ``tensor``."""
        memory_format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
        channels_last = (
            memory_format is not None
            and tensor.layout is torch.strided
            and not tensor.is_contiguous()
            and tensor.is_contiguous(memory_format=memory_format)
        )
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, channels_last)

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """The sizes in the order in which they lie in memory."""
        if not self.channels_last:
            return self.shape
        return (self.shape[0], *self.shape[2:], self.shape[1])

    def to_memory(self, tensor: Tensor) -> Tensor:
        """A view of :attr:`memory_shape`; contiguous if the tensor lies in memory as said here."""
        return tensor.movedim(1, -1) if self.channels_last else tensor

    def from_memory(self, tensor: Tensor) -> Tensor:
        """A view of :attr:`shape` on a tensor of :attr:`memory_shape`."""
        return tensor.movedim(-1, 1) if self.channels_last else tensor

    def empty(self, device: torch.device | str) -> Tensor:
        """A tensor without values."""
        return self.from_memory(torch.empty(self.memory_shape, dtype=self.dtype, device=device))

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def random(self, generator: torch.Generator, device: torch.device | str) -> Tensor:
        """A tensor of normal random values; of zeros if it isn't one of floating-point numbers."""
        if self.dtype.is_floating_point:
            return torch.randn(self.shape, generator=generator).to(device, self.dtype)
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Block:
    """A declared submodule, called as a whole: one link of a network's chain.

    Attributes:
        name: Dotted name within the LightningModule.
        grad: Whether gradients were enabled at the call.
        arguments: How it is called.
    """

    name: str
    grad: bool
    arguments: Arguments = ONE_TENSOR

    def __str__(self) -> str:
        return self.name if self.arguments.is_plain else f"{self.name}{self.arguments}"


@dataclass(frozen=True, slots=True)
class Glue:
    """What the step does between two blocks, such as ``.flatten(1)``.

    Attributes:
        label: For messages and for comparing calls.
        function: Takes the previous value, returns the next one.
    """

    label: str
    function: Callable[[Tensor], Tensor] = field(compare=False)

    def __str__(self) -> str:
        return self.label


Link = Block | Glue


@dataclass(frozen=True, order=True, slots=True)
class ValueRef:
    """A tensor that a block returned: link ``position`` of a chain, leaf ``slot`` of its output."""

    position: int
    slot: int


@dataclass(frozen=True, slots=True)
class CallPlan:
    """One call of a network in the step.

    Attributes:
        network: Which network.
        input: Spec of the (whole-batch) input.
        num_links: How far into the network's chain the call goes.
        grad: Whether its output takes part in the backward.
    """

    network: NetworkName
    input: TensorSpec
    num_links: int
    grad: bool


@dataclass(frozen=True, slots=True)
class Interception:
    """The k-th time that the step called a declared submodule.

    Attributes:
        block: Its name.
        call: Index into ``StepPlan.calls``.
        position: Link of the chain.
        output: Pytree structure of what it returns.
        leaves: Specs of the tensors that it returned at the trace; other leaves as they are.
        arguments: How it is called.
    """

    block: str
    call: int
    position: int
    output: pytree.TreeSpec
    leaves: tuple[Any, ...]
    arguments: Arguments = ONE_TENSOR


@dataclass(frozen=True)
class StepPlan:
    """A captured step.

    Attributes:
        calls: In the order in which they start.
        interceptions: In the order in which the step makes them.
        chains: Network to its links.
        used: Network to the values that the step reads (beyond feeding the next block).
        batch: Pytree structure of the batch that was traced.
        batch_fields: Leaves of the batch (flattened) that the step reads for itself.
        has_effects: Whether the step changes pipelined parameters before its last call (an EMA).
        has_late_effects: Whether it does after its last call; then not before.
        mixes: Whether, before the last call, values of the batch meet other tensors or move to a
            device: where the batch has no values, this needs ``MetaWins``.
        draws_samples: Whether the step itself draws tensors of random numbers.
        writes_batch: Whether it writes into tensors of the batch.
        writes_outputs: Whether it writes into what the networks returned.
    """

    calls: tuple[CallPlan, ...]
    interceptions: tuple[Interception, ...]
    chains: dict[NetworkName, tuple[Link, ...]]
    used: dict[NetworkName, tuple[ValueRef, ...]]
    batch: pytree.TreeSpec
    batch_fields: tuple[int, ...]
    has_effects: bool
    has_late_effects: bool = False
    mixes: bool = False
    draws_samples: bool = False
    writes_batch: bool = False
    writes_outputs: bool = False

    @property
    def has_ema(self) -> bool:
        """Whether the step changes pipelined parameters, early or late."""
        return self.has_effects or self.has_late_effects

    def calls_of(self, network: NetworkName) -> tuple[int, ...]:
        """Indices of the calls of one network, in order."""
        return tuple(i for i, call in enumerate(self.calls) if call.network == network)
