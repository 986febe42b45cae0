"""Networks as chains of atoms, the smallest parts that can be placed on a device, and their runs.

An atom takes and passes on whatever is still needed, so that a cut breaks no skip connection (see
``cuts``). Atoms run the network's own submodules and parameters; names never change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.networks.arguments import ONE_TENSOR, Arguments
from lightning_tspipe.networks.codegen import RangeFunction, Tensors
from lightning_tspipe.networks.modules import blocks_of, is_leaf, returns_tuple, title
from lightning_tspipe.networks.program import (
    Atom,
    Segment,
    TracedProgram,
    module_atom,
    unpacking_atom,
)


@dataclass(frozen=True, slots=True)
class OutputRef:
    """A tensor of a network's return value: the ``slot``-th that ``atom`` emits."""

    atom: int
    slot: int


_LEAF = pytree.tree_structure(0)


@dataclass(frozen=True, slots=True)
class Atomized:
    """A network's atoms, and how its return value is put together from what they emit.

    Attributes:
        atoms: The chain.
        outputs: Which atom emits each leaf of the structure.
        output_spec: Structure of the return value; constants in it are part of the structure.
    """

    atoms: tuple[Atom, ...]
    outputs: tuple[OutputRef, ...] = (OutputRef(0, 0),)
    output_spec: pytree.TreeSpec = _LEAF


def atomize(module: nn.Module, name: str = "", arguments: Arguments = ONE_TENSOR) -> Atomized:
    """Cut a network into the smallest parts that can be placed on a device.

    An ``nn.Sequential`` is cut into the atoms of its children, a module with a method
    ``pipeline_blocks()`` into those of the submodules that this returns; others are traced. A
    module without submodules, or one of torch's own, is one atom.

    Args:
        module: A network.
        name: What messages call it.
        arguments: How it is called; with several tensors, the first atom gets them packed.

    Raises:
        PartitionError: ``forward`` cannot be recorded; the message says why, and what to do.
    """
    if not arguments.is_plain:
        pieces = [("", _traced(module, name, arguments))]
        if len(arguments.tensors) > 1:
            pieces.insert(0, ("", Atomized((unpacking_atom(arguments),), outputs=())))
        return _whole(module, pieces)
    parts = _parts(module, name)
    if parts is not None:
        pieces = [(key, _atomize_part(child, f"{name}.{key}".strip("."))) for key, child in parts]
        if all(piece.output_spec.is_leaf() for _, piece in pieces[:-1]):
            silent = [(key, _silenced(piece)) for key, piece in pieces[:-1]]
            return _whole(module, [*silent, pieces[-1]])
    elif is_leaf(module, ignore_hooks=True):
        return Atomized((module_atom(module),))
    return _whole(module, [("", _traced(module, name, arguments))])


def _parts(module: nn.Module, name: str) -> list[tuple[str, nn.Module]] | None:
    """The submodules that are applied in turn, with their names, where the module says so."""
    blocks = blocks_of(module)
    if blocks is None:
        is_chain = type(module) is nn.Sequential and len(module) > 0
        is_chain = is_chain and not any(map(returns_tuple, module.children()))
        return list(module._modules.items()) if is_chain else None  # type: ignore[arg-type]  # noqa: SLF001
    names = {child: key for key, child in module.named_modules()}
    parts = [(names.get(block, ""), block) for block in blocks]
    if not parts or not all(key for key, _ in parts):
        raise PartitionError(
            f"{title(module, name)}.pipeline_blocks() must return submodules of the module, at "
            "least one, and not the module itself"
        )
    return parts


def _atomize_part(module: nn.Module, name: str) -> Atomized:
    return Atomized((module_atom(module),)) if is_leaf(module) else atomize(module, name)


def _traced(module: nn.Module, name: str, arguments: Arguments) -> Atomized:
    program = TracedProgram(module, name, arguments)
    outputs = tuple(OutputRef(*place) for place in program.first.outputs)
    return Atomized(program.atoms, outputs, program.first.trace.spec)


def _silenced(piece: Atomized) -> Atomized:
    """A network that returns one tensor, which nobody gets but the next network."""

    def silent(segment: Segment) -> Segment:
        number = segment.num_outputs - segment.returns_value
        return replace(segment, num_outputs=number, returns_value=False)

    atoms = (replace(a, segments=tuple(map(silent, a.segments))) for a in piece.atoms)
    return replace(piece, atoms=tuple(atoms))


def _whole(module: nn.Module, pieces: Sequence[tuple[str, Atomized]]) -> Atomized:
    """Make one network of its pieces; names are those of its ``named_parameters()``."""
    names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}

    def named(tensors: Iterable[Tensor]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(names[id(tensor)] for tensor in tensors))

    joined, outputs, _ = concatenate(pieces)
    atoms = (
        replace(a, parameter_names=named(a.parameters()), buffer_names=named(a.buffers()))
        for a in joined
    )
    return Atomized(tuple(atoms), outputs[-1], pieces[-1][1].output_spec)


def concatenate(
    pieces: Sequence[tuple[str, Atomized]],
) -> tuple[tuple[Atom, ...], list[tuple[OutputRef, ...]], tuple[int, ...]]:
    """The chain of networks of which each takes what the one before returns.

    Args:
        pieces: The networks, each with a prefix for the names in it.

    Returns:
        The atoms, for each network where its outputs are, and one after the last atom of each.
    """
    atoms, where = join_atoms([_prefixed(a, key) for key, piece in pieces for a in piece.atoms])
    places = iter(where)
    outputs: list[tuple[OutputRef, ...]] = []
    ends: list[int] = []
    for _, piece in pieces:
        own = [next(places) for _ in piece.atoms]
        ends.append(own[-1].atom + 1)
        outputs.append(
            tuple(OutputRef(own[r.atom].atom, own[r.atom].slot + r.slot) for r in piece.outputs)
        )
    return atoms, outputs, tuple(ends)


def _prefixed(atom: Atom, prefix: str) -> Atom:
    if not prefix:
        return atom
    return replace(
        atom,
        name=f"{prefix}.{atom.name}",
        parameter_names=tuple(f"{prefix}.{name}" for name in atom.parameter_names),
        buffer_names=tuple(f"{prefix}.{name}" for name in atom.buffer_names),
    )


def join_atoms(atoms: Sequence[Atom]) -> tuple[tuple[Atom, ...], tuple[OutputRef, ...]]:
    """Join each atom that may change its input in place with those before it.

    Args:
        atoms: The atoms of networks that follow each other.

    Returns:
        The atoms that can be placed, and for each given atom the one that it became part of and the
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
        self._steps: dict[tuple[int, int], list[tuple[Segment, dict[int, OutputRef]]]] = {}

    def run(
        self, received: Tensors, start: int, stop: int
    ) -> tuple[Tensors, dict[OutputRef, Tensor]]:
        """Run the atoms from ``start`` up to, not including, ``stop``.

        Args:
            received: What atom ``start`` gets, of any shapes that it takes.
            start: The first atom.
            stop: One after the last.

        Returns:
            What the next atom gets (nothing behind the last atom of a network that returns a
            structure), and the wanted outputs.

        Raises:
            PartitionError: A module passed on something that is no tensor.
        """
        if (start, stop) not in self._steps:
            self._steps[start, stop] = self._plan(start, stop)
        values = received
        found: dict[OutputRef, Tensor] = {}
        # What fails within a function may leave gradients switched off.
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            for segment, refs in self._steps[start, stop]:
                function = segment.program.function(segment.start, segment.stop)
                if self._compiler is not None:
                    function = self._compiler(function)
                values, emitted = function(values)
                for place, ref in refs.items():
                    found[ref] = (*emitted, *values)[place]
        for value in values:
            if not isinstance(value, Tensor):
                raise PartitionError(
                    f"{self.atoms[stop - 1].name} passes on a {type(value).__name__}, and only "
                    "tensors can be sent between stages; put it and the module that reads its "
                    "result into one module without `pipeline_blocks`"
                )
        return values, found

    def _plan(self, start: int, stop: int) -> list[tuple[Segment, dict[int, OutputRef]]]:
        """The segments to run, and which of the outputs that each emits are wanted."""
        steps: list[tuple[Segment, list[OutputRef]]] = []
        for index in range(start, stop):
            slot = 0
            for segment in self.atoms[index].segments:
                refs = [OutputRef(index, slot + k) for k in range(segment.num_outputs)]
                slot += len(refs)
                if steps and _is_next(steps[-1][0], segment):
                    before, old = steps.pop()
                    steps.append((replace(segment, start=before.start), old + refs))
                else:
                    steps.append((segment, refs))
        wanted = self.wanted
        return [
            (segment, {k: ref for k, ref in enumerate(refs) if wanted is None or ref in wanted})
            for segment, refs in steps
        ]


def _is_next(before: Segment, segment: Segment) -> bool:
    return (
        before.program is segment.program
        and before.stop == segment.start
        and not before.returns_value
    )
