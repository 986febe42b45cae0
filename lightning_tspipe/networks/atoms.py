"""Networks as chains of atoms: the smallest parts that can be placed on a device.

An atom takes and passes on whatever is still needed, so that a cut breaks no skip connection (see
``cuts``). Atoms run the network's own submodules and parameters; names never change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.networks.arguments import Arguments
from lightning_tspipe.networks.chain import (
    Atom,
    AtomChain,
    OutputRef,
    Segment,
    function_atom,
    join_atoms,
)
from lightning_tspipe.networks.modules import blocks_of, is_leaf, returns_tuple, title
from lightning_tspipe.networks.program import (
    LeafProgram,
    TracedProgram,
    module_program,
    unpacking_program,
)

__all__ = [
    "Atom",
    "AtomChain",
    "Atomized",
    "OutputRef",
    "atomize",
    "function_atom",
    "join_atoms",
]


@dataclass(frozen=True, slots=True)
class Atomized:
    """A network's atoms, and how its return value is put together from what they emit.

    Attributes:
        atoms: The chain.
        output_spec: Structure of the return value; constants in it are part of the structure.
        outputs: Which atom emits each leaf of the structure.
        notes: For each part that is one atom because it cannot be cut: why, and what to do.
    """

    atoms: tuple[Atom, ...]
    output_spec: pytree.TreeSpec
    outputs: tuple[OutputRef, ...]
    notes: tuple[str, ...] = ()


def atomize(
    module: nn.Module,
    name: str = "",
    arguments: Arguments | None = None,
    *,
    allow_whole: bool = False,
) -> Atomized:
    """Cut a network into the smallest parts that can be placed on a device.

    An ``nn.Sequential`` is cut into the atoms of its children, a module with a method
    ``pipeline_blocks()`` into those of the submodules that this returns; others are traced. A
    module without submodules, or one of torch's own, is one atom.

    Args:
        module: A network.
        name: What messages call it.
        arguments: How it is called; None: with one tensor. With several, the first atom gets them
            packed.
        allow_whole: Make one atom of what cannot be cut, and a note; it must return one tensor.

    Raises:
        PartitionError: ``forward`` cannot be recorded; the message says why, and what to do.
    """
    if arguments is not None and not arguments.is_plain:
        return _canonical(module, _called(module, name, arguments))
    parts = _parts(module, name)
    if parts is not None:
        pieces = [_atomize_part(child, name, key, allow_whole) for key, child in parts]
        if all(piece.output_spec.is_leaf() for piece in pieces[:-1]):
            return _canonical(module, _concatenate(pieces))
    elif is_leaf(module, ignore_hooks=True):
        return _leaf(module)
    try:
        traced = _traced(module, name)
    except PartitionError as error:
        if not allow_whole:
            raise
        return replace(_leaf(module), notes=(str(error),))
    return _canonical(module, traced)


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


def _atomize_part(module: nn.Module, parent: str, key: str, allow_whole: bool) -> Atomized:
    name = f"{parent}.{key}".strip(".")
    whole = is_leaf(module)
    piece = _leaf(module) if whole else atomize(module, name, allow_whole=allow_whole)
    return replace(piece, atoms=tuple(_prefixed(atom, key) for atom in piece.atoms))


def _prefixed(atom: Atom, prefix: str) -> Atom:
    return replace(
        atom,
        name=f"{prefix}.{atom.name}",
        parameter_names=tuple(f"{prefix}.{name}" for name in atom.parameter_names),
        buffer_names=tuple(f"{prefix}.{name}" for name in atom.buffer_names),
    )


def _leaf(module: nn.Module) -> Atomized:
    atoms = _program_atoms(module_program(module), returns_value=True)
    return Atomized(atoms, _LEAF, (OutputRef(0, 0),))


_LEAF = pytree.tree_structure(0)


def _called(module: nn.Module, name: str, arguments: Arguments) -> Atomized:
    traced = _traced(module, name, arguments)
    if len(arguments.tensors) == 1:
        return traced
    unpack = _program_atoms(unpacking_program(arguments), returns_value=False)
    outputs = tuple(OutputRef(output.atom + 1, output.slot) for output in traced.outputs)
    return replace(traced, atoms=(*unpack, *traced.atoms), outputs=outputs)


def _traced(module: nn.Module, name: str, arguments: Arguments | None = None) -> Atomized:
    program = TracedProgram(module, name, arguments)
    atoms = _program_atoms(program, returns_value=program.is_plain)
    refs = [(len(atoms) - 1, 0)] if program.is_plain else program.outputs
    return Atomized(atoms, program.spec, tuple(OutputRef(*ref) for ref in refs))


def _program_atoms(
    program: TracedProgram | LeafProgram, *, returns_value: bool
) -> tuple[Atom, ...]:
    last = len(program.infos) - 1
    return tuple(
        Atom(
            name=info.name,
            parameter_names=info.parameter_names,
            buffer_names=info.buffer_names,
            segments=(Segment(program, k, k + 1, returns_value and k == last),),
            writes_input=info.writes_input,
            passes_input=info.passes_input,
        )
        for k, info in enumerate(program.infos)
    )


def _concatenate(pieces: Sequence[Atomized]) -> Atomized:
    """The chain of networks of which each takes what the one before returns."""
    atoms: list[Atom] = []
    for piece in pieces[:-1]:
        atoms += [replace(atom, segments=_silenced(atom.segments)) for atom in piece.atoms]
    first = len(atoms)
    joined, places = join_atoms([*atoms, *pieces[-1].atoms])
    outputs = (
        OutputRef(place.atom, place.slot + ref.slot)
        for ref in pieces[-1].outputs
        for place in (places[first + ref.atom],)
    )
    notes = tuple(note for piece in pieces for note in piece.notes)
    return Atomized(joined, pieces[-1].output_spec, tuple(outputs), notes)


def _silenced(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    return tuple(replace(segment, returns_value=False) for segment in segments)


def _canonical(module: nn.Module, atomized: Atomized) -> Atomized:
    """Give a parameter that has several names the one of ``named_parameters()``."""
    first = {id(tensor): name for name, tensor in _named_tensors(module, duplicates=False)}
    names = {name: first[id(tensor)] for name, tensor in _named_tensors(module, duplicates=True)}

    def canonical(old: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(names[name] for name in old))

    atoms = (
        replace(
            atom,
            parameter_names=canonical(atom.parameter_names),
            buffer_names=canonical(atom.buffer_names),
        )
        for atom in atomized.atoms
    )
    return replace(atomized, atoms=tuple(atoms))


def _named_tensors(module: nn.Module, *, duplicates: bool) -> list[tuple[str, Tensor]]:
    return [
        *module.named_parameters(remove_duplicate=not duplicates),
        *module.named_buffers(remove_duplicate=not duplicates),
    ]
