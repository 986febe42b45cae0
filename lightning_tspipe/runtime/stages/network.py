"""A network as the step uses it: blocks and glue as one chain of atoms, cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_tspipe.capture.plan import (
    Block,
    Glue,
    Interception,
    Link,
    NetworkName,
    StepPlan,
    TensorSpec,
    ValueRef,
)
from lightning_tspipe.capture.provenance import DrawCounter
from lightning_tspipe.errors import PartitionError
from lightning_tspipe.networks import swap
from lightning_tspipe.networks.atoms import AtomChain, Atomized, OutputRef, atomize, concatenate
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.networks.program import Atom, function_atom

Ran = tuple[Tensors, dict[OutputRef, Tensor]]
Run = Callable[[Tensors, int, int], Ran]
"""Runs the atoms from one up to, not including, another one; as ``AtomChain.run``."""


@dataclass(frozen=True)
class UnitShapes:
    """What flows when one unit goes through a chain.

    Attributes:
        boundaries: Specs of what passes in front of each atom, and behind the last; none behind
            the end of the call, or where nothing passes on.
        outputs: Specs of the values that the step uses.
    """

    boundaries: tuple[tuple[TensorSpec, ...], ...]
    outputs: dict[ValueRef, TensorSpec]


@dataclass(eq=False)
class ChainNetwork:
    """One network of a captured step.

    Attributes:
        name: ``student`` or ``teacher``.
        called_as: The network whose calls go through it: another one for a frozen part.
        module: The LightningModule.
        device: Where it runs.
        links: What the step calls one after the other.
        chain: Its atoms, which run; parameter names are those of the LightningModule.
        ends: For each link, one after its last atom.
        refs: The values that the step uses, and where atoms give them.
        context: The precision plugin's forward context.
        blocks: The declared submodules, by name.
        modules: These and all that are in them.
        wanted: The outputs of atoms that the step uses.
    """

    name: NetworkName
    called_as: NetworkName
    module: nn.Module
    device: torch.device
    links: tuple[Link, ...]
    chain: AtomChain
    ends: tuple[int, ...]
    refs: Mapping[ValueRef, OutputRef]
    context: Callable[[], AbstractContextManager[None]] = nullcontext

    def __post_init__(self) -> None:
        self.blocks = {name: self.module.get_submodule(name) for name in self.block_names}
        self.modules = [module for block in self.blocks.values() for module in block.modules()]
        self.wanted = frozenset(self.refs.values())
        self._grads: list[bool] = []
        for link, end in zip(self.links, self.ends, strict=True):
            grad = link.grad if isinstance(link, Block) else True
            self._grads += [grad] * (end - len(self._grads))
        self._values = {output: ref for ref, output in self.refs.items()}
        self._parameters = [p for module in self.modules for p in module.parameters(recurse=False)]
        self._shapes: dict[tuple[TensorSpec, int, bool, tuple[bool, ...]], UnitShapes] = {}

    @classmethod
    def of(
        cls,
        name: NetworkName,
        module: nn.Module,
        plan: StepPlan,
        device: torch.device,
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> ChainNetwork:
        """The network that a captured step calls by a name."""
        links = plan.chains[name]
        first_seen: dict[int, Interception] = {}
        for interception in plan.interceptions:
            if plan.calls[interception.call].network == name:
                first_seen.setdefault(interception.position, interception)
        atoms, outputs, ends = concatenate([_piece(module, link) for link in links])
        refs: dict[ValueRef, OutputRef] = {}
        for ref in plan.used[name]:
            leaves = first_seen[ref.position].leaves
            index = sum(isinstance(leaf, TensorSpec) for leaf in leaves[: ref.slot])
            refs[ref] = outputs[ref.position][index]
        chain = AtomChain(atoms, wanted=frozenset(refs.values()))
        return cls(name, name, module, device, tuple(links), chain, ends, refs, context)

    @property
    def atoms(self) -> tuple[Atom, ...]:
        """Its atoms."""
        return self.chain.atoms

    @property
    def block_names(self) -> tuple[str, ...]:
        """The declared submodules of the chain."""
        return tuple(link.name for link in self.links if isinstance(link, Block))

    def parameter_shapes(self, atom: int) -> list[tuple[int, ...]]:
        """Shapes of the parameters of an atom."""
        names = self.atoms[atom].parameter_names
        return [tuple(self.module.get_parameter(name).shape) for name in names]

    def num_bytes(self, atom: int, names: Collection[str]) -> int:
        """Bytes of an atom's parameters and buffers, of those that are named."""
        read = (*self.atoms[atom].parameter_names, *self.atoms[atom].buffer_names)
        return sum(attrgetter(name)(self.module).nbytes for name in read if name in names)

    def cuts_like(
        self, other: ChainNetwork, cuts: Sequence[int], followed: Mapping[str, str]
    ) -> tuple[int, ...] | None:
        """Where to cut this chain so that each stage holds what it holds of another chain already.

        Args:
            other: A chain over the same module.
            cuts: First atom of each stage of ``other``, and its number of atoms.
            followed: Tensors of this chain, and those of ``other`` that they lie with.

        Returns:
            The same for this chain, whose last stages may be empty; None where it uses something
            that ``other`` does not, uses it in another order, or does not begin in the first stage.
        """
        mine, others = [str(link) for link in self.links], [str(link) for link in other.links]
        if mine == others[: len(mine)]:
            return tuple(min(cut, len(self.atoms)) for cut in cuts)
        stage_of = {
            name: _stage_of(index, cuts)
            for index, atom in enumerate(other.atoms)
            for name in (*atom.parameter_names, *atom.buffer_names)
        }
        stages = [0]
        for atom in self.atoms:
            names = (*atom.parameter_names, *atom.buffer_names)
            own = {stage_of.get(followed.get(name, name)) for name in names} or {stages[-1]}
            stage = own.pop()
            if own or stage is None or stage - stages[-1] not in {0, 1}:
                return None
            stages.append(stage)
        num_stages = len(cuts) - 1
        starts = (sum(stage < start for stage in stages[1:]) for start in range(num_stages))
        return (*starts, len(self.atoms))

    def end_of(self, num_links: int) -> int:
        """One after the last atom of a call with so many links."""
        return self.ends[num_links - 1]

    def output_stages(self, cuts: Sequence[int]) -> frozenset[int]:
        """The stages that emit something that the step uses, and the last; a frozen one need not.

        Args:
            cuts: First atom of each stage, and the number of atoms.
        """
        atoms = [output.atom for output in self.refs.values() if output.atom < cuts[-1]]
        last = {len(cuts) - 2} if self.called_as == self.name else set()
        return frozenset({_stage_of(atom, cuts) for atom in atoms} | last)

    def outputs_between(self, start: int, stop: int) -> tuple[ValueRef, ...]:
        """The used values that atoms from ``start`` up to ``stop`` emit."""
        return tuple(ref for ref, out in self.refs.items() if start <= out.atom < stop)

    def run(  # noqa: PLR0913 - which atoms, and how they run
        self,
        received: Tensors,
        start: int,
        stop: int,
        *,
        grad: bool,
        run: Run | None = None,
        place: tuple[int, slice] | None = None,  # noqa: ARG002
    ) -> tuple[Tensors, dict[ValueRef, Tensor]]:
        """Run some atoms.

        Args:
            received: What atom ``start`` gets.
            start: The first atom.
            stop: One after the last.
            grad: Whether the call takes part in the backward; links that the step ran under
                ``no_grad`` never do.
            run: Runs a range, if not :attr:`chain`.
            place: The batch, and the rows in it, of which a frozen part may know something.
        """
        outputs: dict[ValueRef, Tensor] = {}
        values = received
        for first, last, link_grad in stretches(start, stop, self._grads.__getitem__):
            with torch.set_grad_enabled(grad and link_grad):
                values, found = (run or self.chain.run)(values, first, last)
            outputs |= {self._values[output]: tensor for output, tensor in found.items()}
        return values, outputs

    @property
    def trained(self) -> tuple[bool, ...]:
        """Which of its parameters are trained now: hooks may freeze some, and free them again."""
        return tuple(parameter.requires_grad for parameter in self._parameters)

    def shapes(self, spec: TensorSpec, num_links: int, *, grad: bool) -> UnitShapes:
        """What flows when an input of the given spec goes through; found on fake tensors."""
        key, end = (spec, num_links, grad, self.trained), self.end_of(num_links)
        if key in self._shapes:
            return self._shapes[key]
        fake = FakeTensorMode(allow_non_fake_inputs=True)

        def make(tensor: Tensor) -> Tensor:
            with fake:
                return TensorSpec.of(tensor).empty(self.device)

        boundaries: list[tuple[TensorSpec, ...]] = [()] * (len(self.atoms) + 1)
        outputs: dict[ValueRef, TensorSpec] = {}
        with swap.TensorSwap(self.modules, make)(), swap.random_stream(None):
            with fake:
                values: Tensors = (spec.empty(self.device),)
            with fake, self.context():
                boundaries[0] = (spec,)
                for atom in range(end):
                    values, found = self.run(values, atom, atom + 1, grad=grad)
                    outputs |= {ref: TensorSpec.of(tensor) for ref, tensor in found.items()}
                    if atom + 1 < end:
                        boundaries[atom + 1] = tuple(map(TensorSpec.of, values))
        self._shapes[key] = UnitShapes(tuple(boundaries), outputs)
        return self._shapes[key]

    def draws(self, plan: StepPlan) -> bool:
        """Whether a step draws random numbers in it."""

        def run(x: Tensor) -> None:
            self.chain.run((x,), 0, len(self.atoms))

        calls = plan.calls_of(self.called_as)
        return any(draws(self.modules, run, plan.calls[index].input) for index in calls)

    def check_cuts(self, cuts: Sequence[int]) -> None:
        """Refuse cuts that separate the uses of one parameter.

        Raises:
            PartitionError: A parameter is used by two stages.
        """
        seen: dict[int, tuple[str, int]] = {}
        for index, atom in enumerate(self.atoms):
            stage = _stage_of(index, cuts)
            for name in atom.parameter_names:
                key = id(self.module.get_parameter(name))
                other, where = seen.setdefault(key, (name, stage))
                if where != stage:
                    raise PartitionError(
                        f"parameter {name!r} (tied to {other!r}) is used in stages {where} and "
                        f"{stage} of the {self.name}. Untie it, or choose a partition that keeps "
                        "its uses in one stage: TSPipeStrategy(partition=[...])"
                    )


def draws(modules: Iterable[nn.Module], run: Callable[[Tensor], object], spec: TensorSpec) -> bool:
    """Whether a forward draws random numbers, such as those of dropout; found on shapes.

    Where it does, it matters which rank runs what.

    Args:
        modules: All that it runs, in the modes in which they will run.
        run: The forward.
        spec: Its input.

    Returns:
        Also True of a forward that can't be run without values.
    """
    found = DrawCounter()
    try:
        with swap.TensorSwap(list(modules), swap.meta_like)(), swap.random_stream(None), found:
            run(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
    except Exception:  # noqa: BLE001 - what a network does without values can't be foreseen
        return True
    return found.count > 0


def stretches(start: int, stop: int, is_so: Callable[[int], bool]) -> list[tuple[int, int, bool]]:
    """A range of atoms in pieces of which all atoms are so, or none is.

    >>> stretches(0, 5, {1, 2}.__contains__)
    [(0, 1, False), (1, 3, True), (3, 5, False)]
    """
    groups = [(kind, list(atoms)) for kind, atoms in groupby(range(start, stop), is_so)]
    return [(atoms[0], atoms[-1] + 1, kind) for kind, atoms in groups]


def _piece(module: nn.Module, link: Link) -> tuple[str, Atomized]:
    """The atoms of a link, and the prefix of the names in them."""
    if isinstance(link, Glue):
        return "", Atomized((function_atom(link.function, link.label),))
    return link.name, atomize(module.get_submodule(link.name), link.name, link.arguments)


def _stage_of(atom: int, cuts: Sequence[int]) -> int:
    return next(stage for stage in range(len(cuts) - 1) if atom < cuts[stage + 1])
