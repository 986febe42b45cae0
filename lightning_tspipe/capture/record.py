"""What a traced step did, and whether a pipeline can do it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_tspipe.capture.plan import (
    CallPlan,
    Entry,
    Input,
    Interception,
    NetworkName,
    Route,
    StepPlan,
    TensorSpec,
    ValueRef,
)
from lightning_tspipe.capture.provenance import BlockOutput, ProvenanceMode, Value
from lightning_tspipe.errors import CaptureError, NoCallError, TrainedTeacherError
from lightning_tspipe.networks.arguments import Arguments
from lightning_tspipe.networks.tape import memory_of


@dataclass
class Call:
    """A call of a network.

    Attributes:
        network: Which.
        inputs: What the step gives it, by their ids and versions: after a write it is another.
        entries: What it goes through.
        constants: The places of inputs that only happen to have a row for each sample.
    """

    network: NetworkName
    inputs: dict[tuple[int, int], Value] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    constants: frozenset[int] = frozenset()

    def input(self, value: Value) -> Input:
        """A tensor that the step gives it."""
        tensor = value.tensor
        version = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001
        self.inputs.setdefault((id(tensor), version), value)
        return Input([*self.inputs].index((id(tensor), version)))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the step gives it."""
        return [value.tensor for value in self.inputs.values()]

    @property
    def arguments(self) -> Arguments:
        """The same; what comes of the batch tells how many samples there are."""
        of_batch = (value.tensor for value in self.inputs.values() if value.sources())
        made = [tensor for tensor in of_batch if tensor.ndim] or self.tensors
        found = Arguments.of(self.tensors, {}, next(iter(made[0].shape), None))
        leaves = list(found.tensors)
        for place, (kind, value) in enumerate(zip(leaves, self.inputs.values(), strict=True)):
            is_whole = kind.is_whole or place in self.constants
            is_bound = is_whole and bool(kind.shape and value.sources())
            leaves[place] = replace(kind, is_whole=is_whole, is_bound=is_bound)
        return replace(found, leaves=tuple(leaves))

    @property
    def may_have_constants(self) -> bool:
        """Whether what is not made of the batch looks as if it had a row for each sample."""
        pairs = zip(self.arguments.tensors, self.inputs.values(), strict=True)
        return any(not kind.is_whole and not value.sources() for kind, value in pairs)

    def find_constants(self, twice: Call) -> None:
        """Learn from a call for twice as many samples which inputs stay, if not all of them do."""
        pairs = zip(self.tensors, twice.tensors, strict=True)
        stays = [one.shape[:1] == two.shape[:1] for one, two in pairs]
        self.constants = frozenset(n for n, is_so in enumerate(stays) if is_so and not all(stays))

    @property
    def key(self) -> object:
        """What two calls have in common that take the same way."""
        whole = [kind.is_whole for kind in self.arguments.tensors]
        return self.network, "\n".join(map(str, self.entries)), *whole


@dataclass
class StepRecord:
    """What a step did while it was traced.

    Attributes:
        block_names: The declared submodules.
        is_automatic: Whether Lightning optimizes, and not the step.
        device: Where it was traced.
        mode: Where each value came from, and where it went.
        fields: The tensors of the batch, by their places among its leaves.
        batch: Its structure.
        parameters: Those of the networks.
        calls: The calls of networks.
        interceptions: The calls of blocks, in their order.
        outputs: What the blocks returned.
        sets: As in the plan.
        sets_networks: As in the plan.
        fed_at: The same.
        rewritten: What a hook gets and the network then writes into: the network, and its call's
            line.
        leaves: By their ids, where gradients of the step's loss arrive.
    """

    block_names: Sequence[str]
    is_automatic: bool
    device: torch.device
    mode: ProvenanceMode = field(default_factory=ProvenanceMode)
    fields: dict[int, Value] = field(default_factory=dict)
    batch: pytree.TreeSpec = field(default_factory=pytree.treespec_leaf)
    parameters: list[Value] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    interceptions: list[Interception] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    sets: bool = False
    sets_networks: bool = False
    fed_at: str = ""
    rewritten: list[tuple[Value, str, str]] = field(default_factory=list)
    leaves: set[int] = field(default_factory=set)

    def plan(self) -> StepPlan:
        """What a pipeline needs to know of the step.

        Raises:
            CaptureError: The step does something that a pipeline cannot.
        """
        if not self.interceptions:
            raise NoCallError(
                f"the step never called {' or '.join(map(repr, self.block_names))}. Declare the "
                "submodules that it calls: TSPipeStrategy(student=[...], teacher=[...])"
            )
        self._check_reads()
        self._check_hooks()
        has_effects, has_late_effects = self._check_writes()
        ways: dict[NetworkName, dict[object, list[int]]] = {}
        for index, call in enumerate(self.calls):
            ways.setdefault(call.network, {}).setdefault(call.key, []).append(index)
        calls = tuple(
            CallPlan(
                call.network, tuple(map(TensorSpec.of, call.arguments.spread(call.tensors))),
                [*ways[call.network]].index(call.key), *self._trained(index),
            )
            for index, call in enumerate(self.calls)
        )  # fmt: skip
        if any(call.network == "teacher" and call.grad for call in calls):
            raise TrainedTeacherError
        return StepPlan(
            calls=calls,
            interceptions=tuple(self.interceptions),
            routes={name: tuple(map(self._route, own.values())) for name, own in ways.items()},
            device=self.device,
            batch=self.batch,
            batch_fields=tuple(place for place, value in self.fields.items() if value.is_needed),
            has_effects=has_effects,
            has_late_effects=has_late_effects,
            mixes=self.mode.mixes,
            draws_samples=self.mode.draws_samples,
            writes_batch=self._writes_batch(),
            writes_inputs=self._writes(tensor for call in self.calls for tensor in call.tensors),
            writes_outputs=self._writes(value.tensor for value in self.outputs),
            sets=self.sets,
            sets_networks=self.sets_networks,
            fed_at=self.fed_at,
            sized_at=self._sized_at(),
            parameters=frozenset(value.source.name for value in self._read_parameters()),
            flops=self.mode.draws.flops,
        )

    def _sized_at(self) -> str:
        last = len(self.interceptions)
        return next(
            (
                line
                for value, when, line in self.mode.sizes
                if when < last and any(isinstance(v.source, BlockOutput) for v in value.sources())
            ),
            "",
        )

    def _trained(self, call: int) -> tuple[bool, frozenset[ValueRef], frozenset[ValueRef]]:
        """Whether a call has gradients, which of its values may have some, and which have."""
        outputs = (v for v in self.outputs if v.source.call == call and v.tensor.requires_grad)
        trained = [value for value in outputs if value.is_used]
        reached = (value.source.ref for value in trained if id(value.root) in self.leaves)
        return bool(trained), frozenset(v.source.ref for v in trained), frozenset(reached)

    def _route(self, calls: Sequence[int]) -> Route:
        """The way of some calls; the step may read other values of each."""
        first = self.calls[calls[0]]
        outputs = (value for value in self.outputs if value.source.call in calls)
        used = {value.source.ref for value in outputs if value.is_used}
        return Route(tuple(first.entries), first.arguments, tuple(sorted(used)))

    def _check_reads(self) -> None:
        for line in self.mode.gradient_reads:
            raise CaptureError(
                f"the step looks at the gradient of a pipelined parameter, at {line}: it may be on "
                "another rank. Clip with self.clip_gradients(optimizer, ...), clear with "
                "optimizer.zero_grad(), look in the hook on_before_optimizer_step"
            )
        last = len(self.interceptions)
        for value, when, line in self.mode.reads:
            if when < last and any(isinstance(v.source, BlockOutput) for v in value.sources()):
                raise CaptureError(
                    f"the step looks at the values of a network's output before its last call to "
                    f"a pipelined network, at {line}: which calls follow may depend on them. Move "
                    "that line behind the last call"
                )
        for value in self._read_parameters():
            source, is_trained = value.source, value.tensor.requires_grad
            is_averaged = source.network == "teacher" and (is_trained or any(self._check_writes()))
            if source.is_buffer or is_averaged:
                raise CaptureError(
                    f"the step computes with {source.name!r} of a pipelined network, on another "
                    "rank. It may in training, with parameters of a trained network or of a teacher"
                    " that stays as it is; keep a copy of others (register_buffer), or use a hook"
                )

    def _read_parameters(self) -> list[Value]:
        """What networks own and the step computes with, but for averages."""
        return [value for value in self.parameters if value.consumers and value.is_used]

    def _check_hooks(self) -> None:
        """What a hook gets must stay as it is: it gets it when all of the network has run."""
        for value, name, line in self.rewritten:
            if value.is_used:
                raise CaptureError(
                    f"a forward hook in {name!r}, called at {line}, reads a tensor that the "
                    "network writes into afterwards, as nn.ReLU(inplace=True) does. Use "
                    "inplace=False there, or hang the hook on the module that writes"
                )
        calls = {each.call for each in self.interceptions if each.entry.hooked}
        outputs = [value.tensor for value in self.outputs if value.source.call in calls]
        memory = set(map(memory_of, outputs))
        for value, _, line, _ in self.mode.writes:
            if memory_of(value.tensor) in memory:
                raise CaptureError(
                    f"the step writes into what a pipelined network returned, at {line}, and the "
                    "network has forward hooks, which may have kept the same tensor. Make a new "
                    "one, as in x = x + 1"
                )

    def _writes_batch(self) -> bool:
        """Whether a tensor of the batch is written into: each run of the step then gets its own."""
        memory = [memory_of(field.tensor) for field in self.fields.values()]
        for value, _, line, clears in self.mode.writes:
            number = 0 if clears else memory.count(memory_of(value.tensor))
            if number > 1:
                raise CaptureError(
                    f"the step writes into its batch, at {line}, and several tensors of the batch "
                    "share that memory, which they don't on other ranks. Make a new tensor, as in "
                    "x = x - mean"
                )
            if number:
                return True
        return False

    def _writes(self, tensors: Iterable[Tensor]) -> bool:
        memory = set(map(memory_of, tensors))
        return any(memory_of(value.tensor) in memory for value, *_ in self.mode.writes)

    def _check_writes(self) -> tuple[bool, bool]:
        """Whether pipelined parameters change before the last call, and whether after it."""
        last = len(self.interceptions)
        writes = [
            (source.network, when >= last, line, clears)
            for value, when, line, clears in self.mode.writes
            if (source := self.mode.parameter_in(value.tensor))
        ]
        early = any(not is_late for _, is_late, *_ in writes)
        for network, is_late, line, clears in writes:
            is_refused = early or network == "student" or not self.is_automatic
            if is_late and not clears and is_refused:
                raise CaptureError(
                    f"the step changes a pipelined parameter after its last call to a pipelined "
                    f"network, at {line}, and {self._why_not_late(network, early=early)}. Move the "
                    "line before the last call, into on_train_batch_end, or use "
                    "lightning_tspipe.MomentumEMA"
                )
        return early, any(is_late for _, is_late, *_ in writes)

    def _why_not_late(self, network: NetworkName, *, early: bool) -> str:
        if network == "student":
            return "it is one of the student's, whose backward is still to come"
        if early:
            return "others before it: the two happen at different times"
        return "the step has optimized by hand by then"
