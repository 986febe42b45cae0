"""Atoms, and how ranges of a chain of them run.

Atoms run the network's own submodules and parameters: nothing is copied, names never change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.networks.codegen import RangeFunction, Tensors
from lightning_tspipe.networks.program import (
    AtomInfo,
    LeafProgram,
    TracedProgram,
    function_program,
)


@dataclass(frozen=True, slots=True)
class OutputRef:
    """A tensor of a network's return value: the ``slot``-th that ``atom`` emits."""

    atom: int
    slot: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Contiguous atoms of one program.

    Attributes:
        program: What they belong to.
        start: The first atom.
        stop: One after the last atom.
        returns_value: Whether the value it passes on is a network's return value.
    """

    program: TracedProgram | LeafProgram
    start: int
    stop: int
    returns_value: bool = False

    @property
    def num_outputs(self) -> int:
        """How many tensors of a network's return value it emits."""
        infos = self.program.infos[self.start : self.stop]
        return sum(info.num_outputs for info in infos) + self.returns_value


@dataclass(frozen=True, slots=True, eq=False)
class Atom:
    """The smallest part of a network that can be placed.

    Attributes:
        name: For people, for example ``layer1.0.conv1..relu``.
        parameter_names: The parameters that it reads, named as in the atomized module.
        buffer_names: The buffers that it reads.
        segments: What it runs.
        writes_input: Whether it may change its input in place: it must run with the one before.
        passes_input: Whether what it passes on may share memory with its input.
    """

    name: str
    parameter_names: tuple[str, ...]
    buffer_names: tuple[str, ...]
    segments: tuple[Segment, ...]
    writes_input: bool = False
    passes_input: bool = True

    @property
    def num_outputs(self) -> int:
        """How many tensors of a network's return value it emits."""
        return sum(segment.num_outputs for segment in self.segments)

    def __call__(self, *received: Tensor) -> tuple[Tensors, Tensors]:
        """Run the atom.

        Returns:
            What the next atom gets (nothing after the last atom of a network that returns a
            structure), and the tensors of the network's return value that are computed here.
        """
        values: Tensors = received
        emitted: Tensors = ()
        for segment in self.segments:
            values, new = segment.program.function(segment.start, segment.stop)(values)
            emitted += (*new, *values) if segment.returns_value else new
        return values, emitted

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that it reads, as they are now."""
        return [
            module.get_parameter(name)
            for module, info in self._owners()
            for name in info.parameter_names
        ]

    def buffers(self) -> list[Tensor]:
        """The buffers that it reads, as they are now."""
        return [
            module.get_buffer(name) for module, info in self._owners() for name in info.buffer_names
        ]

    def _owners(self) -> Iterator[tuple[nn.Module, AtomInfo]]:
        for segment in self.segments:
            if segment.program.module is not None:
                for info in segment.program.infos[segment.start : segment.stop]:
                    yield segment.program.module, info


def function_atom(function: Callable[[Tensor], Tensor], name: str) -> Atom:
    """Make an atom of a function without parameters, such as a ``flatten`` between two modules.

    Args:
        function: What it runs, from one tensor to one tensor.
        name: For people; as in torch, a name that ends in "_" says that it writes its input.
    """
    info = AtomInfo(name, (), (), writes_input=name.endswith("_"))
    return Atom(
        name,
        (),
        (),
        (Segment(function_program(function, info), 0, 1, returns_value=True),),
        writes_input=info.writes_input,
    )


def join_atoms(atoms: Sequence[Atom]) -> tuple[tuple[Atom, ...], tuple[OutputRef, ...]]:
    """Join each atom that may write its input with the atom before.

    Otherwise the write would reach a tensor that was received from another stage, or that the
    stage before still needs.

    Returns:
        The atoms, fewer perhaps, and for each of the old ones the new atom that holds it and the
        slot of its first output there.
    """
    groups: list[list[int]] = []
    joined: list[Atom] = []
    for index, atom in enumerate(atoms):
        group, whole = [index], atom
        while whole.writes_input and joined:
            whole = _join(joined.pop(), whole)
            group = groups.pop() + group
        groups.append(group)
        joined.append(whole)
    places: list[OutputRef] = []
    for new, group in enumerate(groups):
        slot = 0
        for old in group:
            places.append(OutputRef(new, slot))
            slot += atoms[old].num_outputs
    return tuple(joined), tuple(places)


def _join(first: Atom, second: Atom) -> Atom:
    return Atom(
        name=f"{first.name.partition('..')[0]}..{second.name.rpartition('.')[2]}",
        parameter_names=tuple(dict.fromkeys(first.parameter_names + second.parameter_names)),
        buffer_names=tuple(dict.fromkeys(first.buffer_names + second.buffer_names)),
        segments=first.segments + second.segments,
        writes_input=first.writes_input or (second.writes_input and first.passes_input),
        passes_input=first.passes_input and second.passes_input,
    )


_Step = tuple[Segment, tuple[tuple[int, int, int], ...]]


class AtomChain:
    """Runs ranges of a chain of atoms; neighbours of one network run as one function.

    Args:
        atoms: The chain.
        wanted: The outputs that ``run`` reports; None stands for all.
        compiler: Makes faster functions of those that run.
    """

    def __init__(
        self,
        atoms: Sequence[Atom],
        wanted: Collection[OutputRef] | None = None,
        compiler: Callable[[RangeFunction], RangeFunction] | None = None,
    ) -> None:
        self.atoms = tuple(atoms)
        self.wanted = wanted
        self._compiler = compiler
        self._steps: dict[tuple[int, int], list[_Step]] = {}

    def run(
        self, received: Tensors, start: int, stop: int
    ) -> tuple[Tensors, list[tuple[int, int, Tensor]]]:
        """Run the atoms from ``start`` up to, not including, ``stop``.

        Args:
            received: What atom ``start`` gets, of any shapes that it takes.
            start: The first atom.
            stop: One after the last.

        Returns:
            What the next atom gets, and the wanted outputs as (atom, slot, tensor).

        Raises:
            PartitionError: A module passed on something that is no tensor.
        """
        steps = self._steps.get((start, stop))
        if steps is None:
            steps = self._steps[start, stop] = self._plan(start, stop)
        values = received
        found: list[tuple[int, int, Tensor]] = []
        for segment, reports in steps:
            function = segment.program.function(segment.start, segment.stop)
            if self._compiler is not None:
                function = self._compiler(function)
            values, emitted = function(values)
            if reports:
                tensors = (*emitted, *values) if segment.returns_value else emitted
                found += [(atom, slot, tensors[k]) for k, atom, slot in reports]
        for value in values:
            if not isinstance(value, Tensor):
                raise PartitionError(
                    f"{self.atoms[stop - 1].name} passes on a {type(value).__name__}, and only "
                    "tensors can be sent between stages; put it and the module that reads its "
                    "result into one module without `pipeline_blocks`"
                )
        return values, found

    def _plan(self, start: int, stop: int) -> list[_Step]:
        steps: list[_Step] = []
        for index in range(start, stop):
            slot = 0
            for segment in self.atoms[index].segments:
                refs = [(k, index, slot + k) for k in range(segment.num_outputs)]
                slot += len(refs)
                self._append(steps, segment, refs)
        return [(segment, self._only_wanted(refs)) for segment, refs in steps]

    def _append(
        self, steps: list[_Step], segment: Segment, refs: list[tuple[int, int, int]]
    ) -> None:
        if not steps or not _is_next(steps[-1][0], segment):
            steps.append((segment, tuple(refs)))
            return
        before, old = steps.pop()
        moved = tuple((k + len(old), atom, slot) for k, atom, slot in refs)
        steps.append((replace(segment, start=before.start), old + moved))

    def _only_wanted(
        self, refs: tuple[tuple[int, int, int], ...]
    ) -> tuple[tuple[int, int, int], ...]:
        if self.wanted is None:
            return refs
        return tuple(ref for ref in refs if OutputRef(ref[1], ref[2]) in self.wanted)


def _is_next(before: Segment, segment: Segment) -> bool:
    return (
        before.program is segment.program
        and before.stop == segment.start
        and not before.returns_value
    )
