"""What each atom of a network costs: seconds by micro-batch size, and bytes; measured or priced.

Atoms of one kind (:mod:`lightning_tspipe.profiling.kinds`) are measured once, and what is known
of a kind not at all. The chain is walked, forward and backward, for each number of samples::

    atoms        0    1    2    3    4    5    6         kinds a b c b c b d
    first walk   run  run  run  -    -    -    run       of equal atoms, one gives all outputs
    again        run       run                 run       what has not run for long enough yet

The walks of different sizes take turns, so that a busy moment of the machine hits all sizes alike,
and the shortest time of a kind counts.

For a device that is not here, floating-point operations are priced at a stated rate. A backward
does twice the work of its forward: once for the gradients of the inputs, once for those of the
weights (Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters*, SC 2021,
appendix). Calls without matrix products or convolutions count as free.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_tspipe.moving import arbitrary_like
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.networks.program import Atom, Program
from lightning_tspipe.planning.profile import AtomProfile
from lightning_tspipe.profiling.costs import Costs, checksum
from lightning_tspipe.profiling.weighing import Weighed, cut_off, runs, state_of, weigh
from lightning_tspipe.random_states import random_stream
from lightning_tspipe.replacing import TensorSwap, attributes_replaced
from lightning_tspipe.runtime.stages.split_backward import SplitBackward

Laps = dict[str, tuple[Any, Any]]
"""By name, the moments between which something ran."""

_WARM_UP = 2
_LONGEST = 2.0
"""Seconds after which a block has been measured often enough, once it has a few times."""
_FEWEST = 5
_ENOUGH = 0.03
"""Seconds after which an atom has been measured for long enough."""
_LONG = 0.1
"""Seconds of a run, there and back, in which hardly counts what a first run takes more."""


def profile_atoms(  # noqa: PLR0913 - what to measure, and how
    program: Program,
    inputs: Tensors,
    sizes: Sequence[int] = (),
    *,
    trainable: bool,
    num_atoms: int | None = None,
    flops_per_second: float | None = None,
    repeats: int = 3,
    max_seconds: float = math.inf,
    costs: Costs | None = None,
) -> list[AtomProfile]:
    """Find the costs of the atoms of a network, in its present modes; it stays as it is.

    They are measured where the input is. A network that is not there comes there atom by atom; one
    without values gets arbitrary ones.

    Args:
        program: The network.
        inputs: What the first atom gets, of shapes (batch, ...); at least ``max(sizes)`` samples.
        sizes: The numbers of samples to measure at. A size that the network cannot run (BatchNorm
            refuses a single value per channel) is left out of the results. If operations are
            priced and no size is given: any number.
        trainable: Whether to measure backward passes too.
        num_atoms: Only the first ones.
        flops_per_second: Prices operations instead of measuring; inputs may be on ``meta`` then.
            What the device really does, not what its data sheet promises; an addition and a
            multiplication are two.
        repeats: How often an atom is measured again, at most.
        max_seconds: Nothing is measured again after this time.
        costs: What is known already, and what gets to know what is measured.

    Returns:
        One record per atom. Memory that two atoms keep for their backward counts for the first.

    Raises:
        PartitionError: The network can run none of the sizes.
    """
    atoms = program.atoms[:num_atoms]
    with torch.set_grad_enabled(trainable):
        if flops_per_second is not None:
            return _priced(program, atoms, inputs, sizes, flops_per_second)
        costs, deadline = costs or Costs(), time.perf_counter() + max_seconds
        weighed = _weighed(program, atoms, inputs, sorted(sizes), costs)
        walk = _Walk(program, atoms, weighed, inputs, costs)
        with _state_kept(program):
            walk.first([size for size in sorted(sizes)[::-1] if size >= weighed.number])
            for _ in range(repeats):
                if time.perf_counter() < deadline:
                    walk.again()
    of_sizes = set(sizes)
    return [
        replace(record, **_at(of_sizes, costs.times(kind)))
        for record, kind in zip(weighed.records, walk.kinds, strict=True)
    ]


def _at(sizes: set[int], times: dict[str, dict[int, float]]) -> dict[str, Any]:
    """Of all that is known of an atom, what was asked for."""
    return {
        name: {size: seconds for size, seconds in sorted(known.items()) if size in sizes}
        for name, known in times.items()
    }


def _weighed(
    program: Program, atoms: Sequence[Atom], inputs: Tensors, sizes: Sequence[int], costs: Costs
) -> Weighed:
    """What is known without running the network; once for each beginning of the sizes."""
    key = program, len(atoms), torch.is_grad_enabled(), sizes[0], len(inputs[0])
    if key not in costs.found:
        costs.found[key] = weigh(program, atoms, inputs, sizes)
    found: Weighed = costs.found[key]
    return found


def _priced(
    program: Program,
    atoms: Sequence[Atom],
    inputs: Tensors,
    sizes: Sequence[int],
    flops_per_second: float,
) -> list[AtomProfile]:
    """Profiles whose times are those of their operations."""
    priced = {size for size in sizes if runs(program, len(atoms), inputs, size)}
    if not sizes:
        priced = {1, len(inputs[0])}
    largest = [max(priced)] if priced else []
    records = []
    for place, record in enumerate(weigh(program, atoms, inputs, largest).records):
        factors = {"forward": 1}
        if torch.is_grad_enabled():
            of_inputs = 0 if place == 0 else 1  # nobody needs the gradient of the images
            of_weights = 1 if record.trainable_bytes else 0
            factors |= {"backward": of_inputs + of_weights}
            factors |= {"input_backward": of_inputs, "weight_backward": of_weights}
        seconds = record.flops_per_sample / flops_per_second
        times: dict[str, Any] = {
            name: {size: factor * seconds * size for size in sorted(priced)}
            for name, factor in factors.items()
        }
        records.append(replace(record, **times))
    return records


def _samples(inputs: Tensors, number: int) -> Tensors:
    """Copies of the first samples."""
    return tuple(tensor[:number].clone() for tensor in inputs)


def seconds_of(
    run: Callable[[], Any], device: torch.device, steps: int, rate: float | None = None
) -> float:
    """Seconds of a run: the median of some, after two that are not counted.

    Args:
        run: What is timed.
        device: Where it computes.
        steps: How often it is timed; less often where it takes long.
        rate: Operations per second; if given, those of one run are counted, and priced by it.
    """
    if rate is not None:
        with FlopCounterMode(display=False) as counter:
            run()
        return float(counter.get_total_flops()) / rate
    found: list[float] = []
    deadline = time.perf_counter() + _LONGEST
    for repeat in range(-min(_WARM_UP, steps), steps):
        before = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if repeat >= 0:
            found.append(time.perf_counter() - before)
        if len(found) >= _FEWEST and time.perf_counter() > deadline:
            break
    return median(found)


class Clock:
    """Moments of what a device does.

    On a GPU each is an event among what it does, and the host waits once, when all is launched: so
    small things are timed as they run in a training, one behind the other.

    Args:
        device: That is watched.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        """This moment."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, laps: Sequence[Laps]) -> list[dict[str, float]]:
        """Wait until all is done; the seconds of each lap."""
        is_cuda = self._device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize(self._device)
        return [
            {name: a.elapsed_time(b) / 1e3 if is_cuda else b - a for name, (a, b) in each.items()}
            for each in laps
        ]


class _Walk:
    """Runs atom by atom, and notes times.

    Args:
        program: The network.
        atoms: Its first atoms.
        weighed: What is known of them.
        inputs: What the first one gets.
        costs: What is known of kinds, and gets to know more.

    Attributes:
        kinds: For each atom what stands for its kind; of one that is like no other, itself.
    """

    def __init__(
        self,
        program: Program,
        atoms: Sequence[Atom],
        weighed: Weighed,
        inputs: Tensors,
        costs: Costs,
    ) -> None:
        self._program, self._atoms, self._costs = program, atoms, costs
        self._inputs, self._device = inputs, inputs[0].device
        trains = torch.is_grad_enabled()
        self.kinds: list[Hashable] = [
            (program, trains, place) if kind is None else checksum([kind, trains])
            for place, kind in enumerate(weighed.kinds)
        ]
        self._is_elsewhere = any(t.device != self._device for t in state_of(program))
        self._left: dict[tuple[int, int], tuple[Tensors, float]] = {}
        """What an atom gets that has not run for long enough with so many samples, and for how many
        seconds it has."""

    def first(self, sizes: Sequence[int]) -> None:
        """Run each kind of atom that is not known, for some numbers of samples."""
        for size in sizes:
            new: dict[Hashable, int] = {}
            for place, kind in enumerate(self.kinds):
                if not self._costs.knows(kind, size):
                    new.setdefault(kind, place)
            if new:
                self._walk(size, set(new.values()))

    def _walk(self, size: int, new: set[int]) -> None:
        """Run some atoms, and what is needed to know what they get."""
        received, passed_by = _samples(self._inputs, size), dict[Hashable, Tensors]()
        given, measured = dict[int, Tensors](), dict[int, Laps]()
        clock = Clock(self._device)
        for place, kind in enumerate(self.kinds[: max(new) + 1]):
            if kind not in passed_by:
                with self._values_of(place):
                    if place in new:
                        given[place] = received
                        passed, measured[place] = self._measure_atom(place, received, clock)
                    else:
                        passed, _ = self._run(place, received)
                passed_by[kind] = cut_off(passed)
            received = passed_by[kind]
        self._note(size, clock, given, measured)

    def again(self) -> None:
        """Run once more what has not run for long enough."""
        left, self._left = self._left, {}
        for size in dict.fromkeys(size for size, _ in left):
            given = {place: received for (n, place), (received, _) in left.items() if n == size}
            clock, measured = Clock(self._device), dict[int, Laps]()
            for place, received in given.items():
                with self._values_of(place):
                    _, measured[place] = self._measure_atom(place, cut_off(received), clock)
            self._note(size, clock, given, measured, {p: left[size, p][1] for p in given})

    def _note(
        self,
        size: int,
        clock: Clock,
        given: dict[int, Tensors],
        measured: dict[int, Laps],
        before: dict[int, float] | None = None,
    ) -> None:
        """Keep what atoms took, and those that are to run again.

        Args:
            size: Samples.
            clock: It was measured by.
            given: What each of the atoms was given.
            measured: When they ran.
            before: For how many seconds they had run already.
        """
        found = clock.seconds(list(measured.values()))
        for place, taken in zip(measured, found, strict=True):
            spent = (before or {}).get(place, 0.0) + sum(taken.values())
            if "backward" in taken and "weight_backward" not in taken:
                taken |= {"input_backward": taken["backward"], "weight_backward": 0.0}
            self._costs.note(self.kinds[place], size, taken)
            if spent < (_LONG if before is None else _ENOUGH):
                self._left[size, place] = given[place], spent

    def _values_of(self, place: int) -> AbstractContextManager[None]:
        """While inside, an atom lies on the device, with values, and gradients to be added to."""
        return self._with_values(self._atoms[place]) if self._is_elsewhere else nullcontext()

    def _with_values(self, atom: Atom) -> AbstractContextManager[None]:
        """While inside, the parameters and buffers of one atom are on the device, with values."""
        reads = {id(tensor) for tensor in atom.tensors()}
        device = self._device

        def make(tensor: Tensor) -> Tensor:
            if id(tensor) not in reads or tensor.device == device:
                return tensor
            if tensor.is_meta:
                return arbitrary_like(tensor, device)
            return tensor.detach().to(device)

        return TensorSwap(self._program.module.modules(), make)()

    def _measure_atom(self, index: int, received: Tensors, clock: Clock) -> tuple[Tensors, Laps]:
        """Run an atom there and back; what it passes on, and when it ran."""
        found: Laps = {}
        if torch.is_grad_enabled():
            self._begin_gradients(index)
        begin = clock.now()
        passed, roots = self._run(index, received)
        found["forward"] = begin, clock.now()
        if not torch.is_grad_enabled():
            return passed, found
        gradients = _gradients(roots)
        begin = clock.now()
        if roots:
            torch.autograd.backward(roots, gradients)
        found["backward"] = begin, clock.now()
        has_parameters = bool(self._atoms[index].parameter_names)
        if has_parameters and roots and any(t.requires_grad for t in received):
            self._time_halves(index, received, clock, found)
        return passed, found

    def _begin_gradients(self, index: int) -> None:
        """Have backwards add to gradients, as all do but the first one of a step."""
        for parameter in self._atoms[index].parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _time_halves(self, index: int, received: Tensors, clock: Clock, found: Laps) -> None:
        """The input half and the weight half of an atom's backward, if it can be run in halves."""
        received = cut_off(received)
        _, roots = self._run(index, received)
        gradients = _gradients(roots)
        split = SplitBackward(roots, received)
        begin = clock.now()
        with suppress(RuntimeError):  # a custom function that cannot be run in part: not split
            split.input_half(gradients)
            found["input_backward"] = begin, clock.now()
            split.weight_half()
            found["weight_backward"] = found["input_backward"][1], clock.now()

    def _run(self, index: int, received: Tensors) -> tuple[Tensors, list[Tensor]]:
        """What an atom passes on, and what a backward through it starts from."""
        passed, found = self._program.run(received, index, index + 1)
        tensors = {id(tensor): tensor for tensor in (*passed, *found.values())}
        return passed, [tensor for tensor in tensors.values() if tensor.requires_grad]


def _gradients(roots: Sequence[Tensor]) -> list[Tensor]:
    # Random, since a constant one vanishes in a BatchNorm, and denormal numbers are slow.
    return [torch.randn_like(root) for root in roots]


@contextmanager
def _state_kept(program: Program) -> Iterator[None]:
    """Leave gradients, buffers and random number generators as they were."""
    module = program.module
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    gradients = ((parameter, "grad", None) for parameter in module.parameters())
    with random_stream(None), attributes_replaced(gradients):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
