"""A network as the step uses it: one chain of atoms, cut into stages, and the ways through it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType

import torch
from torch import Tensor, nn

from lightning_tspipe.capture.plan import NetworkName, StepPlan, TensorSpec, ValueRef
from lightning_tspipe.errors import PartitionError
from lightning_tspipe.networks import swap
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.networks.modules import outermost
from lightning_tspipe.networks.operations import Operations
from lightning_tspipe.networks.program import Atom
from lightning_tspipe.planning.merging import merged, numbered
from lightning_tspipe.random_states import random_stream
from lightning_tspipe.replacing import TensorSwap
from lightning_tspipe.runtime.stages.routes import RouteChain, Run


@dataclass(eq=False)
class ChainNetwork:
    """What of a captured step is trained, or what is forward-only: one or more user's networks.

    Attributes:
        name: ``student`` or ``teacher``.
        called_as: The network whose calls go through it: another one for a frozen part.
        module: The LightningModule.
        routes: The ways that the step's calls take.
        atoms: What is cut into stages: the atoms of a route of which the others are beginnings,
            else cells of the atoms of all.
        lies_with_student: Whether each atom of a teacher is to lie where the student's lies that
            has the same place.
        blocks: The submodules that the step calls, by name.
        modules: These and all that are in them.
    """

    name: NetworkName
    called_as: NetworkName
    module: nn.Module
    routes: tuple[RouteChain, ...]
    atoms: tuple[Atom, ...]
    lies_with_student: bool = False

    def __post_init__(self) -> None:
        names = (entry.name for chain in self.routes for entry in chain.route.entries)
        self.blocks = {name: self.module.get_submodule(name) for name in outermost(names)}
        self.modules = [module for block in self.blocks.values() for module in block.modules()]

    @property
    def longest(self) -> RouteChain:
        """The route of the most atoms."""
        return max(self.routes, key=lambda chain: len(chain.atoms))

    @property
    def follows_one_route(self) -> bool:
        """Whether all routes are beginnings of one, whose atoms are its own."""
        return self.atoms is self.longest.atoms

    @property
    def block_names(self) -> tuple[str, ...]:
        """The submodules that the step calls."""
        return tuple(self.blocks)

    def parameter_shapes(self, atom: int) -> list[tuple[int, ...]]:
        """Shapes of the parameters of an atom."""
        return [tuple(parameter.shape) for parameter in self.atoms[atom].parameters()]

    def num_bytes(self, atom: int, names: Collection[str]) -> int:
        """Bytes of an atom's parameters and buffers, of those that are named."""
        own = self.atoms[atom]
        pairs = zip(own.tensor_names, own.tensors(), strict=True)
        return sum(tensor.nbytes for name, tensor in pairs if name in names)

    def cuts_like(
        self, other: ChainNetwork, cuts: Sequence[int], followed: Mapping[str, str]
    ) -> tuple[int, ...] | None:
        """Where to cut this chain so that each stage holds what it holds of another chain already.

        Args:
            other: A chain over the same module.
            cuts: First atom of each stage of ``other``, and its number of atoms.
            followed: Tensors of this chain, and those of ``other`` that they lie with.

        Returns:
            The same for this chain, of which stages may be empty; None where it uses something
            that ``other`` does not, or uses it in another order.
        """
        mine, others = ([str(chain.route) for chain in each.routes] for each in (self, other))
        # In another mode, the same routes may have other atoms.
        if mine == others and [atom.parameter_names for atom in self.atoms] == [
            atom.parameter_names for atom in other.atoms
        ]:
            return tuple(cuts)
        stages_of: dict[str, set[int]] = defaultdict(set)
        for index, atom in enumerate(other.atoms):
            for name in atom.tensor_names:
                stages_of[name].add(_stage_of(index, cuts))
        stages = [0]
        for atom in self.atoms:
            holds = [stages_of[followed.get(name, name)] for name in atom.tensor_names]
            own = set.intersection(*holds) if holds else {stages[-1]}
            stage = min((each for each in own if each >= stages[-1]), default=None)
            if stage is None:
                return None
            stages.append(stage)
        num_stages = len(cuts) - 1
        starts = (sum(stage < start for stage in stages[1:]) for start in range(num_stages))
        return (*starts, len(self.atoms))

    def output_stages(self, cuts: Sequence[int]) -> frozenset[int]:
        """The stages that emit something that the step uses, and the last; a frozen one need not.

        Args:
            cuts: First atom of each stage, and the number of atoms.
        """
        found = {len(cuts) - 2} if self.called_as == self.name else set()
        for chain in self.routes:
            own = [chain.positions[cut] for cut in cuts]
            atoms = (output.atom for output in chain.refs.values() if output.atom < own[-1])
            found |= {_stage_of(atom, own) for atom in atoms}
        return frozenset(found)

    def run(  # noqa: PLR0913 - which atoms, and how they run
        self,
        chain: RouteChain,
        received: Tensors,
        start: int,
        stop: int,
        *,
        grad: bool,
        run: Run | None = None,
        place: tuple[int, slice] | None = None,  # noqa: ARG002
    ) -> tuple[Tensors, dict[ValueRef, Tensor]]:
        """Run some atoms of a route; see :meth:`RouteChain.run`.

        Args:
            chain: The route.
            received: What atom ``start`` gets.
            start: The first atom.
            stop: One after the last.
            grad: Whether the call takes part in the backward.
            run: Runs a range, if not the chain.
            place: The batch, and the rows in it, of which a frozen part may know something.
        """
        return chain.run(received, start, stop, grad=grad, run=run)

    def draws(self, plan: StepPlan) -> bool:
        """Whether a step draws random numbers in it."""
        return any(
            draws(self.modules, self.routes[call.route].run_whole, *call.inputs)
            for call in map(plan.calls.__getitem__, plan.calls_of(self.called_as))
        )

    def joined(self, *, ties: bool) -> dict[int, str]:
        """Atoms that must be on one stage with the next one, and what has one place around each.

        A buffer that the forward changes has, and a parameter of which copies would differ.

        Args:
            ties: Whether copies of a parameter in several stages are updated alike.
        """
        written = {id(buffer) for chain in self.routes for buffer in chain.written}
        first: dict[str, int] = {}
        found: dict[int, str] = {}
        for index, atom in enumerate(self.atoms):
            names = [n for n in atom.buffer_names if id(self.module.get_buffer(n)) in written]
            for name in (*names, *(() if ties else atom.parameter_names)):
                found |= dict.fromkeys(range(first.setdefault(name, index), index), name)
        return found

    def check_cuts(self, cuts: Sequence[int], *, ties: bool) -> None:
        """Refuse cuts between atoms that are :meth:`joined`.

        Args:
            cuts: First atom of each stage, and the number of atoms.
            ties: Whether copies of a parameter in several stages are updated alike.

        Raises:
            PartitionError: There is one.
        """
        joined = self.joined(ties=ties)
        for cut in (cut for cut in cuts[1:-1] if cut - 1 in joined):
            raise PartitionError(
                f"{joined[cut - 1]!r} is used on both sides of a cut of the {self.name}, in front "
                f"of atom {cut}. That is possible for a parameter that all ranks update at the "
                "same time, which those of schedule='1f1b' and of relayed blocks do not, and for "
                "no buffer that the forward changes. Use another module or another schedule, or a "
                "partition that keeps its uses in one stage: TSPipeStrategy(partition=[...])"
            )


def networks_of(
    module: nn.Module,
    plan: StepPlan,
    device: torch.device,
    context: Callable[[], AbstractContextManager[None]] = nullcontext,
    counterparts: Mapping[str, str] = MappingProxyType({}),
) -> dict[NetworkName, ChainNetwork]:
    """The networks of a captured step.

    Args:
        module: The LightningModule.
        plan: What the trace found.
        device: Where they run.
        context: The precision plugin's forward context.
        counterparts: Parameters of the teacher, and those of the student that they may be averages
            of; then both are to lie together.
    """
    routes: dict[NetworkName, list[RouteChain]] = {
        name: [RouteChain.of(route, name, module, device, context) for route in ways]
        for name, ways in plan.routes.items()
    }
    longest = {name: max(own, key=lambda c: len(c.atoms)) for name, own in routes.items()}
    together = _counterparts(module, routes, counterparts)
    if all(chain.begins(longest[name]) for name, own in routes.items() for chain in own):
        chains = {
            name: ChainNetwork(name, name, module, *_beginnings(own, longest[name]))
            for name, own in routes.items()
        }
        if not together or is_paired(chains["student"], chains["teacher"]):
            return chains
    groups = [list(routes)] if together else [[name] for name in routes]
    return {
        name: network
        for group in groups
        for name, network in _cells(module, {n: routes[n] for n in group}, together).items()
    }


def _beginnings(
    chains: Sequence[RouteChain], longest: RouteChain
) -> tuple[tuple[RouteChain, ...], tuple[Atom, ...]]:
    places = range(len(longest.atoms) + 1)
    routes = (
        replace(chain, positions=tuple(min(place, len(chain.atoms)) for place in places))
        for chain in chains
    )
    return tuple(routes), longest.atoms


def _counterparts(
    module: nn.Module,
    routes: Mapping[NetworkName, Sequence[RouteChain]],
    known: Mapping[str, str],
) -> dict[str, str]:
    """Of what a teacher reads, the parameters of the student that it has to lie with.

    A submodule of the teacher follows if all that it reads has a counterpart, or the shapes of what
    the student reads first.
    """
    read = {
        name: list(dict.fromkeys(n for c in own for atom in c.atoms for n in atom.parameter_names))
        for name, own in routes.items()
    }
    student, found = read.get("student", []), dict[str, str]()
    entries = (e.name for c in routes.get("teacher", ()) for e in c.route.entries)
    for block in outermost(entries):
        own = [name for name in read["teacher"] if f"{name}.".startswith(f"{block}.")]
        shapes = [[module.get_parameter(name).shape for name in names] for names in (own, student)]
        if all(known.get(name) in student for name in own):
            found |= {name: known[name] for name in own}
        elif shapes[0] == shapes[1][: len(own)] and not found:
            found |= dict(zip(own, student, strict=False))
    return found


def _cells(
    module: nn.Module,
    routes: Mapping[NetworkName, Sequence[RouteChain]],
    together: Mapping[str, str],
) -> dict[NetworkName, ChainNetwork]:
    """Networks whose atoms are cells; of a student and its teacher the same ones."""
    chains = [(name, chain) for name, own in routes.items() for chain in own]
    ways = [
        numbered([[together.get(n, n) for n in atom.parameter_names] for atom in chain.atoms])
        for _, chain in chains
    ]
    ranks = {name: rank for rank, (name, _) in enumerate(module.named_parameters())}
    cells, positions = merged(ways, ranks)
    placed = [
        (name, replace(chain, positions=own))
        for (name, chain), own in zip(chains, positions, strict=True)
    ]
    found: dict[NetworkName, ChainNetwork] = {}
    for name in routes:
        own = tuple(chain for each, chain in placed if each == name)
        atoms = tuple(_cell(module, own, cell) for cell in range(len(cells)))
        is_with = name == "teacher" and bool(together)
        found[name] = ChainNetwork(name, name, module, own, atoms, lies_with_student=is_with)
    return found


def _cell(module: nn.Module, chains: Sequence[RouteChain], cell: int) -> Atom:
    """What some routes have in a cell."""
    atoms = [
        atom
        for chain in chains
        for atom in chain.atoms[chain.positions[cell] : chain.positions[cell + 1]]
    ]
    return Atom(
        atoms[0].name if atoms else "nothing",
        module,
        tuple(dict.fromkeys(name for atom in atoms for name in atom.parameter_names)),
        tuple(dict.fromkeys(name for atom in atoms for name in atom.buffer_names)),
    )


def is_paired(student: ChainNetwork, teacher: ChainNetwork) -> bool:
    """Whether the teacher is built like the beginning of the student, atom by atom."""
    number = len(teacher.atoms)
    return teacher.lies_with_student or (
        number <= len(student.atoms)
        and all(teacher.parameter_shapes(n) == student.parameter_shapes(n) for n in range(number))
    )


def draws(modules: Iterable[nn.Module], run: Callable[..., object], *inputs: TensorSpec) -> bool:
    """Whether a forward draws random numbers, such as those of dropout; found on shapes.

    Where it does, it matters which rank runs what.

    Args:
        modules: All that it runs, in the modes in which they will run.
        run: The forward.
        inputs: What it gets.

    Returns:
        Also True of a forward that can't be run without values.
    """
    found = Operations()
    try:
        with TensorSwap(list(modules), swap.meta_like)(), random_stream(None), found:
            run(*(spec.empty("meta") for spec in inputs))
    except Exception:  # noqa: BLE001 - what a network does without values can't be foreseen
        return True
    return found.num_draws > 0


def stretches(start: int, stop: int, is_so: Callable[[int], bool]) -> list[tuple[int, int, bool]]:
    """A range of atoms in pieces of which all atoms are so, or none is.

    >>> stretches(0, 5, {1, 2}.__contains__)
    [(0, 1, False), (1, 3, True), (3, 5, False)]
    """
    groups = [(kind, list(atoms)) for kind, atoms in groupby(range(start, stop), is_so)]
    return [(atoms[0], atoms[-1] + 1, kind) for kind, atoms in groups]


def _stage_of(atom: int, cuts: Sequence[int]) -> int:
    return next(stage for stage in range(len(cuts) - 1) if atom < cuts[stage + 1])
