"""Measures what each atom of a network costs: seconds by micro-batch size, and bytes.

The chain is walked in rounds. A round runs every atom once, forward and backward, at one size; the
rounds of different sizes take turns, so that a busy moment of the machine hits all sizes alike, and
the shortest time of an atom counts. The first rounds are warm-ups.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import setitem
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.networks.chain import Atom, OutputRef
from lightning_tspipe.networks.clock import Clock
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.networks.split_backward import SplitBackward
from lightning_tspipe.planning.profile import AtomProfile

Seconds = dict[int, float]


def profile_atoms(  # noqa: PLR0913 - what to measure, how long, and whom to tell
    atoms: Sequence[Atom],
    inputs: Tensor,
    sizes: Sequence[int],
    *,
    trainable: bool,
    wanted: Collection[OutputRef] | None = None,
    repeats: int = 3,
    max_seconds: float = math.inf,
    progress: Callable[[int, int], None] | None = None,
    lender: Lender | None = None,
) -> list[AtomProfile]:
    """Measure every atom of a chain, in the present modes; the network's state stays as it is.

    Args:
        atoms: The chain.
        inputs: What the first atom gets, shape (batch, ...); at least ``max(sizes)`` samples.
        sizes: The numbers of samples to measure at. A size that the network cannot run (BatchNorm
            refuses a single value per channel) is left out of the results.
        trainable: Whether to measure backward passes too.
        wanted: The outputs that the loss gets; None stands for all that the atoms emit.
        repeats: Rounds per size after the warm-up.
        max_seconds: No round starts after this time, except the first one of each size.
        progress: Called with the number of rounds done and planned.
        lender: For a network without values, which it gets atom by atom.

    Returns:
        One record per atom. Memory that two atoms keep for their backward counts for the first.

    Raises:
        PartitionError: The network can run none of the sizes.
    """
    walk = _Walk(atoms, inputs, lender, trainable=trainable)
    deadline = time.perf_counter() + max_seconds
    rounds = [(repeat, size) for repeat in range(repeats + 1) for size in sorted(sizes)[::-1]]
    with _state_kept(atoms, inputs.device), torch.set_grad_enabled(trainable):
        for done, (repeat, size) in enumerate(rounds, start=1):
            if repeat == 0 or time.perf_counter() < deadline:
                walk.measure(size, repeat)
            if progress is not None:
                progress(done, len(rounds))
        return walk.profiles(wanted)


class Lender(Protocol):
    """Whoever has a network that is too large to be whole."""

    def with_values(self, atom: Atom) -> AbstractContextManager[None]:
        """While inside, an atom has values."""

    def on_meta(self) -> AbstractContextManager[None]:
        """While inside, the network is on the meta device."""


@dataclass(slots=True)
class _Times:
    """Shortest times of one atom by size."""

    forward: Seconds = field(default_factory=dict)
    backward: Seconds = field(default_factory=dict)
    input_backward: Seconds = field(default_factory=dict)
    weight_backward: Seconds = field(default_factory=dict)

    def keep(self, size: int, found: dict[str, float], *, is_first: bool) -> None:
        """Take the times of a round; those of the first one count only until there are others."""
        if "backward" in found and "weight_backward" not in found:
            found |= {"input_backward": found["backward"], "weight_backward": 0.0}
        for name, seconds in found.items():
            kept: Seconds = getattr(self, name)
            kept[size] = seconds if is_first else min(seconds, kept.get(size, seconds))


class _Walk:
    """Runs the chain atom by atom and remembers times and bytes."""

    def __init__(
        self, atoms: Sequence[Atom], inputs: Tensor, lender: Lender | None, *, trainable: bool
    ) -> None:
        self._atoms = atoms
        self._inputs = inputs
        self._lender = lender
        self._trainable = trainable
        self._times = [_Times() for _ in atoms]
        self._sizes: set[int] = set()  # that the network can run

    def measure(self, size: int, repeat: int) -> None:
        """Time every atom once; round 0 of a size is a warm-up, whose times later ones replace."""
        if repeat and size not in self._sizes:
            return
        received: Tensors = (self._inputs[:size].clone(),)
        clock, measured = Clock(self._inputs.device), []
        try:
            for atom, times in zip(self._atoms, self._times, strict=True):
                found: dict[str, float] = {}
                measured.append((times, found))
                with self._lent(atom):
                    passed = self._measure_atom(atom, received, clock, found)
                received = _cut_off(passed)
                if not received:
                    break
        except ValueError:  # a BatchNorm that needs more samples
            return
        clock.settle()
        for times, found in measured:
            times.keep(size, found, is_first=repeat <= 1)
        self._sizes.add(size)

    def _lent(self, atom: Atom) -> AbstractContextManager[None]:
        return nullcontext() if self._lender is None else self._lender.with_values(atom)

    def _measure_atom(
        self, atom: Atom, received: Tensors, clock: Clock, found: dict[str, float]
    ) -> Tensors:
        """Run an atom there and back; what took how long comes into ``found``."""
        clock.lap()
        passed, emitted = atom(*received)
        clock.lap(partial(setitem, found, "forward"))
        if not self._trainable:
            return passed
        roots = _roots(passed, emitted)
        gradients = _gradients(roots)
        clock.lap()
        if roots:
            torch.autograd.backward(roots, gradients)
        clock.lap(partial(setitem, found, "backward"))
        if roots and any(t.requires_grad for t in received) and atom.parameter_names:
            _time_halves(atom, received, clock, found)
        return passed

    def profiles(self, wanted: Collection[OutputRef] | None) -> list[AtomProfile]:
        """What was found out."""
        if not self._sizes:
            raise PartitionError(
                f"the network cannot run {len(self._inputs)} samples or fewer in its present "
                "modes; use larger batches"
            )
        sample = self._inputs[: min(self._sizes)].clone()
        if self._lender is None:
            weights = weigh_atoms(self._atoms, sample, wanted)
        else:
            with self._lender.on_meta():
                weights = weigh_atoms(self._atoms, sample.to("meta"), wanted)
        return [
            replace(
                record,
                forward=self._runnable(times.forward),
                backward=self._runnable(times.backward),
                input_backward=self._runnable(times.input_backward),
                weight_backward=self._runnable(times.weight_backward),
            )
            for record, times in zip(weights, self._times, strict=True)
        ]

    def _runnable(self, times: Seconds) -> Seconds:
        return {size: seconds for size, seconds in times.items() if size in self._sizes}


def _cut_off(passed: Tensors) -> Tensors:
    """The same values as the leaves of the next atom's graph."""
    return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in passed)


def _roots(passed: Tensors, emitted: Tensors) -> list[Tensor]:
    """What a backward through an atom starts from."""
    tensors = {id(tensor): tensor for tensor in (*passed, *emitted)}
    return [tensor for tensor in tensors.values() if tensor.requires_grad]


def _gradients(roots: Sequence[Tensor]) -> list[Tensor]:
    # Random, since a constant one vanishes in a BatchNorm, and denormal numbers are slow.
    return [torch.randn_like(root) for root in roots]


def _time_halves(atom: Atom, received: Tensors, clock: Clock, found: dict[str, float]) -> None:
    """The input half and the weight half of an atom's backward, if it can be run in halves."""
    received = _cut_off(received)
    roots = _roots(*atom(*received))
    gradients = _gradients(roots)
    split = SplitBackward(roots, received)
    clock.lap()
    with suppress(RuntimeError):  # a custom function that cannot be run in part: not split at all
        split.input_half(gradients)
        clock.lap(partial(setitem, found, "input_backward"))
        split.weight_half()
        clock.lap(partial(setitem, found, "weight_backward"))


def weigh_atoms(
    atoms: Sequence[Atom], x: Tensor, wanted: Collection[OutputRef] | None
) -> list[AtomProfile]:
    """Profiles without times: only names and bytes; also of a network on the meta device.

    Args:
        atoms: The chain.
        x: What the first atom gets, shape (batch, ...).
        wanted: The outputs that the loss gets; None stands for all.
    """
    joined = _joined(atoms)
    return [
        AtomProfile(
            name=atom.name,
            forward={},
            output_bytes_per_sample=size.output,
            activation_bytes_per_sample=size.saved,
            parameter_bytes=_bytes([*atom.parameters(), *atom.buffers()]),
            trainable_bytes=_bytes([p for p in atom.parameters() if p.requires_grad]),
            result_bytes_per_sample=size.results,
            joined=index in joined,
        )
        for index, (atom, size) in enumerate(zip(atoms, _memory(atoms, x, wanted), strict=True))
    ]


class _Bytes(NamedTuple):
    """Bytes per sample that an atom passes on, keeps for its backward, and sends to the loss."""

    output: int
    saved: int
    results: int


def _memory(atoms: Sequence[Atom], x: Tensor, wanted: Collection[OutputRef] | None) -> list[_Bytes]:
    """Bytes per sample of each atom; also on the meta device."""
    size = len(x)
    counted = {_storage(tensor) for tensor in _state(atoms)}
    saved: list[Tensor] = []
    alive: list[object] = []  # so that no address is used twice
    found: list[_Bytes] = []

    def pack(tensor: Tensor) -> None:
        # Handing the tensor back would tie it to its own graph, a cycle that nothing collects.
        saved.append(tensor)

    received: Tensors = (x,)
    for index, atom in enumerate(atoms):
        with saved_tensors_hooks(pack, lambda nothing: nothing):
            passed, emitted = atom(*received)
        alive += [received, passed, emitted, *saved]
        storages = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in saved}
        kept = sum(nbytes for key, nbytes in storages.items() if key not in counted)
        counted |= storages.keys()
        saved.clear()
        results = [
            tensor
            for slot, tensor in enumerate(emitted)
            if wanted is None or OutputRef(index, slot) in wanted
        ]
        amounts = (_bytes(passed), kept, _bytes(results))
        found.append(_Bytes(*(math.ceil(amount / size) for amount in amounts)))
        received = _cut_off(passed)
    return found


def _storage(tensor: Tensor) -> int:
    # Not its address, which on the meta device is always 0.
    number: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return number


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _joined(atoms: Sequence[Atom]) -> set[int]:
    """Atoms that must share a stage with the next one, since a parameter is read on both sides."""
    readers: dict[int, list[int]] = {}
    for index, atom in enumerate(atoms):
        for parameter in atom.parameters():
            readers.setdefault(id(parameter), []).append(index)
    spans = (range(indices[0], indices[-1]) for indices in readers.values())
    return {index for span in spans for index in span}


def _modules(atoms: Sequence[Atom]) -> list[nn.Module]:
    modules = (segment.program.module for atom in atoms for segment in atom.segments)
    return list(dict.fromkeys(module for module in modules if module is not None))


def _state(atoms: Sequence[Atom]) -> list[Tensor]:
    return [t for module in _modules(atoms) for t in (*module.parameters(), *module.buffers())]


@contextmanager
def _state_kept(atoms: Sequence[Atom], device: torch.device) -> Iterator[None]:
    """Leave gradients, buffers and random number generators as they were."""
    modules = _modules(atoms)
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    gradients = [(p, p.grad) for module in modules for p in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
