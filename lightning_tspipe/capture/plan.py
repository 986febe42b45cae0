"""What a traced step looks like: its calls, the ways that they take, what the loss needs."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_tspipe.networks.arguments import Arguments

NetworkName = Literal["student", "teacher"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, type and order in memory of a tensor, without its values.

    Attributes:
        shape: Its sizes.
        dtype: Its type.
        requires_grad: Whether gradients are wanted of it.
        order: Its dimensions as they lie in memory, the outermost first, if that is not their own
            order: ``(0, 2, 3, 1)`` of ``torch.channels_last``, ``(0, 2, 1)`` of a transposed one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    order: tuple[int, ...] = ()

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec of ``tensor``; an expanded one is taken to lie in its own order.

        Gaps, as a half of a tensor has them, are left out on the way: the order stays.
        """
        order: tuple[int, ...] = ()
        if tensor.layout is torch.strided and not tensor.is_contiguous():
            strides = tensor.stride()
            found = tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
            known = all(
                stride or size == 1 for size, stride in zip(tensor.shape, strides, strict=True)
            )
            order = found if known and found != tuple(range(tensor.dim())) else ()
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, order)

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """The sizes in the order in which they lie in memory."""
        return tuple(self.shape[dim] for dim in self.order) or self.shape

    def to_memory(self, tensor: Tensor) -> Tensor:
        """A view of :attr:`memory_shape`; contiguous if the tensor lies in memory as said here."""
        return tensor.permute(self.order) if self.order else tensor

    def from_memory(self, tensor: Tensor) -> Tensor:
        """A view of :attr:`shape` on a tensor of :attr:`memory_shape`."""
        if not self.order:
            return tensor
        return tensor.permute([self.order.index(dim) for dim in range(len(self.order))])

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


Specs = tuple[TensorSpec, ...]
"""Of some tensors that travel together."""
Inputs = tuple[tuple[Tensor, ...], ...]
"""The tensors that each call of a step gets."""


@dataclass(frozen=True, order=True, slots=True)
class ValueRef:
    """A tensor that an entry returned: leaf ``slot`` of what entry ``position`` of a route gave."""

    position: int
    slot: int

    def __str__(self) -> str:
        return f"%{self.position}.{self.slot}"


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that a call gets from the step: its ``place``-th."""

    place: int

    def __str__(self) -> str:
        return f"x{self.place or ''}"


@dataclass(frozen=True, slots=True)
class Glue:
    """What the step does between two entries, such as ``.flatten(1)``.

    Attributes:
        function: An operation: takes the tensors, returns one; its text tells what it does, with
            its constants.
        grad: Whether gradients were enabled.
        values: What it takes.
        has_rows: Whether it gives for each sample what the number of samples does not change.
    """

    function: Any
    grad: bool
    values: tuple[Expression, ...]
    has_rows: bool = True

    @property
    def is_divisible(self) -> bool:
        """Whether it, and what it takes, may be computed for some of the samples at a time."""
        return self.has_rows and all(v.is_divisible for v in self.values if isinstance(v, Glue))

    @property
    def takes_inputs(self) -> bool:
        """Whether it, or what it takes, takes something that the call gets from the step."""
        return any(
            value.takes_inputs if isinstance(value, Glue) else isinstance(value, Input)
            for value in self.values
        )

    def __str__(self) -> str:
        return f"{self.function}({', '.join(map(str, self.values))})"


Expression = ValueRef | Input | Glue


@dataclass(frozen=True, slots=True)
class Entry:
    """A method of a submodule that the step calls.

    Attributes:
        name: Dotted name of the submodule within the LightningModule.
        method: Which method.
        grad: Whether gradients were enabled at the call.
        arguments: How it is called.
        values: Where each tensor among the arguments comes from.
        hooked: Parts of it, in the order in which they run, whose forward hooks the step runs: what
            they get are further leaves of what it returns.
        autocast: (device type, type, enabled) of an autocast that the step has entered; else None.
        settings: What the step has set of the submodule for this call: of which part, by its dotted
            name within the LightningModule, what, and to which value.
    """

    name: str
    method: str
    grad: bool
    arguments: Arguments
    values: tuple[Expression, ...]
    hooked: tuple[str, ...] = ()
    autocast: tuple[str, torch.dtype, bool] | None = None
    settings: tuple[tuple[str, str, Any], ...] = ()

    @property
    def title(self) -> str:
        """Such as ``backbone`` or ``backbone.encode``."""
        return self.name if self.method == "forward" else f"{self.name}.{self.method}"

    @property
    def heard(self) -> tuple[str, ...]:
        """The submodules whose forward hooks the step runs: itself, and those parts."""
        return self.name, *(f"{self.name}.{part}".rstrip(".") for part in self.hooked)

    def __str__(self) -> str:
        grad = "" if self.grad else " without gradients"
        hooked = f" with hooks on {', '.join(self.hooked)}" if self.hooked else ""
        autocast = f" under autocast{self.autocast}" if self.autocast else ""
        values = ", ".join(map(str, self.values))
        settings = "".join(f", {part}.{name}={value!r}" for part, name, value in self.settings)
        return f"{self.title}{self.arguments} of {values}{grad}{hooked}{autocast}{settings}"

    def context(self) -> AbstractContextManager[Any]:
        """What the step has switched around it, beside gradients."""
        return torch.autocast(*self.autocast) if self.autocast else nullcontext()


@dataclass(frozen=True, slots=True)
class Route:
    """The entries that a call goes through, each of which but the first reads another's output.

    ::

        backbone(x0) ──► %0.0 ── flatten ──► head(..)        a call with two heads
                          └───── flatten ──► other(..)

    Attributes:
        entries: In the order in which the step calls them.
        arguments: The tensors that the call gets from the step.
        used: The values that the step reads (beyond feeding the next entry).
    """

    entries: tuple[Entry, ...]
    arguments: Arguments
    used: tuple[ValueRef, ...] = ()

    def __str__(self) -> str:
        return ", then ".join(map(str, self.entries))


@dataclass(frozen=True, slots=True)
class CallPlan:
    """One call of a network in the step.

    Attributes:
        network: Which network.
        inputs: Specs of the tensors that it gets, of the whole batch.
        route: The way that it takes: a place in ``StepPlan.routes``.
        grad: Whether its output takes part in the backward.
        trained: Its values that may have gradients.
        reached: Those on which the step's loss depends.
    """

    network: NetworkName
    inputs: Specs
    route: int
    grad: bool
    trained: frozenset[ValueRef] = frozenset()
    reached: frozenset[ValueRef] = frozenset()

    @property
    def batch_size(self) -> int:
        """Samples that it gets."""
        return self.inputs[0].shape[0]


@dataclass(frozen=True, slots=True)
class Interception:
    """The k-th time that the step called an entry.

    Attributes:
        entry: It, with its arguments.
        call: Index into ``StepPlan.calls``.
        position: Place in the call's route.
        output: Pytree structure of what it returns and of what its hooks get.
        leaves: Specs of the tensors that it returned at the trace; other leaves as they are.
    """

    entry: Entry
    call: int
    position: int
    output: pytree.TreeSpec
    leaves: tuple[Any, ...]


def places_in(batch: pytree.TreeSpec) -> list[str]:
    """Where the leaves of a batch are: ``[1]['boxes']``."""
    numbered = pytree.tree_unflatten(range(batch.num_leaves), batch)
    return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(numbered)[0]]


_DONE = (
    "has_effects", "has_late_effects", "mixes", "draws_samples", "writes_batch", "writes_inputs",
    "writes_outputs", "sets", "sized_at",
)  # fmt: skip
"""What a step may do, of :class:`StepPlan`."""


@dataclass(frozen=True)
class StepPlan:
    """A captured step.

    Attributes:
        calls: In the order in which they start.
        interceptions: In the order in which the step makes them.
        routes: Network to the ways that calls take through it.
        device: Where this rank computes.
        batch: Pytree structure of the batch that was traced.
        batch_fields: Leaves of the batch (flattened) that the step reads for itself.
        has_effects: Whether the step changes pipelined parameters before its last call (an EMA).
        has_late_effects: Whether it does after its last call; then not before.
        mixes: Whether, before the last call, values of the batch meet other tensors, move to a
            device, or tell theirs: where the batch has no values, this needs ``MetaWins``.
        draws_samples: Whether the step itself draws tensors of random numbers.
        writes_batch: Whether it writes into tensors of the batch.
        writes_inputs: Whether it writes into what it has given to networks, or gives them later.
        writes_outputs: Whether it writes into what the networks returned.
        sets: Whether it sets attributes of what lies beside the networks.
        sets_networks: Whether it has changed attributes of the networks, or what of them is
            trained, before its calls.
        fed_at: The user's line where a trained network is given what a forward-only one gave;
            empty if none is.
        sized_at: The user's line that asks for sizes, beyond the first, of an output before the
            last call; empty if none does.
        parameters: Names of the networks' parameters with which the step computes its loss itself.
        flops: Floating-point operations beside the networks, with those of the backward.
    """

    calls: tuple[CallPlan, ...]
    interceptions: tuple[Interception, ...]
    routes: dict[NetworkName, tuple[Route, ...]]
    device: torch.device
    batch: pytree.TreeSpec
    batch_fields: tuple[int, ...]
    has_effects: bool
    has_late_effects: bool = False
    mixes: bool = False
    draws_samples: bool = False
    writes_batch: bool = False
    writes_inputs: bool = False
    writes_outputs: bool = False
    sets: bool = False
    sets_networks: bool = False
    fed_at: str = ""
    sized_at: str = ""
    parameters: frozenset[str] = frozenset()
    flops: int = 0

    @property
    def has_ema(self) -> bool:
        """Whether the step changes pipelined parameters, early or late."""
        return self.has_effects or self.has_late_effects

    @property
    def glue(self) -> list[Glue]:
        """What the step computes between calls that go on with another one's output."""
        given = (value for each in self.interceptions for value in each.entry.values)
        return [value for value in given if isinstance(value, Glue)]

    @property
    def joins(self) -> bool:
        """Whether the step joins what a network returns and something else, for another one."""
        return any(value.takes_inputs for value in self.glue)

    def route(self, call: int) -> Route:
        """The way that a call takes."""
        plan = self.calls[call]
        return self.routes[plan.network][plan.route]

    def calls_of(self, network: NetworkName) -> tuple[int, ...]:
        """Indices of the calls of one network, in order."""
        return tuple(i for i, call in enumerate(self.calls) if call.network == network)

    @property
    def trained(self) -> frozenset[tuple[int, ValueRef]]:
        """The calls, and their values that may have gradients."""
        return frozenset((n, ref) for n, call in enumerate(self.calls) for ref in call.trained)

    @property
    def reached(self) -> frozenset[tuple[int, ValueRef]]:
        """Of these, the ones on which the loss depended in the step that was traced."""
        return frozenset((n, ref) for n, call in enumerate(self.calls) for ref in call.reached)

    @property
    def unread(self) -> frozenset[str]:
        """The places in a batch, whatever is around them, that the step does not read."""
        places = places_in(self.batch)
        return frozenset(places) - {places[index] for index in self.batch_fields}

    def serves(self, other: StepPlan) -> bool:
        """Whether a pipeline of this step does another one too, for samples of whatever shape.

        Args:
            other: The other step; it may read and change less.
        """

        def same(plan: StepPlan) -> object:
            calls = [(call.network, call.route, call.grad) for call in plan.calls]
            made = [(str(each.entry), each.call, each.position) for each in plan.interceptions]
            ways = {name: list(map(str, own)) for name, own in plan.routes.items()}
            return calls, made, ways, bool(plan.fed_at)

        def read(plan: StepPlan) -> set[object]:
            routes = ((name, n, r) for name, own in plan.routes.items() for n, r in enumerate(own))
            used = {(name, n, ref) for name, n, route in routes for ref in route.used}
            done = {name for name in _DONE if getattr(plan, name)}
            return {*used, *done, *plan.parameters}

        fields = {*places_in(other.batch)} - other.unread
        is_sent = self.unread.isdisjoint(fields) and not other.sets_networks
        return is_sent and same(self) == same(other) and read(self) >= read(other)
