"""A way that calls take through networks, as a chain of atoms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_tspipe.capture.plan import Expression, Input, Route, Specs, TensorSpec, ValueRef
from lightning_tspipe.errors import PartitionError
from lightning_tspipe.networks import swap
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.networks.fakes import Fakes
from lightning_tspipe.networks.hooks import noted
from lightning_tspipe.networks.modules import outermost
from lightning_tspipe.networks.program import Atom, OutputRef, Program, Ran, Variant
from lightning_tspipe.networks.tape import Value
from lightning_tspipe.random_states import random_stream
from lightning_tspipe.replacing import Settings, settings_applied

Run = Callable[[Tensors, int, int], Ran]
"""Runs the atoms from one up to, not including, another one; as ``Program.run``."""


class _Holder(nn.Module):
    """Holds the networks of a route under the names that they have in the LightningModule."""


class _RouteModule(_Holder):
    """A route as a module, to be recorded.

    Args:
        module: The LightningModule.
        route: The route.
    """

    def __init__(self, module: nn.Module, route: Route) -> None:
        super().__init__()
        self.route = route
        for name in outermost(entry.name for entry in route.entries):
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:  # noqa: SLF001 - names may be numbers
                    owner.add_module(part, _Holder())
                owner = owner.get_submodule(part)
            owner.add_module(last, module.get_submodule(name))

    @property
    def entries(self) -> dict[nn.Module, str]:
        """What the step calls or has hooks on, and its names."""
        names = (name for entry in self.route.entries for name in entry.heard)
        return {self.get_submodule(name): name for name in names}

    @property
    def settings(self) -> Settings:
        """What the step sets of its parts for the call."""
        own = (each for entry in self.route.entries for each in entry.settings)
        return {(self.get_submodule(part), name): value for part, name, value in own}

    def forward(self, *given: Tensor) -> Any:
        """Call the entries, one after the other; what the step reads of it."""
        results: list[list[Any]] = []
        rows = self.route.arguments.rows(dict(enumerate(given)))
        for entry in self.route.entries:
            tensors = [_evaluated(value, given, results, rows) for value in entry.values]
            args, kwargs = entry.arguments.bind(tensors)
            owner = self.get_submodule(entry.name)
            called = owner if entry.method == "forward" else getattr(owner, entry.method)
            hooked = list(map(owner.get_submodule, entry.hooked))
            with torch.set_grad_enabled(entry.grad), entry.context(), noted(hooked) as notes:
                returned = called(*args, **kwargs)
            if notes.modules != hooked:
                raise PartitionError(
                    f"{entry.name!r} calls the parts that have hooks ({', '.join(entry.hooked)}) "
                    "in another order than when the step was traced. Return what the hooks keep "
                    "from forward, with the output"
                )
            results.append(pytree.tree_leaves((returned, notes.given)))
        found = [results[ref.position][ref.slot] for ref in self.route.used]
        found = found or [leaf for leaf in results[-1] if isinstance(leaf, Tensor)]
        return found[0] if len(found) == 1 else tuple(found)


def _evaluated(
    value: Expression, given: Sequence[Tensor], results: Sequence[Sequence[Any]], rows: Any
) -> Tensor:
    if isinstance(value, Input):
        return given[value.place]
    if isinstance(value, ValueRef):
        found: Tensor = results[value.position][value.slot]
        return found
    tensors = [_evaluated(each, given, results, rows) for each in value.values]
    with torch.set_grad_enabled(value.grad):
        made: Tensor = value.function(*tensors, rows=rows)
        return made


@dataclass(frozen=True)
class UnitShapes:
    """What flows when one unit goes through a route.

    Attributes:
        boundaries: Specs of what passes in front of each atom, and behind the last; none behind
            the end, or where nothing passes on.
        outputs: Specs of the values that the step uses.
    """

    boundaries: tuple[Specs, ...]
    outputs: dict[ValueRef, TensorSpec]

    def sized(self, variant: Variant, used: Sequence[ValueRef], samples: int) -> UnitShapes:
        """The same for another number of samples.

        Args:
            variant: What the route runs.
            used: The values that it returns, in order.
            samples: How many.
        """

        def sized(spec: TensorSpec, value: Value) -> TensorSpec:
            return replace(spec, shape=value.shape(samples))

        begins = zip(self.boundaries[:-1], variant.cuts[:-1], strict=True)
        leaves = dict(zip(used, variant.tape.leaves, strict=False))
        return UnitShapes(
            (*(tuple(map(sized, specs, cut.live)) for specs, cut in begins), ()),
            {ref: sized(spec, leaves[ref]) for ref, spec in self.outputs.items()},
        )


def of_samples(specs: Specs, size: int) -> Specs:
    """What a call gets, for another number of samples."""
    return tuple(
        replace(spec, shape=(size, *spec.shape[1:]), requires_grad=False) for spec in specs
    )


@dataclass(eq=False)
class RouteChain:
    """The atoms of a route, which run.

    Attributes:
        route: The way.
        device: Where it runs.
        modules: The networks that it goes through, and all that are in them.
        program: What is recorded of it.
        atoms: Its atoms; parameter names are those of the LightningModule.
        refs: The values that the step uses, and where atoms give them.
        context: The precision plugin's forward context.
        positions: Where the network's atoms begin in it: for each of those, and behind the last
            one, how many of its own lie before.
    """

    route: Route
    device: torch.device
    modules: Sequence[nn.Module]
    program: Program
    atoms: tuple[Atom, ...]
    refs: Mapping[ValueRef, OutputRef]
    context: Callable[[], AbstractContextManager[None]] = nullcontext
    positions: tuple[int, ...] = ()
    _shapes: dict[tuple[Specs, bool, object], UnitShapes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._values = {output: ref for ref, output in self.refs.items()}
        self._parameters = [p for module in self.modules for p in module.parameters(recurse=False)]

    @classmethod
    def of(
        cls,
        route: Route,
        name: str,
        module: nn.Module,
        device: torch.device,
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> RouteChain:
        """The chain of a route.

        Args:
            route: The way.
            name: What messages call it.
            module: The LightningModule.
            device: Where it runs.
            context: The precision plugin's forward context.
        """
        root = _RouteModule(module, route)
        program = Program(root, name, route.arguments, device, root.entries, root.settings)
        refs = dict(zip(route.used, program.outputs, strict=False))
        atoms = _named(program.atoms, root, module)
        return cls(route, device, list(root.modules()), program, atoms, refs, context)

    @property
    def written(self) -> list[Tensor]:
        """The buffers that a forward changes."""
        return [self.program.module.get_buffer(name) for name in self.program.written]

    @property
    def version(self) -> object:
        """What the shapes in it depend on beside the input, and hooks may change between steps."""
        return tuple(parameter.requires_grad for parameter in self._parameters), self.recorded

    @property
    def recorded(self) -> int:
        """Which of the recordings is for the network as it is now."""
        with self.context():
            return self.program.version

    @property
    def may_be_trained(self) -> bool:
        """Whether gradients would flow into what is now to be trained, if a step called it."""
        if not any(entry.grad for entry in self.route.entries):
            return False
        with settings_applied(self.program.settings):
            return any(parameter.requires_grad for parameter in self._parameters)

    def parameters_behind(self, refs: Iterable[ValueRef]) -> set[nn.Parameter]:
        """The parameters of which some of the used values are made."""
        tape = self.program.first.tape
        leaves = dict(zip(self.route.used, tape.leaves, strict=False))
        found = {name for ref in refs if ref in leaves for name in tape.behind(leaves[ref])}
        of_name = dict(self.program.module.named_parameters(remove_duplicate=False))
        return {of_name[name] for name in found if name in of_name}

    def begins(self, other: RouteChain) -> bool:
        """Whether its atoms are the first of another route."""
        own, others = self.atoms, other.atoms[: len(self.atoms)]
        return [(a.name, a.parameter_names) for a in own] == [
            (a.name, a.parameter_names) for a in others
        ]

    def own(self, atoms: Iterable[int]) -> frozenset[int]:
        """Its atoms that lie in some of the network's."""
        begin = self.positions
        return frozenset(own for atom in atoms for own in range(begin[atom], begin[atom + 1]))

    def outputs_between(self, start: int, stop: int) -> tuple[ValueRef, ...]:
        """The used values that atoms from ``start`` up to ``stop`` emit."""
        return tuple(ref for ref, out in self.refs.items() if start <= out.atom < stop)

    def run(
        self, received: Tensors, start: int, stop: int, *, grad: bool, run: Run | None = None
    ) -> tuple[Tensors, dict[ValueRef, Tensor]]:
        """Run some atoms.

        Args:
            received: What atom ``start`` gets.
            start: The first atom.
            stop: One after the last; the first one where the call only passes.
            grad: Whether the call takes part in the backward; entries that the step ran under
                ``no_grad`` never do.
            run: Runs a range, if not :attr:`program`.
        """
        with torch.set_grad_enabled(grad):
            if start == stop:  # not the stage's own inputs, which are leaves of its graph
                return tuple(tensor.view_as(tensor) for tensor in received), {}
            values, found = (run or self.program.run)(received, start, stop)
        # Of a call that the step reads nothing of, something is returned nevertheless.
        used = ((self._values.get(output), tensor) for output, tensor in found.items())
        return values, {ref: tensor for ref, tensor in used if ref is not None}

    def run_whole(self, *inputs: Tensor) -> None:
        """Run all atoms, for what happens meanwhile."""
        self.program.run(inputs, 0, len(self.atoms))

    def shapes(self, *inputs: TensorSpec, grad: bool) -> UnitShapes:
        """What flows when inputs of the given specs go through."""
        key = inputs, grad, self.version
        if key not in self._shapes:
            self._shapes[key] = self._as_of_others(*key) or self._run_on_fakes(inputs, grad=grad)
        return self._shapes[key]

    def _as_of_others(self, inputs: Specs, grad: bool, version: object) -> UnitShapes | None:
        """What flows if that is known for another number of samples: only sizes differ.

        Of one sample, or none, tensors may lie in another order in memory.
        """
        samples = inputs[0].shape[0]
        for (others, *rest), known in self._shapes.items():
            alike = rest == [grad, version] and of_samples(others, samples) == inputs
            if not alike or min(samples, others[0].shape[0]) < 2:
                continue
            with self.context(), settings_applied(self.program.settings):
                variant = self.program.known(0, inputs)
            if variant is not None and variant.tape.batch is None and variant.takes(0, others):
                return known.sized(variant, self.route.used, samples)
        return None

    def _run_on_fakes(self, inputs: Specs, *, grad: bool) -> UnitShapes:
        """What flows when tensors without values go through."""
        fake = Fakes(self.device)

        def make(tensor: Tensor) -> Tensor:
            with fake:
                return TensorSpec.of(tensor).empty(self.device)

        boundaries: list[Specs] = []
        outputs: dict[ValueRef, TensorSpec] = {}
        with swap.without_values(self.modules, make), random_stream(None):
            with fake:
                values: Tensors = tuple(spec.empty(self.device) for spec in inputs)
            with fake, self.context():
                for atom in range(len(self.atoms)):
                    boundaries.append(tuple(map(TensorSpec.of, values)))
                    values, found = self.run(values, atom, atom + 1, grad=grad)
                    outputs |= {ref: TensorSpec.of(tensor) for ref, tensor in found.items()}
        return UnitShapes((*boundaries, ()), outputs)


def _named(atoms: Sequence[Atom], root: nn.Module, module: nn.Module) -> tuple[Atom, ...]:
    """Atoms with the names that a module has for what they read."""
    names = {id(tensor): name for name, tensor in module.named_parameters()}
    names |= {id(tensor): name for name, tensor in module.named_buffers()}
    return tuple(
        replace(
            atom,
            module=module,
            parameter_names=tuple(names[id(root.get_parameter(n))] for n in atom.parameter_names),
            buffer_names=tuple(names[id(root.get_buffer(n))] for n in atom.buffer_names),
        )
        for atom in atoms
    )
