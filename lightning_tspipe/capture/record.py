"""What a traced step did, and whether a pipeline can do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_tspipe.capture.plan import (
    Block,
    CallPlan,
    Interception,
    Link,
    NetworkName,
    StepPlan,
    TensorSpec,
    ValueRef,
)
from lightning_tspipe.capture.provenance import BlockOutput, ProvenanceMode, Value
from lightning_tspipe.errors import CaptureError, NoCallError


@dataclass
class Call:
    """A call of a network: its blocks, and what happens between them."""

    network: NetworkName
    input: Tensor
    links: list[Link] = field(default_factory=list)


@dataclass
class StepRecord:
    """What a step did while it was traced.

    Attributes:
        block_names: The declared submodules.
        is_automatic: Whether Lightning optimizes, and not the step.
        mode: Where each value came from, and where it went.
        calls: The calls of networks.
        interceptions: The calls of blocks, in their order.
        outputs: What the blocks returned.
    """

    block_names: Sequence[str]
    is_automatic: bool
    mode: ProvenanceMode = field(default_factory=ProvenanceMode)
    calls: list[Call] = field(default_factory=list)
    interceptions: list[Interception] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)

    def plan(
        self, fields: list[Value | None], batch: pytree.TreeSpec, parameters: list[Value]
    ) -> StepPlan:
        """What a pipeline needs to know of the step.

        Args:
            fields: The batch's leaves; None for those that are no tensors.
            batch: Its structure.
            parameters: Those of the networks.

        Raises:
            CaptureError: The step does something that a pipeline cannot.
        """
        if not self.interceptions:
            raise NoCallError(
                f"the step never called {' or '.join(map(repr, self.block_names))}. Declare the "
                "submodules that it calls: TSPipeStrategy(student=[...], teacher=[...])"
            )
        self._check_reads(parameters)
        has_effects, has_late_effects = self._check_writes()
        calls = tuple(
            CallPlan(c.network, TensorSpec.of(c.input), len(c.links), self._has_grad(i))
            for i, c in enumerate(self.calls)
        )
        if any(call.network == "teacher" and call.grad for call in calls):
            raise CaptureError(
                "the teacher's output requires gradients. A teacher is forward-only: set "
                "requires_grad_(False) on its parameters or call it under torch.no_grad(); "
                "a network that is trained belongs to the student"
            )
        return StepPlan(
            calls=calls,
            interceptions=tuple(self.interceptions),
            chains=self._chains(),
            used=self._used(),
            batch=batch,
            batch_fields=tuple(
                index
                for index, value in enumerate(fields)
                if value is not None and (value.is_needed or self.mode.draws_on_device)
            ),
            has_effects=has_effects,
            has_late_effects=has_late_effects,
            mixes=self.mode.mixes,
            draws_samples=self.mode.draws_samples,
            writes_batch=self._writes_batch([value for value in fields if value is not None]),
            writes_outputs=self._writes_outputs(),
        )

    def _has_grad(self, call: int) -> bool:
        outputs = (value for value in self.outputs if value.source.call == call)
        return any(value.tensor.requires_grad for value in outputs if value.is_used)

    def _used(self) -> dict[NetworkName, tuple[ValueRef, ...]]:
        used: dict[NetworkName, set[ValueRef]] = {call.network: set() for call in self.calls}
        for value in self.outputs:
            if value.is_used:
                source = value.source
                refs = used[self.calls[source.call].network]
                refs.add(ValueRef(source.position, source.slot))
        return {network: tuple(sorted(refs)) for network, refs in used.items()}

    def _chains(self) -> dict[NetworkName, tuple[Link, ...]]:
        chains: dict[NetworkName, tuple[Link, ...]] = {}
        for call in self.calls:
            links = tuple(call.links)
            longest = chains.get(call.network, ())
            longer, shorter = (links, longest) if len(links) > len(longest) else (longest, links)
            if [str(link) for link in longer[: len(shorter)]] != [str(link) for link in shorter]:
                raise CaptureError(
                    f"two calls of the {call.network} go different ways: "
                    f"{' -> '.join(map(str, shorter))} and {' -> '.join(map(str, longer))}. All "
                    "calls of one network must start with the same blocks, called with the same "
                    "constants"
                )
            chains[call.network] = longer
        return {network: self._trained(network, chain) for network, chain in chains.items()}

    def _trained(self, network: NetworkName, chain: tuple[Link, ...]) -> tuple[Link, ...]:
        """A chain whose links have gradients if they have in calls that take part in a backward."""
        links = list(chain)
        trained = [c.links for c in self.calls if c.network == network and _has_grad(c.links)]
        for place, link in enumerate(chain):
            grads = {_has_grad(each[place : place + 1]) for each in trained if place < len(each)}
            if isinstance(link, Block) and len(grads) > 1:
                raise CaptureError(
                    f"the step calls {link.name!r} with gradients and, as part of another call of "
                    f"the {network}, without, while the rest of that call has some. Call it under "
                    "no_grad in all of them or in none, or detach its output"
                )
            if isinstance(link, Block) and grads:
                links[place] = replace(link, grad=grads.pop())
        return tuple(links)

    def _check_reads(self, parameters: list[Value]) -> None:
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
        for value in parameters:
            if value.consumers and value.is_used:
                raise CaptureError(
                    f"the step computes with the parameter {value.source.name!r} of a pipelined "
                    "network, which is spread over the ranks. Use the optimizer's weight_decay or "
                    "a hook that works on each parameter, such as on_before_optimizer_step"
                )

    def _writes_batch(self, fields: list[Value]) -> bool:
        """Whether a tensor of the batch is written into: each run of the step then gets its own."""
        memory = list(map(_memory_of, fields))
        for value, _, line, clears in self.mode.writes:
            number = 0 if clears else memory.count(_memory_of(value))
            if number > 1:
                raise CaptureError(
                    f"the step writes into its batch, at {line}, and several tensors of the batch "
                    "share that memory, which they don't on other ranks. Make a new tensor, as in "
                    "x = x - mean"
                )
            if number:
                return True
        return False

    def _writes_outputs(self) -> bool:
        memory = set(map(_memory_of, self.outputs))
        return any(_memory_of(value) in memory for value, *_ in self.mode.writes)

    def _check_writes(self) -> tuple[bool, bool]:
        """Whether pipelined parameters change before the last call, and whether after it."""
        last = len(self.interceptions)
        writes = [
            (source.source.network, when >= last, line, clears)
            for value, when, line, clears in self.mode.writes
            for source in value.sources()
            if source.is_parameter
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


def _has_grad(links: Sequence[Link]) -> bool:
    return any(link.grad for link in links if isinstance(link, Block))


def _memory_of(value: Value) -> int:
    """Which memory a tensor lies in; that of a fake one, too, has a number."""
    number: int = value.tensor.untyped_storage()._cdata  # noqa: SLF001 - there is no public one
    return number
