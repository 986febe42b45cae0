"""What each atom of a network costs: seconds by micro-batch size, and bytes; measured or priced.

To measure, the chain is walked in rounds. A round runs every atom once, forward and backward, at
one size; the rounds of different sizes take turns, so that a busy moment of the machine hits all
sizes alike, and the shortest time of an atom counts. The first rounds are warm-ups.

For a device that is not here, floating-point operations are priced at a stated rate. A backward
does twice the work of its forward: once for the gradients of the inputs, once for those of the
weights (Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters*, SC 2021,
appendix). Calls without matrix products or convolutions count as free.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.moving import arbitrary_like
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.networks.fakes import Fakes
from lightning_tspipe.networks.program import Atom, Program
from lightning_tspipe.networks.swap import TensorSwap, without_values
from lightning_tspipe.networks.tape import memory_of
from lightning_tspipe.planning.profile import AtomProfile
from lightning_tspipe.random_states import random_stream
from lightning_tspipe.replacing import attributes_replaced
from lightning_tspipe.runtime.stages.split_backward import SplitBackward

Laps = dict[str, tuple[Any, Any]]
"""By name, the moments between which something ran."""

_WARM_UP = 2
_LONGEST = 2.0
"""Seconds after which a block has been measured often enough, once it has a few times."""
_FEWEST = 5


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
        repeats: Rounds per size after the warm-up.
        max_seconds: No round starts after this time, except the first one of each size.

    Returns:
        One record per atom. Memory that two atoms keep for their backward counts for the first.

    Raises:
        PartitionError: The network can run none of the sizes.
    """
    atoms = program.atoms[:num_atoms]
    with torch.set_grad_enabled(trainable):
        if flops_per_second is not None:
            return _priced(program, atoms, inputs, sizes, flops_per_second)
        walk = _Walk(program, atoms, inputs)
        deadline = time.perf_counter() + max_seconds
        rounds = [(repeat, size) for repeat in range(repeats + 1) for size in sorted(sizes)[::-1]]
        with _state_kept(program):
            for repeat, size in rounds:
                if repeat == 0 or time.perf_counter() < deadline:
                    walk.measure(size, repeat)
            _check_any(walk.sizes, len(inputs[0]))
            weighed = _weigh(program, atoms, inputs, min(walk.sizes))
    return [replace(record, **times) for record, times in zip(weighed, walk.times, strict=True)]


def _priced(
    program: Program,
    atoms: Sequence[Atom],
    inputs: Tensors,
    sizes: Sequence[int],
    flops_per_second: float,
) -> list[AtomProfile]:
    """Profiles whose times are those of their operations."""
    priced = {size for size in sizes if _runs(program, len(atoms), inputs, size)}
    if not sizes:
        priced = {1, len(inputs[0])}
    _check_any(priced, len(inputs[0]))
    largest = max(priced)
    records = []
    for place, record in enumerate(_weigh(program, atoms, inputs, largest)):
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


def _check_any(sizes: Collection[int], samples: int) -> None:
    if not sizes:
        raise PartitionError(
            f"the network cannot run {samples} samples or fewer in its present modes; use larger "
            "batches"
        )


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

    def now(self) -> Any:  # noqa: ANN401 - a number, or an event of a GPU
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
    """Runs atom by atom and remembers times.

    Attributes:
        times: For each atom its shortest times, by name (as in ``AtomProfile``) and size.
        sizes: Those that the network can run.
        is_elsewhere: Whether a part of the network is not on the device: without values, or in
            host memory still.
    """

    def __init__(self, program: Program, atoms: Sequence[Atom], inputs: Tensors) -> None:
        self._program, self._atoms = program, atoms
        self._inputs, self._device = inputs, inputs[0].device
        self.times: list[dict[str, Any]] = [{} for _ in atoms]
        self.sizes: set[int] = set()
        self.is_elsewhere = any(t.device != self._device for t in _state(program))

    def measure(self, size: int, repeat: int) -> None:
        """Time every atom once; round 0 of a size is a warm-up, whose times later ones replace."""
        if repeat and size not in self.sizes:
            return
        received = _samples(self._inputs, size)
        clock, measured = Clock(self._device), list[Laps]()
        try:
            for index, atom in enumerate(self._atoms):
                with self._with_values(atom) if self.is_elsewhere else nullcontext():
                    passed, found = self._measure_atom(index, received, clock)
                measured.append(found)
                received = _cut_off(passed)
                if not received:
                    break
        except ValueError:  # a BatchNorm that needs more samples
            return
        for times, taken in zip(self.times, clock.seconds(measured), strict=False):
            if "backward" in taken and "weight_backward" not in taken:
                taken |= {"input_backward": taken["backward"], "weight_backward": 0.0}
            for name, seconds in taken.items():
                kept = times.setdefault(name, {})
                kept[size] = seconds if repeat <= 1 else min(seconds, kept.get(size, seconds))
        self.sizes.add(size)

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

    def _time_halves(self, index: int, received: Tensors, clock: Clock, found: Laps) -> None:
        """The input half and the weight half of an atom's backward, if it can be run in halves."""
        received = _cut_off(received)
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


def _cut_off(passed: Tensors) -> Tensors:
    """The same values as the leaves of the next atom's graph."""
    return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in passed)


def _gradients(roots: Sequence[Tensor]) -> list[Tensor]:
    # Random, since a constant one vanishes in a BatchNorm, and denormal numbers are slow.
    return [torch.randn_like(root) for root in roots]


def _runs(program: Program, num_atoms: int, inputs: Tensors, number: int) -> bool:
    with torch.no_grad(), suppress(ValueError):  # a BatchNorm that needs more samples
        with _without_values(program, inputs, number) as received:
            program.run(received, 0, num_atoms)
        return True
    return False


def _weigh(
    program: Program, atoms: Sequence[Atom], inputs: Tensors, number: int
) -> list[AtomProfile]:
    """Profiles without times, of some samples."""
    with _without_values(program, inputs, number) as received:
        return _weighed(program, atoms, received, number)


def _weighed(
    program: Program, atoms: Sequence[Atom], received: Tensors, number: int
) -> list[AtomProfile]:
    counted = {memory_of(tensor) for tensor in _state(program)}
    saved: list[Tensor] = []
    alive: list[object] = []  # so that no address is used twice
    weighed: list[AtomProfile] = []

    def pack(tensor: Tensor) -> None:
        # Handing the tensor back would tie it to its own graph, a cycle that nothing collects.
        whole = tensor if tensor._base is None else tensor._base  # noqa: SLF001 - no public way
        if not isinstance(whole, nn.Parameter):
            saved.append(tensor)

    for index, atom in enumerate(atoms):
        counter = FlopCounterMode(display=False)
        with counter, saved_tensors_hooks(pack, lambda nothing: nothing):
            passed, results = program.run(received, index, index + 1)
        alive += [received, passed, results, *saved]
        storages = {memory_of(tensor): tensor.untyped_storage().nbytes() for tensor in saved}
        kept = sum(nbytes for key, nbytes in storages.items() if key not in counted)
        counted |= storages.keys()
        saved.clear()
        record = AtomProfile(
            name=atom.name,
            forward={},
            output_bytes_per_sample=math.ceil(_bytes(passed) / number),
            activation_bytes_per_sample=math.ceil(kept / number),
            parameter_bytes=_bytes(atom.tensors()),
            trainable_bytes=_bytes([p for p in atom.parameters() if p.requires_grad]),
            result_bytes_per_sample=math.ceil(_bytes(list(results.values())) / number),
            flops_per_sample=counter.get_total_flops() / number,
        )
        weighed.append(record)
        received = _cut_off(passed)
    return weighed


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _state(program: Program) -> list[Tensor]:
    return [*program.module.parameters(), *program.module.buffers()]


class _AllChosen(Fakes):
    """Tensors without values, of which none is zero."""

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten.nonzero.default:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        with self:
            size = args[0].numel(), args[0].dim()
            return torch.empty(size, dtype=torch.long, device=args[0].device)


@contextmanager
def _without_values(program: Program, inputs: Tensors, number: int) -> Iterator[Tensors]:
    """While inside, parameters and buffers have shapes only; they lie where the network is to run.

    So precisions are those of that device. What is chosen by values (the samples of an expert, say)
    is taken to be everything; a module that needs the values themselves runs on zeros.

    Yields:
        The first samples of the inputs, without values too.
    """
    fake = _AllChosen(program.device)
    with without_values(program.module.modules(), fake.like):
        received = tuple(fake.like(tensor[:number]) for tensor in inputs)
        with fake:
            yield received


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
