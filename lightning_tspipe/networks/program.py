"""Atoms, and what they run: a recorded network cut into ranges, or a module called as a whole.

Nothing is copied out of the network: whoever swaps a parameter, a buffer or a submodule's
``forward`` changes what the next run does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.networks.arguments import Arguments
from lightning_tspipe.networks.codegen import RangeFunction, Tensors, Writer
from lightning_tspipe.networks.modules import title
from lightning_tspipe.networks.recording import record
from lightning_tspipe.networks.spans import Cut, Spans
from lightning_tspipe.networks.tape import Call, Size, Tape


@dataclass(frozen=True, slots=True)
class Segment:
    """Contiguous atoms of one program.

    Attributes:
        program: What they belong to.
        start: The first atom.
        stop: One after the last atom.
        num_outputs: How many tensors of a network's return value it emits.
        returns_value: Whether the value it passes on is a network's return value, and emitted.
        parameter_names: The parameters that it reads, named as in the program's module.
        buffer_names: The buffers that it reads.
    """

    program: Program | LeafProgram
    start: int = 0
    stop: int = 1
    num_outputs: int = 1
    returns_value: bool = True
    parameter_names: tuple[str, ...] = ()
    buffer_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Atom:
    """The smallest part of a network that can be placed.

    Attributes:
        name: For people, for example ``layer1.0.conv1..relu``.
        segments: What it runs.
        parameter_names: The parameters that it reads, named as in the atomized module.
        buffer_names: The buffers that it reads.
        writes_input: Whether it may change its input in place: it must run with the one before.
        passes_input: Whether what it passes on may share memory with its input.
    """

    name: str
    segments: tuple[Segment, ...]
    parameter_names: tuple[str, ...] = ()
    buffer_names: tuple[str, ...] = ()
    writes_input: bool = False
    passes_input: bool = True

    @property
    def num_outputs(self) -> int:
        """How many tensors of a network's return value it emits."""
        return sum(segment.num_outputs for segment in self.segments)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The parameters and buffers that it reads."""
        return (*self.parameter_names, *self.buffer_names)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that it reads, as they are now."""
        return [
            segment.program.module.get_parameter(name)
            for segment in self.segments
            for name in segment.parameter_names
        ]

    def buffers(self) -> list[Tensor]:
        """The buffers that it reads, as they are now."""
        return [
            segment.program.module.get_buffer(name)
            for segment in self.segments
            for name in segment.buffer_names
        ]


@dataclass(frozen=True, slots=True, eq=False)
class LeafProgram:
    """A function that is one atom.

    Attributes:
        run: What it runs.
        module: Whose parameters it reads; an empty one where there are none.
        version: As that of a program.
        written: The same.
    """

    run: RangeFunction
    module: nn.Module
    version: int = 0
    written: frozenset[str] = frozenset()

    def function(self, start: int, stop: int, received: Tensors) -> RangeFunction:
        """The function of the one atom."""
        del start, stop, received
        return self.run


def unpacking_atom(arguments: Arguments) -> Atom:
    """What makes the tensors of a call from the one that travels."""
    program = LeafProgram(lambda received: (arguments.unpack(received[0]), ()), nn.Module())
    return Atom("unpack", (Segment(program, num_outputs=0, returns_value=False),))


class Program:
    """A recorded network, cut into atoms; a variant for each kind of call and combination of modes.

    Args:
        module: The network.
        name: What messages call it.
        arguments: How it is called.
        device: Where it runs.
        entries: What of it the step calls; see :func:`record`.

    Attributes:
        module: The network.
        atoms: Its atoms.
        first: The variant in which it was cut.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        arguments: Arguments,
        device: torch.device,
        entries: Mapping[nn.Module, str] | None = None,
    ) -> None:
        self.module = module
        self._name, self._device = name, device
        self._entries = entries
        self.first = Variant(self._record(arguments), module)
        if self.first.tape.writes_in_place:
            # Dropout returns its argument in eval mode: then a ReLU writes what was made before.
            with _other_modes(module):
                self.first = self.first.cut_like(self._record(arguments))
        self._variants: dict[Any, list[Variant]] = {self._autocast(): [self.first]}
        self.atoms = tuple(self.first.atom(self, k) for k in range(self.first.num_atoms))

    @property
    def written(self) -> frozenset[str]:
        """The buffers that a forward changes."""
        tape = self.first.tape
        memories = frozenset().union(*(call.writes for call in tape.calls))
        return frozenset(
            name
            for name, value in tape.state.items()
            if value.memory in memories and not value.trained
        )

    def _record(self, arguments: Arguments) -> Tape:
        return record(self.module, self._name, arguments, self._device, self._entries)

    def _autocast(self) -> Any:
        kind = self._device.type
        return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)

    @property
    def version(self) -> int:
        """Which of its variants is for the network as it is now: another one, other shapes."""
        variants = self._variants.get(self._autocast(), [])
        hold = (place for place, each in enumerate(variants) if each.tape.guards.hold())
        return next(hold, len(variants))

    def function(self, start: int, stop: int, received: Tensors) -> RangeFunction:
        """The function that runs atoms ``start`` to ``stop`` (exclusive), as the network is now.

        Args:
            start: The first atom.
            stop: One after the last.
            received: What it is to be given.

        Raises:
            PartitionError: For this the network has other atoms than when it was cut.
        """
        variants = self._variants.setdefault(self._autocast(), [])
        fit = (v for v in variants if v.takes(start, received) and v.tape.guards.hold())
        found = next(fit, None)
        if found is None:
            found = self._another(start, received)
            variants.append(found)
        return found.function(start, stop)

    def _another(self, start: int, received: Tensors) -> Variant:
        """A variant for modes or shapes that were not seen before."""
        known = [each for variants in self._variants.values() for each in variants]
        if start == 0:
            arguments = self.first.tape.arguments.like(received)
        else:  # in other modes
            seen = next((each for each in known if each.takes(start, received)), self.first)
            arguments = seen.tape.arguments
        made = self.first.aligned(self._record(arguments))
        if made.signature != self.first.signature or not made.takes(start, received):
            raise PartitionError(
                f"{title(self.module, self._name)} does different things now than when it was "
                f"cut ({self._why() or 'it is given other shapes'}), so that one cut cannot serve "
                "both; move what depends on it into a submodule of its own, or give the class a "
                "method `pipeline_blocks(self)` that returns its submodules in the order of forward"
            )
        return made

    def _why(self) -> str:
        return self.first.tape.guards.broken()


@contextmanager
def _other_modes(module: nn.Module) -> Iterator[None]:
    """While inside, what is in train mode is in eval mode, and the other way round."""
    children = list(module.modules())
    for child in children:
        child.training = not child.training
    try:
        yield
    finally:
        for child in children:
            child.training = not child.training


class Variant:
    """The atoms of one tape, and the functions written for them so far.

    Args:
        tape: What was recorded.
        root: The network.
        cuts: Where it is cut; None: wherever it may be.

    Attributes:
        tape: What was recorded.
        outputs: For each tensor of the return value: the atom that emits it, its place there.
        names: For each atom the names of the parameters and of the buffers that it reads.
        read_before: For each cut the parameters that are read before it.
    """

    def __init__(self, tape: Tape, root: nn.Module, cuts: Sequence[Cut] | None = None) -> None:
        self.tape, self._root = tape, root
        self._spans = Spans(tape)
        self._writer = Writer(root, tape.constants, tape.device)
        self._is_plain = tape.structure.is_leaf()  # one tensor and nothing around it
        self.cuts = self._spans.cuts if cuts is None else cuts
        self._functions: dict[tuple[int, int], RangeFunction] = {}
        self._emitted: list[list[Any]] = [[] for _ in self.cuts[1:]]
        last = len(self._emitted) - 1
        self.outputs = (
            ((last, 0),) if self._is_plain else tuple(map(self._emit, range(len(tape.leaves))))
        )
        self.names = [self._names(atom) for atom in range(len(self._emitted))]
        self.read_before = self._parameters_before()

    @property
    def num_atoms(self) -> int:
        """How many there are."""
        return len(self._emitted)

    @property
    def signature(self) -> object:
        """What two variants share if one cut serves both."""
        own = [parameters for parameters, _ in self.names]
        return own, self.outputs, [len(cut.live) for cut in self.cuts], self.tape.structure

    def _emit(self, leaf: int) -> tuple[int, int]:
        place = self._spans.places[leaf]
        atom = next(k for k, cut in enumerate(self.cuts[1:]) if place <= cut.after)
        self._emitted[atom].append(self.tape.leaves[leaf])
        return atom, len(self._emitted[atom]) - 1

    def takes(self, start: int, received: Tensors) -> bool:
        """Whether what an atom gets has the recorded shapes, whatever the batch, and types."""
        cut = self.cuts[start]
        if len(received) != len(cut.live):
            return False
        samples = cut.samples()
        batch = self.tape.batch
        if samples is not None:
            place, dimension, factor = samples
            if dimension >= received[place].dim():
                return False
            found = received[place].shape[dimension] // factor
            if batch not in {None, found}:
                return False
            batch = found
        return all(
            value.dtype is tensor.dtype
            and len(value.size) == tensor.dim()
            and _sizes(value.size, batch) == tuple(tensor.shape)
            for value, tensor in zip(cut.live, received, strict=True)
        )

    def function(self, start: int, stop: int) -> RangeFunction:
        """The function that runs atoms ``start`` to ``stop`` (exclusive)."""
        if (start, stop) not in self._functions:
            emitted = [leaf for leaves in self._emitted[start:stop] for leaf in leaves]
            self._functions[start, stop] = self._writer.write(
                self.cuts[start], self.cuts[stop], self._calls(start, stop), emitted
            )
        return self._functions[start, stop]

    def _calls(self, start: int, stop: int) -> list[Call]:
        """What a range of atoms runs, with what it makes again."""
        own = self._spans.calls[self.cuts[start].after : self.cuts[stop].after]
        leaves = [leaf for leaves in self._emitted[start:stop] for leaf in leaves]
        if self._is_plain and stop == self.num_atoms:
            leaves += self.tape.leaves
        return self._spans.with_again(own, leaves)

    def atom(self, program: Program, index: int) -> Atom:
        """An atom, as part of a program."""
        calls = self._spans.calls[self.cuts[index].after : self.cuts[index + 1].after]
        returns = self._is_plain and index == self.num_atoms - 1
        num_outputs = len(self._emitted[index]) + returns
        received = {value.memory for value in self.cuts[index].live}
        return Atom(
            _atom_name(calls),
            (Segment(program, index, index + 1, num_outputs, returns, *self.names[index]),),
            *self.names[index],
            writes_input=any(not received.isdisjoint(call.writes) for call in calls),
            passes_input=any(value.memory in received for value in self.cuts[index + 1].live),
        )

    def _names(self, atom: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Parameters and buffers that it reads."""
        read = [name for call in self._calls(atom, atom + 1) for name in call.state]
        leaves = [
            *self._emitted[atom],
            *(self.cuts[atom + 1].live if atom + 1 == self.num_atoms else ()),
        ]
        read += [leaf.state for leaf in leaves if leaf.state]
        names = dict.fromkeys(read)
        state = self.tape.state
        return (
            tuple(name for name in names if state[name].trained),
            tuple(name for name in names if not state[name].trained),
        )

    def _parameters_before(self) -> list[frozenset[str]]:
        """For each cut, the parameters that calls before it read."""
        found, names, place = [], set[str](), 0
        for cut in self.cuts:
            for call in self._spans.calls[place : cut.after]:
                names |= {name for name in call.state if self.tape.state[name].trained}
            place = cut.after
            found.append(frozenset(names))
        return found

    def title_before(self, after: int) -> str:
        """Of the last call before a place."""
        return self._spans.calls[after - 1].title if after else ""

    def aligned(self, tape: Tape) -> Variant:
        """Another tape, cut where this one is, as far as it can be."""
        other = Variant(tape, self._root)
        pairs = self._pairs(other)
        cuts = (other.cuts[0], *(cut for _, cut in pairs), other.cuts[-1])
        return Variant(tape, self._root, cuts)

    def cut_like(self, tape: Tape) -> Variant:
        """This variant, cut only where another tape can be cut too.

        Where that has other parameters, it stays as it is.
        """
        other = Variant(tape, self._root)
        if other.read_before[-1] != self.read_before[-1]:
            return self
        cuts = (self.cuts[0], *(cut for cut, _ in self._pairs(other)), self.cuts[-1])
        return Variant(self.tape, self._root, cuts)

    def _pairs(self, other: Variant) -> list[tuple[Cut, Cut]]:
        """Cuts of this variant, and those of another one that lie where they do.

        Parameters tell: on either side, both networks read the same ones. Of several such places,
        the one that passes on as many tensors, behind the call that is most like the one here.
        """
        by_read: dict[frozenset[str], list[Cut]] = {}
        for cut, read in zip(other.cuts[1:-1], other.read_before[1:-1], strict=True):
            by_read.setdefault(read, []).append(cut)
        found: list[tuple[Cut, Cut]] = []
        after = 0
        for cut, read in zip(self.cuts[1:-1], self.read_before[1:-1], strict=True):
            title = self.title_before(cut.after)
            fit = [each for each in by_read.get(read, ()) if each.after > after]
            fit.sort(
                key=lambda e: (
                    len(e.live) == len(cut.live),
                    other.title_before(e.after) == title,
                    e.after == cut.after,
                )
            )
            if fit:
                found.append((cut, fit[-1]))
                after = fit[-1].after
        return found


def _sizes(sizes: Sequence[Any], batch: int | None) -> tuple[int, ...]:
    return tuple(size(batch) if isinstance(size, Size) else size for size in sizes)


def _atom_name(calls: Sequence[Call]) -> str:
    names = [call.title for call in calls] or ["identity"]
    return names[0] if len(names) == 1 else f"{names[0]}..{names[-1].rpartition('.')[2]}"
