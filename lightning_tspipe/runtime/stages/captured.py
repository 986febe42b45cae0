"""A captured step: its plan and networks, how they are divided, and the units that flow through.

A *unit* is one micro-batch of one call; what each message of a step carries follows from the units.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from torch import nn

from lightning_tspipe.capture.plan import Glue, NetworkName, Specs, StepPlan, TensorSpec, ValueRef
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import NetworkLayout
from lightning_tspipe.ir.schedule import Message
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.runtime.stages.batchnorm import is_deferred
from lightning_tspipe.runtime.stages.heads import Heads
from lightning_tspipe.runtime.stages.network import ChainNetwork
from lightning_tspipe.runtime.stages.routes import RouteChain, UnitShapes, of_samples


class UndividedError(ConfigurationError):
    """A call that can't be divided into micro-batches.

    Args:
        reason: Why.
        remedy: What to do.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}. {remedy}")
        self.reason = reason


@dataclass(frozen=True)
class Captured:
    """A step after the trace: the plan and the networks that it calls.

    Attributes:
        plan: The plan.
        networks: The networks whose calls go through the pipeline.
        beside: Networks that the step calls where they are, and that are divided among ranks too.
        followed: Of a teacher that the step doesn't call, the tensor of the student that each of
            its tensors follows, by dotted names.
        untrained: The calls without a backward, since nothing of them was to be trained.
    """

    plan: StepPlan
    networks: dict[NetworkName, ChainNetwork]
    beside: Mapping[NetworkName, Heads] = field(default_factory=dict)
    followed: Mapping[str, str] = field(default_factory=dict)
    untrained: frozenset[int] = frozenset()

    @property
    def begins_to_train(self) -> int | None:
        """A call of which something is to be trained by now, and was not."""
        return next((call for call in self.untrained if self._may_be_trained(call)), None)

    def _may_be_trained(self, index: int) -> bool:
        call = self.plan.calls[index]
        return self.networks[call.network].routes[call.route].may_be_trained

    @property
    def at_rest(self) -> Captured:
        """The same, with those calls noted of which nothing is to be trained now."""
        rest = (n for n, call in enumerate(self.plan.calls) if not call.grad)
        return replace(self, untrained=frozenset(n for n in rest if not self._may_be_trained(n)))

    @property
    def held(self) -> dict[NetworkName, ChainNetwork | Heads]:
        """All whose atoms are divided among the ranks; names are those of the LightningModule."""
        return {**self.networks, **self.beside}

    @property
    def undivided(self) -> str:
        """Why calls of the step can't be divided into micro-batches; "" if they can."""
        try:
            for network in self.networks.values():
                for index in self.plan.calls_of(network.called_as):
                    call = self.plan.calls[index]
                    grad = call.grad and network.called_as == network.name
                    sizes = split_sizes(call.batch_size, 2)
                    if all(sizes):
                        chain = network.routes[call.route]
                        _check_divisible(chain)
                        _check_written(chain)
                        _check_batched(chain, call.inputs, sizes[0], grad=grad)
        except UndividedError as error:
            return error.reason
        return ""

    @property
    def reads(self) -> set[tuple[int, str]]:
        """What the networks' forwards read, as guards name it."""
        ways = [way for network in self.networks.values() for way in network.routes]
        return {key for way in ways for key in way.program.first.tape.guards.reads}

    def lost(self, reached: Collection[tuple[int, ValueRef]]) -> set[nn.Parameter]:
        """The trained parameters that have no gradient in a step, and could have one.

        Args:
            reached: Calls, and their values that have gradients.
        """
        may_have, have = set[nn.Parameter](), set[nn.Parameter]()
        for index in self.plan.calls_of("student"):
            call = self.plan.calls[index]
            behind = self.networks["student"].routes[call.route].parameters_behind
            may_have |= behind(call.trained)
            have |= behind(ref for ref in call.trained if (index, ref) in reached)
        return {parameter for parameter in may_have - have if parameter.requires_grad}

    @property
    def whole(self) -> Captured:
        """The same with a frozen part in the network where it comes from."""
        networks = {name: x for name, x in self.networks.items() if x.called_as == name}
        return replace(self, networks=networks)

    def layouts(self, placement: Placement) -> dict[NetworkName, NetworkLayout]:
        """The layout of each network whose calls go through the pipeline."""
        return {
            name: NetworkLayout(
                placement.ranks[name],
                len(self.plan.calls_of(network.called_as)),
                placement.num_microbatches,
                network.output_stages(placement.cuts[name]),
            )
            for name, network in self.networks.items()
        }


def values_of_teacher(plan: StepPlan) -> list[tuple[int, ValueRef]]:
    """The values of the teacher's calls that a step uses."""
    return [(call, ref) for call in plan.calls_of("teacher") for ref in plan.route(call).used]


def network_of(op: Op) -> NetworkName:
    """The network on whose stages an op works."""
    return "teacher" if op is Op.TEACHER else "student"


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
        start: Samples of the call in the micro-batches before.
        size: Samples; 0 for a micro-batch that a small batch leaves empty.
        chain: The way that it takes.
        grad: Whether it has a backward.
        shapes: What flows; None if it is empty.
        is_only: Whether it is the whole call.
    """

    call: int
    start: int
    size: int
    chain: RouteChain
    grad: bool
    shapes: UnitShapes | None
    is_only: bool

    @property
    def end(self) -> int:
        """One after the last atom that it goes through."""
        return len(self.chain.atoms)


class StepUnits:
    """All units of a step with given call inputs.

    Args:
        captured: The captured step.
        placement: Where networks are cut, and into how many micro-batches their calls.
        inputs: Specs of the tensors that each call gets.
        known: What is behind so many atoms of a frozen part is known, and read where they end.

    Attributes:
        inputs: Specs of the tensors that each call gets.
        units: The units of each network.
        span: The atoms of its route that an action runs: first, and one after the last; if these
            are the same, it passes on what it gets, or runs nothing behind the end of its call.
        outputs: The values that a forward hands to the loss, in a fixed order, with their specs;
            a backward gets gradients of them.
        producers: The forwards that make one value of a call, micro-batch after micro-batch.
        input_specs: What a forward gets; nothing if it reads what is known.
        runs: Whether there is anything to do in an action: atoms to run, or something known to be
            read.
        payload: Specs of the tensors of a message; none if there is nothing to send.
    """

    def __init__(
        self,
        captured: Captured,
        placement: Placement,
        inputs: Sequence[Specs],
        known: int = 0,
    ) -> None:
        self._plan, self._networks = captured.plan, captured.networks
        self._cuts = placement.cuts
        self._known = known
        self._runs_again = bool(placement.recomputed)
        self.inputs = tuple(inputs)
        self.units: dict[NetworkName, tuple[Unit, ...]] = {
            name: tuple(
                unit
                for call in self._plan.calls_of(network.called_as)
                for unit in self._units_of(network, call, placement.num_microbatches)
            )
            for name, network in self._networks.items()
        }
        # Every step with the same inputs asks the same.
        self.span = cache(self._span)
        self.outputs = cache(self._outputs)
        self.producers = cache(self._producers)
        self.input_specs = cache(self._input_specs)
        self.runs = cache(self._runs)
        self.payload = cache(self._payload)

    def _units_of(self, network: ChainNetwork, index: int, num_microbatches: int) -> Iterator[Unit]:
        call, specs = self._plan.calls[index], self.inputs[index]
        grad = call.grad and network.called_as == network.name  # a frozen part has no backward
        shapes = [spec.shape for spec in specs]
        if not all(shape and shape[0] == shapes[0][0] for shape in shapes):
            raise ConfigurationError(
                f"call {index} of the step gets tensors of shapes {shapes}: the first dimension of "
                "each must be the batch. Make the others in the network"
            )
        sizes, chain = split_sizes(shapes[0][0], num_microbatches), network.routes[call.route]
        filled = sum(size > 0 for size in sizes)
        if filled > 1:
            _check_divisible(chain)
        if filled > 1 or (grad and self._runs_again):
            _check_written(chain)
        for microbatch, size in enumerate(sizes):
            start, flow = sum(sizes[:microbatch]), None
            if size:
                if filled > 1:
                    _check_batched(chain, specs, size, grad=grad)
                flow = chain.shapes(*of_samples(specs, size), grad=grad)
            yield Unit(index, start, size, chain, grad, flow, is_only=filled == 1)

    def of(self, action: Action) -> Unit:
        """The unit of an action."""
        assert action.unit is not None
        return self.units[network_of(action.op)][action.unit]

    def _span(self, action: Action) -> tuple[int, int]:
        cuts, unit = self._cuts[network_of(action.op)], self.of(action)
        if unit.shapes is None:
            return unit.end, unit.end
        start, stop = (unit.chain.positions[cut] for cut in cuts[action.stage : action.stage + 2])
        goes_on = self._goes_on_at(action)
        if goes_on == action.stage:
            return unit.chain.positions[self._known], stop
        if goes_on is not None and action.stage < goes_on:
            return unit.end, unit.end  # before what is known
        return start, stop

    def _runs(self, action: Action) -> bool:
        if network_of(action.op) not in self.units:
            return True  # of heads, which are no chain of atoms
        return self.span(action)[0] < self.of(action).end or self.reads_known(action)

    def reads_known(self, action: Action) -> bool:
        """Whether it is the stage of a frozen part where what is known goes on."""
        return self._goes_on_at(action) == action.stage

    def _goes_on_at(self, action: Action) -> int | None:
        """The stage of a frozen part that reads what is known; None if nothing is."""
        name = network_of(action.op)
        if not self._known or self._networks[name].called_as == name:
            return None
        cuts = self._cuts[name]
        within = (stage for stage, stop in enumerate(cuts[1:]) if self._known < stop)
        return next(within, len(cuts) - 2)

    def microbatches_at(self, action: Action) -> dict[int, int]:
        """For each call, in order, how many of its micro-batches run at the action's stage."""
        counts: dict[int, int] = {}
        for index, unit in enumerate(self.units[network_of(action.op)]):
            if self.runs(Action(action.op, action.stage, index)):
                counts[unit.call] = counts.get(unit.call, 0) + 1
        return counts

    def _outputs(self, action: Action) -> dict[ValueRef, TensorSpec]:
        shapes, (first, last) = self.of(action).shapes, self.span(action)
        if shapes is None:
            return {}
        refs = self.of(action).chain.outputs_between(first, last)
        return {ref: shapes.outputs[ref] for ref in refs if ref in shapes.outputs}

    def _producers(self, call: int, ref: ValueRef) -> tuple[Action, ...]:
        return tuple(action for action in self._forwards_of(call) if ref in self.outputs(action))

    def _forwards_of(self, call: int) -> Iterator[Action]:
        called = self._plan.calls[call].network
        for op in (Op.TEACHER, Op.FORWARD):
            name = network_of(op)
            if name not in self._networks or self._networks[name].called_as != called:
                continue
            for index, unit in enumerate(self.units[name]):
                if unit.call == call:
                    for stage in range(len(self._cuts[name]) - 1):
                        yield Action(op, stage, index)

    def loss_gradients(self, call: int) -> Iterator[tuple[Action, dict[ValueRef, TensorSpec]]]:
        """The backwards that get gradients of one call's outputs, and of which."""
        for action in self._forwards_of(call):
            if action.op is Op.FORWARD and self.outputs(action):
                backward = Action(Op.BACKWARD, action.stage, action.unit)
                yield backward, _trained(self.outputs(action))

    def no_gradients(self, action: Action) -> list[None]:
        """In the place of gradients of what a backward's forward passed on, if nobody gives any."""
        unit, (_, last) = self.of(action), self.span(action)
        assert unit.shapes is not None
        passed = unit.shapes.boundaries[last] if last < unit.end else ()
        return [None for spec in passed if spec.requires_grad]

    def _input_specs(self, action: Action) -> Specs:
        unit, (first, _) = self.of(action), self.span(action)
        if unit.shapes is None or first >= unit.end or self.reads_known(action):
            return ()
        return unit.shapes.boundaries[first]

    def _payload(self, message: Message) -> Specs:
        if message.payload in {"input", "activation"}:
            return self.input_specs(message.consumer)
        if message.payload == "output":
            return tuple(self.outputs(message.producer).values())
        if message.payload == "batch":  # its fields travel by themselves
            return ()
        assert message.payload == "gradient"
        if not self.of(message.consumer).grad:
            return ()
        if message.producer.op is Op.LOSS:
            return tuple(_trained(self.outputs(message.consumer)).values())
        return tuple(spec for spec in self.input_specs(message.producer) if spec.requires_grad)


def _trained(specs: Mapping[ValueRef, TensorSpec]) -> dict[ValueRef, TensorSpec]:
    return {ref: spec for ref, spec in specs.items() if spec.requires_grad}


def _check_divisible(chain: RouteChain) -> None:
    """Refuse micro-batches of what belongs to all samples: tensors, and numbers in between."""
    bound = [kind.shape for kind in chain.route.arguments.tensors if kind.is_bound]
    if bound:
        raise UndividedError(
            f"{chain.route.entries[0].title!r} is given a tensor that is made of the batch and has "
            f"no row for each sample, of shape {bound[0]}",
            "Use TSPipeStrategy(num_microbatches=1), or make that tensor in the network",
        )
    given = [(entry, value) for entry in chain.route.entries for value in entry.values]
    for entry, value in given:
        if isinstance(value, Glue) and not value.is_divisible:
            raise UndividedError(
                f"what {entry.title!r} gets is computed with the number of samples, {value}, and "
                "would be another one for each micro-batch",
                "Use TSPipeStrategy(num_microbatches=1), or compute it in the loss",
            )


def _check_written(chain: RouteChain) -> None:
    """Refuse to run a forward several times that changes buffers, but those of BatchNorm."""
    deferred = (module.buffers(recurse=False) for module in chain.modules if is_deferred(module))
    known = {id(buffer) for buffers in deferred for buffer in buffers}
    for name, call in chain.program.written.items():
        if call.context.region or id(chain.program.module.get_buffer(name)) not in known:
            raise UndividedError(
                f"the forward changes the buffer {name!r}, at {call.line}, "
                "which would happen with each micro-batch, and with each forward that runs again",
                "Use TSPipeStrategy(num_microbatches=1) without activation_checkpointing, or "
                "change the buffer in a hook",
            )


def _check_batched(chain: RouteChain, specs: Specs, size: int, *, grad: bool) -> None:
    """Refuse a call with outputs that those of its micro-batches, one after the other, are not.

    Args:
        chain: Its way.
        specs: What it gets.
        size: Samples of a micro-batch.
        grad: Whether it takes part in the backward.
    """
    samples = specs[0].shape[0]
    whole = chain.shapes(*of_samples(specs, samples), grad=grad)
    try:
        part = chain.shapes(*of_samples(specs, size), grad=grad)
    except Exception as error:  # whatever a network raises: BatchNorm, say, needs several values
        raise UndividedError(
            f"{chain.route.entries[0].title!r} can't run with micro-batches of {size} of "
            f"{samples} samples: {error}",
            "Use TSPipeStrategy(num_microbatches=1); or, if it is the last batch, drop_last=True",
        ) from error
    tape = chain.program.first.tape
    for ref, leaf in zip(chain.route.used, tape.leaves, strict=False):
        (rows, *sizes), (all_rows, *all_sizes) = (
            each.outputs[ref].shape or (0,) for each in (part, whole)
        )
        is_joined = sizes == all_sizes and rows * samples == all_rows * size > 0
        if not is_joined or (rows != size and not tape.is_flattened(leaf)):
            raise UndividedError(
                f"an output of {chain.route.entries[ref.position].title!r} has shape "
                f"{part.outputs[ref].shape} for {size} samples, made at "
                f"{tape.line_of(leaf)}: micro-batches of it can't be put together",
                "Return it with the samples as its first dimension, or use "
                "TSPipeStrategy(num_microbatches=1)",
            )
