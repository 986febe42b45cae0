"""The units of one step: how the calls' batches are split, and what each message carries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from lightning_tspipe.capture.plan import NetworkName, StepPlan, TensorSpec, ValueRef
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.lowering import Message
from lightning_tspipe.runtime.stages.network import ChainNetwork, UnitShapes

NETWORK_OF = {
    Op.FORWARD: "student",
    Op.BACKWARD: "student",
    Op.INPUT_BACKWARD: "student",
    Op.WEIGHT_BACKWARD: "student",
    Op.TEACHER: "teacher",
}


def split_sizes(batch_size: int, num_microbatches: int) -> tuple[int, ...]:
    """Sizes of the micro-batches, as ``torch.tensor_split`` makes them.

    >>> split_sizes(7, 3), split_sizes(2, 3)
    ((3, 2, 2), (1, 1, 0))
    """
    base, extra = divmod(batch_size, num_microbatches)
    return tuple(base + (index < extra) for index in range(num_microbatches))


@dataclass(frozen=True)
class Unit:
    """One (call, micro-batch) of a step.

    Attributes:
        call: Index into the step's calls.
        microbatch: Index within the call.
        start: Samples of the call in the micro-batches before.
        size: Samples; 0 for a micro-batch that a small batch leaves empty.
        end: One after the last atom that it goes through.
        grad: Whether it has a backward.
        shapes: What flows; None if it is empty.
        is_only: Whether it is the whole call.
    """

    call: int
    microbatch: int
    start: int
    size: int
    end: int
    grad: bool
    shapes: UnitShapes | None
    is_only: bool


class StepUnits:
    """All units of a step with given call inputs.

    Args:
        plan: The captured step.
        networks: The networks.
        cuts: For each network, the first atom of each stage and the number of atoms.
        num_microbatches: Micro-batches per call.
        inputs: Specs of the calls' inputs.
        context: The precision plugin's forward context.
        known: What is behind so many atoms of a frozen part is known, and read where they end.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - everything that decides what flows
        self,
        plan: StepPlan,
        networks: dict[NetworkName, ChainNetwork],
        cuts: Mapping[NetworkName, tuple[int, ...]],
        num_microbatches: int,
        inputs: Sequence[TensorSpec],
        context: Callable[[], AbstractContextManager[None]],
        known: int = 0,
    ) -> None:
        self._plan = plan
        self._networks = networks
        self._cuts = cuts
        self._context = context
        self._known = known
        self.inputs = tuple(inputs)
        self._spans: dict[Action, tuple[int, int]] = {}
        self._payloads: dict[Message, tuple[TensorSpec, ...]] = {}
        self._outputs: dict[Action, tuple[ValueRef, ...]] = {}
        self._producers: dict[tuple[int, ValueRef], tuple[Action, ...]] = {}
        self.units: dict[NetworkName, tuple[Unit, ...]] = {
            name: tuple(
                unit
                for call in plan.calls_of(network.called_as)
                for unit in self._units_of(network, call, num_microbatches)
            )
            for name, network in networks.items()
        }

    def _units_of(self, network: ChainNetwork, index: int, num_microbatches: int) -> list[Unit]:
        call, spec = self._plan.calls[index], self.inputs[index]
        grad = call.grad and network.called_as == network.name  # a frozen part has no backward
        if not spec.shape:
            raise ConfigurationError(
                f"call {index} of the {call.network} gets a tensor without a batch dimension"
            )
        sizes = split_sizes(spec.shape[0], num_microbatches)
        filled = sum(size > 0 for size in sizes)
        units = []
        for microbatch, size in enumerate(sizes):
            shapes = None
            if size:
                unit_spec = replace(spec, shape=(size, *spec.shape[1:]), requires_grad=False)
                shapes = network.shapes(unit_spec, call.num_links, self._context, grad=grad)
                _check_batched(shapes, size, filled, network)
            units.append(
                Unit(
                    index,
                    microbatch,
                    sum(sizes[:microbatch]),
                    size,
                    network.end_of(call.num_links),
                    grad,
                    shapes,
                    is_only=filled == 1,
                )
            )
        return units

    def of(self, action: Action) -> Unit:
        """The unit of an action."""
        assert action.unit is not None
        return self.units[NETWORK_OF[action.op]][action.unit]  # type: ignore[index]

    def span(self, action: Action) -> tuple[int, int]:
        """The atoms that an action runs: first, and one after the last; empty if first >= last."""
        known = self._spans.get(action)
        if known is None:
            known = self._spans[action] = self._find_span(action)
        return known

    def _find_span(self, action: Action) -> tuple[int, int]:
        cuts = self._cuts[NETWORK_OF[action.op]]  # type: ignore[index]
        unit = self.of(action)
        if unit.shapes is None:
            return 0, 0
        start, stop = cuts[action.stage], min(cuts[action.stage + 1], unit.end)
        if self.reads_known(action):
            start = self._known
        elif self._is_left_out(action):
            stop = start
        return start, stop

    def runs(self, action: Action) -> bool:
        """Whether there is anything to do: atoms to run, or something known to be read."""
        if NETWORK_OF[action.op] not in self.units:
            return True  # of heads, which are no chain of atoms
        if self.of(action).shapes is None:
            return False
        first, last = self.span(action)
        return first < last or self.reads_known(action)

    def reads_known(self, action: Action) -> bool:
        """Whether it is the stage of a frozen part where what is known goes on."""
        return self._goes_on_at(action) == action.stage

    def _is_left_out(self, action: Action) -> bool:
        """Whether it is a stage of a frozen part before what is known."""
        stage = self._goes_on_at(action)
        return stage is not None and action.stage < stage

    def _goes_on_at(self, action: Action) -> int | None:
        """The stage of a frozen part that reads what is known; None if nothing is."""
        name: NetworkName = NETWORK_OF[action.op]  # type: ignore[assignment]
        if not self._known or self._networks[name].called_as == name:
            return None
        cuts = self._cuts[name]
        within = (stage for stage, stop in enumerate(cuts[1:]) if self._known < stop)
        return next(within, len(cuts) - 2)

    def microbatches_at(self, action: Action) -> dict[int, int]:
        """For each call, in order, how many of its micro-batches run at the action's stage."""
        counts: dict[int, int] = {}
        for index, unit in enumerate(self.units[NETWORK_OF[action.op]]):  # type: ignore[index]
            if self.runs(Action(action.op, action.stage, index)):
                counts[unit.call] = counts.get(unit.call, 0) + 1
        return counts

    def outputs_of(self, action: Action) -> tuple[ValueRef, ...]:
        """The values that a forward hands to the loss, in a fixed order."""
        known = self._outputs.get(action)
        if known is None:
            known = self._outputs[action] = self._find_outputs(action)
        return known

    def _find_outputs(self, action: Action) -> tuple[ValueRef, ...]:
        unit = self.of(action)
        first, last = self.span(action)
        if unit.shapes is None or first >= last:
            return ()
        network = self._networks[NETWORK_OF[action.op]]  # type: ignore[index]
        return tuple(
            ref for ref in network.outputs_between(first, last) if ref in unit.shapes.outputs
        )

    def producers(self, call: int, ref: ValueRef) -> tuple[Action, ...]:
        """The forwards that make one value of a call, micro-batch after micro-batch."""
        known = self._producers.get((call, ref))
        if known is None:
            known = self._producers[call, ref] = tuple(
                action for action in self._forwards_of(call) if ref in self.outputs_of(action)
            )
        return known

    def _forwards_of(self, call: int) -> Iterator[Action]:
        called = self._plan.calls[call].network
        ops = {"teacher": Op.TEACHER, "student": Op.FORWARD}
        for name, network in sorted(self._networks.items(), reverse=True):
            if network.called_as != called:
                continue
            for index, unit in enumerate(self.units[name]):
                if unit.call == call:
                    for stage in range(len(self._cuts[name]) - 1):
                        yield Action(ops[name], stage, index)

    def loss_gradients(self, call: int) -> tuple[tuple[Action, Unit, tuple[ValueRef, ...]], ...]:
        """The backwards that get gradients of one call's outputs, and of which."""
        found = []
        for action in self._forwards_of(call):
            unit = self.of(action)
            if unit.shapes is None or not self.outputs_of(action) or action.op is Op.TEACHER:
                continue
            outputs = unit.shapes.outputs
            refs = tuple(ref for ref in self.outputs_of(action) if outputs[ref].requires_grad)
            found.append((Action(Op.BACKWARD, action.stage, action.unit), unit, refs))
        return tuple(found)

    def input_specs(self, action: Action) -> tuple[TensorSpec, ...]:
        """What a forward gets; nothing if it reads what is known."""
        unit = self.of(action)
        first, last = self.span(action)
        if unit.shapes is None or first >= last or self.reads_known(action):
            return ()
        return unit.shapes.boundaries[first]

    def payload(self, message: Message) -> tuple[TensorSpec, ...]:
        """Specs of the tensors of a message; none if there is nothing to send."""
        known = self._payloads.get(message)
        if known is None:
            known = self._payloads[message] = self._find_payload(message)
        return known

    def _find_payload(self, message: Message) -> tuple[TensorSpec, ...]:
        if message.payload in {"input", "activation"}:
            return self.input_specs(message.consumer)
        if message.payload == "output":
            shapes = self.of(message.producer).shapes
            refs = self.outputs_of(message.producer)
            return tuple(shapes.outputs[ref] for ref in refs) if shapes is not None else ()
        assert message.payload == "gradient"
        if message.producer.op is Op.LOSS:
            return self._loss_gradients(message.consumer)
        if not self.of(message.producer).grad:
            return ()
        return tuple(s for s in self.input_specs(message.producer) if s.requires_grad)

    def _loss_gradients(self, consumer: Action) -> tuple[TensorSpec, ...]:
        unit = self.of(consumer)
        if unit.shapes is None or not unit.grad:
            return ()
        specs = (unit.shapes.outputs[ref] for ref in self.outputs_of(consumer))
        return tuple(spec for spec in specs if spec.requires_grad)


def _check_batched(
    shapes: UnitShapes, size: int, num_microbatches: int, network: ChainNetwork
) -> None:
    if num_microbatches == 1:
        return
    for spec in shapes.outputs.values():
        if not spec.shape or spec.shape[0] % size:
            raise ConfigurationError(
                f"an output of the {network.name} has shape {spec.shape} for {size} samples: its "
                "first dimension is not the batch. Use TSPipeStrategy(num_microbatches=1)"
            )
