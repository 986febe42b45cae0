"""Networks as chains of atoms, the smallest parts that can be placed on a device, and their runs.

An atom takes and passes on whatever is still needed, so that a cut breaks no skip connection (see
``cuts``). Atoms run the network's own submodules and parameters; names never change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.networks.arguments import Arguments
from lightning_tspipe.networks.codegen import RangeFunction, Tensors
from lightning_tspipe.networks.program import (
    Atom,
    Program,
    Segment,
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


def atomize(
    module: nn.Module,
    name: str,
    arguments: Arguments,
    device: torch.device | None = None,
    entries: Mapping[nn.Module, str] | None = None,
) -> Atomized:
    """Cut a network into the smallest parts that can be placed on a device.

    Its forward is recorded; of a module with a method ``pipeline_blocks()``, the submodules that
    this returns, applied in turn.

    Args:
        module: A network.
        name: What messages call it.
        arguments: How it is called; with several tensors, the first atom gets them packed.
        device: Where it runs; None: on the CPU.
        entries: What of it the step calls, and what messages call that; None: the network.

    Raises:
        PartitionError: ``forward`` cannot be recorded; the message says why, and what to do.
    """
    program = Program(module, name, arguments, device or torch.device("cpu"), entries)
    packed = (unpacking_atom(arguments),) if len(arguments.tensors) > 1 else ()
    atoms, where = join_atoms([*packed, *program.atoms])
    own = where[len(packed) :]
    outputs = (OutputRef(own[a].atom, own[a].slot + slot) for a, slot in program.first.outputs)
    return Atomized(atoms, tuple(outputs), program.first.tape.structure)


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
                function = segment.program.function(segment.start, segment.stop, values)
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
