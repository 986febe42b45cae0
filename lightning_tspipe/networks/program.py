"""Recorded networks as chains of atoms, the smallest parts that can be placed on a device.

An atom takes and passes on whatever is still needed, so that a cut breaks no skip connection. It
runs the network's own submodules and parameters, and names never change. Nothing is copied out of
the network: whoever swaps a parameter, a buffer or a submodule's ``forward`` changes what the next
run does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.networks.arguments import Arguments
from lightning_tspipe.networks.codegen import RangeFunction, Tensors, Writer
from lightning_tspipe.networks.guards import Guards
from lightning_tspipe.networks.modules import title
from lightning_tspipe.networks.recording import record
from lightning_tspipe.networks.spans import Cut, Spans
from lightning_tspipe.networks.tape import Call, Tape, Value
from lightning_tspipe.replacing import Settings, attributes_replaced, settings_applied

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class OutputRef:
    """A tensor of a network's return value: the ``slot``-th that ``atom`` emits."""

    atom: int
    slot: int


Ran = tuple[Tensors, dict[OutputRef, Tensor]]
"""What passes on behind some atoms, and the outputs that they give."""


@dataclass(frozen=True, slots=True, eq=False)
class Atom:
    """The smallest part of a network that can be placed.

    Attributes:
        name: For people, for example ``layer1.0.conv1..relu``.
        module: Whose parameters and buffers it reads.
        parameter_names: The parameters that it reads, named as in the module.
        buffer_names: The buffers that it reads.
        num_outputs: How many tensors of a network's return value it emits.
    """

    name: str
    module: nn.Module
    parameter_names: tuple[str, ...] = ()
    buffer_names: tuple[str, ...] = ()
    num_outputs: int = 0

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The parameters and buffers that it reads."""
        return (*self.parameter_names, *self.buffer_names)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that it reads, as they are now."""
        return [self.module.get_parameter(name) for name in self.parameter_names]

    def tensors(self) -> list[Tensor]:
        """The parameters and buffers that it reads, as they are now."""
        return [*self.parameters(), *map(self.module.get_buffer, self.buffer_names)]


class Program:
    """A recorded network, cut into atoms; a variant for each kind of call and combination of modes.

    Args:
        module: The network.
        name: What messages call it.
        arguments: How it is called.
        device: Where it runs.
        entries: Whose hooks the step runs; see :func:`record`.
        settings: What is set of its modules whenever it runs.

    Attributes:
        module: The network.
        arguments: How it is called.
        device: Where it runs.
        atoms: Its atoms.
        outputs: Which atom emits each leaf of the return value.
        output_spec: Structure of the return value; constants in it are part of the structure.
        first: The variant in which it was cut.
        settings: What is set of its modules whenever it runs.

    Raises:
        PartitionError: ``forward`` cannot be recorded; the message says why, and what to do.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - all that decides what is recorded
        self,
        module: nn.Module,
        name: str,
        arguments: Arguments,
        device: torch.device = _CPU,
        entries: Mapping[nn.Module, str] | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.module, self.arguments = module, arguments
        self._name, self.device = name, device
        self._entries, self.settings = entries, settings or {}
        self.first = Variant(self._record(arguments), module)
        tape = self.first.tape
        if tape.writes_in_place and any(call.draws for call in tape.calls):
            # Dropout returns its argument in eval mode: then a ReLU writes what was made before.
            others = ((m, "training", not m.training) for m in module.modules())
            with attributes_replaced(others):
                self.first = self.first.cut_like(self._record(arguments))
        self._variants: dict[Any, list[Variant]] = {self._autocast(): [self.first]}
        self._last: dict[Any, tuple[Guards, RangeFunction]] = {}
        self.atoms = tuple(map(self.first.atom, range(self.first.num_atoms)))
        self.outputs, self.output_spec = self.first.outputs, self.first.tape.structure
        self._emitted = cache(self._emits)
        self._has_whole = any(kind.is_whole for kind in arguments.tensors)

    @property
    def written(self) -> dict[str, Call]:
        """The buffers that a forward changes, and calls that do."""
        tape = self.first.tape
        writers = {memory: call for call in tape.calls for memory in call.writes}
        return {
            name: writers[value.memory]
            for name, value in tape.state.items()
            if value.memory in writers and not value.trained
        }

    def _record(self, arguments: Arguments) -> Tape:
        with settings_applied(self.settings):
            return record(self.module, self._name, arguments, self.device, self._entries)

    def _autocast(self) -> Any:
        kind = self.device.type
        return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)

    @property
    def version(self) -> int:
        """Which of its variants is for the network as it is now: another one, other shapes."""
        variants = self._variants.get(self._autocast(), [])
        with settings_applied(self.settings):
            hold = (place for place, each in enumerate(variants) if each.tape.guards.hold())
            return next(hold, len(variants))

    def run(
        self,
        received: Tensors,
        start: int,
        stop: int,
        compiler: Callable[[RangeFunction], RangeFunction] | None = None,
    ) -> Ran:
        """Run the atoms from ``start`` up to, not including, ``stop``, as the network is now.

        Args:
            received: What atom ``start`` gets, of any shapes that it takes; the first one gets the
                tensors of a call.
            start: The first atom.
            stop: One after the last.
            compiler: Makes a faster function of the one that runs.

        Returns:
            What the next atom gets (nothing behind the last atom of a network that returns a
            structure), and the outputs.

        Raises:
            PartitionError: For this the network has other atoms than when it was cut.
        """
        if start == 0 and self._has_whole:
            received = self.arguments.gathered(received)
        is_on = torch.is_grad_enabled()
        with settings_applied(self.settings):
            function = self.function(start, stop, received)
            if compiler is not None:
                function = compiler(function)
            try:
                values, emitted = function(received)
            except BaseException:  # within, gradients may have been switched off
                torch.set_grad_enabled(is_on)
                raise
        # A network's one tensor is passed on, and emitted.
        return values, dict(zip(self._emitted(start, stop), (*emitted, *values), strict=False))

    def _emits(self, start: int, stop: int) -> list[OutputRef]:
        """The outputs of some atoms, in order."""
        return [
            OutputRef(atom, slot)
            for atom in range(start, stop)
            for slot in range(self.atoms[atom].num_outputs)
        ]

    def function(self, start: int, stop: int, received: Tensors) -> RangeFunction:
        """The function of some atoms that is for the network as it is now; see :meth:`run`."""
        autocast = self._autocast()
        key = start, stop, autocast, *[(tensor.shape, tensor.dtype) for tensor in received]
        last = self._last.get(key)
        if last is not None and last[0].hold():
            return last[1]
        found = self.known(start, received)
        if found is None:
            found = self._another(start, received)
            self._variants.setdefault(autocast, []).append(found)
        function = found.function(start, stop)
        self._last[key] = found.tape.guards, function
        return function

    def known(self, start: int, received: Sequence[Any]) -> Variant | None:
        """The variant that serves what an atom gets, tensors or their specs; None: none yet."""
        variants = self._variants.get(self._autocast(), ())
        fit = (v for v in variants if v.takes(start, received) and v.tape.guards.hold())
        return next(fit, None)

    def _another(self, start: int, received: Tensors) -> Variant:
        """A variant for modes or shapes that were not seen before."""
        known = [each for variants in self._variants.values() for each in variants]
        if start == 0:
            samples = self.arguments.rows(dict(enumerate(received)))
            arguments = Arguments.of(*self.arguments.bind(received), samples)
        else:  # in other modes
            seen = next((each for each in known if each.takes(start, received)), self.first)
            arguments = seen.tape.arguments
        made = self.first.aligned(self._record(arguments))
        if made.signature != self.first.signature or not made.takes(start, received):
            why = self.first.tape.guards.broken() or "it is given other shapes"
            raise PartitionError(
                f"{title(self.module, self._name)} does different things now than when it was "
                f"cut ({why}), so that one cut cannot serve both; move what depends on it into a "
                "submodule of its own, or give the class a method `pipeline_blocks(self)` that "
                "returns its submodules in the order of forward"
            )
        return made


class Variant:
    """The atoms of one tape, and the functions written for them so far.

    Args:
        tape: What was recorded.
        root: The network.
        cuts: Where it is cut; None: wherever it may be.

    Attributes:
        tape: What was recorded.
        outputs: Which atom emits each tensor of the return value.
        names: For each atom the names of the parameters and of the buffers that it reads.
        read_before: For each cut the parameters that are read before it.
    """

    def __init__(self, tape: Tape, root: nn.Module, cuts: Sequence[Cut] | None = None) -> None:
        self.tape, self._root = tape, root
        self._spans = Spans(tape)
        self._writer = Writer(root, tape.constants, tape.device, tape.guards.entries)
        self.cuts = self._spans.cuts if cuts is None else cuts
        self._functions: dict[tuple[int, int], RangeFunction] = {}
        self._emitted: list[list[Any]] = [[] for _ in self.cuts[1:]]
        last = len(self._emitted) - 1
        is_plain = tape.structure.is_leaf()  # one tensor and nothing around it
        self.outputs = (
            (OutputRef(last, 0),) if is_plain else tuple(map(self._emit, range(len(tape.leaves))))
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

    def _emit(self, leaf: int) -> OutputRef:
        place = self._spans.places[leaf]
        atom = next(k for k, cut in enumerate(self.cuts[1:]) if place <= cut.after)
        self._emitted[atom].append(self.tape.leaves[leaf])
        return OutputRef(atom, len(self._emitted[atom]) - 1)

    def takes(self, start: int, received: Sequence[Any]) -> bool:
        """Whether what an atom gets has the recorded shapes, whatever the batch, and types."""
        cut = self.cuts[start]
        if len(received) != len(cut.live):
            return False
        samples = cut.samples()
        batch = self.tape.batch
        if samples is not None:
            place, dimension, factor = samples
            if dimension >= len(received[place].shape):
                return False
            found = received[place].shape[dimension] // factor
            if batch not in {None, found}:
                return False
            batch = found
        return all(
            value.dtype is tensor.dtype
            and len(value.size) == len(tensor.shape)
            and value.shape(batch) == tuple(tensor.shape)
            for value, tensor in zip(cut.live, received, strict=True)
        )

    def function(self, start: int, stop: int) -> RangeFunction:
        """The function that runs atoms ``start`` to ``stop`` (exclusive)."""
        if (start, stop) not in self._functions:
            begin, end, emitted = self.cuts[start], self.cuts[stop], self.emits(start, stop)
            calls = self.calls(start, stop)
            self._functions[start, stop] = self._writer.write(begin, end, calls, emitted)
        return self._functions[start, stop]

    def emits(self, start: int, stop: int) -> list[Value]:
        """What of the return value a range of atoms emits."""
        return [leaf for leaves in self._emitted[start:stop] for leaf in leaves]

    def calls(self, start: int, stop: int) -> list[Call]:
        """What a range of atoms runs, with what it makes again."""
        own = self._spans.calls[self.cuts[start].after : self.cuts[stop].after]
        return self._spans.with_again(own, self._returns(start, stop))

    def _returns(self, start: int, stop: int) -> list[Value]:
        """What it emits, or passes on behind the last atom."""
        last = self.cuts[-1].live if stop == self.num_atoms else ()
        return [*self.emits(start, stop), *last]

    def atom(self, index: int) -> Atom:
        """One of the atoms."""
        calls = self._spans.calls[self.cuts[index].after : self.cuts[index + 1].after]
        num_outputs = sum(output.atom == index for output in self.outputs)
        names = [call.title for call in calls] or ["identity"]
        name = "..".join((names[0], *(each.rpartition(".")[2] for each in names[1:][-1:])))
        return Atom(name, self._root, *self.names[index], num_outputs)

    def _names(self, atom: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Parameters and buffers that it reads."""
        read = [name for call in self.calls(atom, atom + 1) for name in call.state]
        read += [leaf.state for leaf in self._returns(atom, atom + 1)]
        names = dict.fromkeys(filter(None, read))
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
