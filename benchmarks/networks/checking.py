"""Is a network that is recorded, cut and run stage by stage the same network?

::

    recorded with 2 samples, run with 3
    whole       x ─────────────────────────────────► outputs, gradients, buffers
    in stages   x ─ stage 0 ┆ stage 1 ┆ ... ───────► the same, bit by bit
                            detached, as on another device
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.networks.arguments import Arguments, tensors_in
from lightning_tspipe.networks.program import Atom, OutputRef, Program
from lightning_tspipe.runtime.stages.split_backward import arriving

RECORDED, RUN = 2, 3
"""Samples: with which a network is recorded, and with which it runs."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Entry:
    """A network, and how it is called.

    Attributes:
        build: Makes it, with random weights.
        call: For a number of samples: positional and named arguments.
    """

    build: Callable[[], nn.Module]
    call: Callable[[int], Call]


@dataclass(frozen=True)
class Outcome:
    """What became of an entry.

    Attributes:
        exact: Whether outputs, gradients and buffers are the same, bit by bit, for all numbers of
            stages.
        worst: The largest difference, relative to the largest number of all; in float64.
        parameters: How many numbers.
        atoms: Smallest parts that can be placed.
        blocks: Submodules of a list of equals.
        cut_blocks: Of these, those behind whose end there is a cut before the next one's end.
        largest_atom_share: Share of the parameters in the largest atom.
        largest_block_share: Share of those in the largest block, and in the largest module without
            submodules: the embedding, mostly.
        capture_seconds: Of processor time, to record and cut it.
        reason: Why it is not exact; empty if it is.
    """

    exact: bool = False
    worst: float = 0.0
    parameters: int = 0
    atoms: int = 0
    blocks: int = 0
    cut_blocks: int = 0
    largest_atom_share: float = 0.0
    largest_block_share: float = 0.0
    capture_seconds: float = 0.0
    reason: str = ""


@dataclass
class Results:
    """Outputs, gradients and buffers of a run, by name."""

    tensors: dict[str, Tensor]

    def difference(self, other: Results) -> float:
        """The largest difference, relative to the largest number of all; 0.0 means none.

        Raises:
            ValueError: They don't have the same tensors.
        """
        if self.tensors.keys() != other.tensors.keys():
            names = sorted(self.tensors.keys() ^ other.tensors.keys())
            raise ValueError(f"only one of two runs has {', '.join(names[:5])}")
        filled = [tensor for tensor in self.tensors.values() if tensor.numel()]
        largest = max(float(tensor.abs().max()) for tensor in filled)
        pairs = [(tensor, other.tensors[name]) for name, tensor in self.tensors.items()]
        different = [(a.double(), b.double()) for a, b in pairs if not torch.equal(a, b)]
        return max((float((a - b).abs().max()) / largest for a, b in different), default=0.0)


def check(entry: Entry, name: str, num_stages: Sequence[int] = (2, 4)) -> Outcome:
    """Record a network, cut it, run it whole and in stages, and compare.

    Args:
        entry: The network.
        name: What messages call it.
        num_stages: The numbers of stages; at most one per atom.
    """
    torch.manual_seed(0)
    network = entry.build().train()
    begin = time.process_time()
    cut = Program(network, name, Arguments.of(*entry.call(RECORDED)))
    seconds = time.process_time() - begin
    worst = _worst(network, cut, entry.call, num_stages)
    is_exact = worst == 0.0
    if not is_exact:  # only since sums are taken in another order?
        network = network.double()
        doubled = Program(network, name, Arguments.of(*_doubled(entry.call(RECORDED))))
        worst = _worst(network, doubled, lambda n: _doubled(entry.call(n)), num_stages)
    total = sum(parameter.numel() for parameter in network.parameters())
    blocks = blocks_of(network)
    return Outcome(
        exact=is_exact,
        worst=worst,
        parameters=total,
        atoms=len(cut.atoms),
        blocks=len(blocks),
        cut_blocks=num_cut(blocks, cut.atoms),
        largest_atom_share=max(map(size_of, cut.atoms)) / total,
        largest_block_share=(max(map(size_of, blocks), default=0) + embedding(network)) / total,
        capture_seconds=round(seconds, 3),
        reason="" if is_exact else f"not bit by bit; differs by {worst:.0e} in float64",
    )


def _worst(
    network: nn.Module, cut: Program, call: Callable[[int], Call], num_stages: Sequence[int]
) -> float:
    """The largest difference between a network and its stages."""
    torch.manual_seed(1)
    args, kwargs = call(RUN)
    inputs = tuple(tensors_in((args, kwargs)))
    expected = run_whole(network, args, kwargs)
    bounds = [bounds_of(len(cut.atoms), stages) for stages in num_stages]
    return max(expected.difference(run_staged(network, cut, inputs, each)) for each in bounds)


def _doubled(call: Call) -> Call:
    """A call with its floating-point numbers in float64."""
    doubled: Call = pytree.tree_map_only(
        Tensor, lambda t: t.double() if t.is_floating_point() else t, call
    )
    return doubled


def bounds_of(num_atoms: int, stages: int) -> list[int]:
    """Where stages begin, and where the last one ends."""
    stages = min(stages, num_atoms)
    return [round(num_atoms * k / stages) for k in range(stages + 1)]


def run_whole(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Results:
    """The module as it is."""
    with _kept(network) as results:
        torch.manual_seed(2)
        outputs = tensors_in(network(*args, **kwargs))
        _backward(outputs, _gradients(outputs))
        return results(outputs)


def run_staged(network: nn.Module, cut: Program, values: Tensors, bounds: Sequence[int]) -> Results:
    """Stage by stage, as if each were on another device."""
    with _kept(network) as results:
        torch.manual_seed(2)
        received, passed = list[Tensors](), list[Tensors]()
        found: list[dict[OutputRef, Tensor]] = []
        for start, stop in pairwise(bounds):
            received.append(tuple(travelled(t).requires_grad_(t.requires_grad) for t in values))
            values, new = cut.run(received[-1], start, stop)
            passed.append(values)
            found.append(new)
        of_all = {ref: tensor for new in found for ref, tensor in new.items()}
        leaves = [of_all[ref] for ref in cut.outputs]
        pytree.tree_unflatten(leaves, cut.output_spec)  # the structure fits
        of_output = dict(zip(cut.outputs, _gradients(leaves), strict=True))
        of_passed: list[Tensor | None] = [None] * len(values)
        for stage in reversed(range(len(passed))):
            outputs = [*passed[stage], *found[stage].values()]
            with arriving(received[stage]) as arrived:
                _backward(outputs, [*of_passed, *(of_output[ref] for ref in found[stage])])
            of_passed = [None if gradient is None else travelled(gradient) for gradient in arrived]
        return results(leaves)


def travelled(tensor: Tensor) -> Tensor:
    """A tensor as it arrives elsewhere."""
    spec = TensorSpec.of(tensor)
    return spec.from_memory(
        spec.to_memory(tensor.detach()).clone(memory_format=torch.contiguous_format)
    )


@contextmanager
def _kept(network: nn.Module) -> Iterator[Callable[[Sequence[Tensor]], Results]]:
    """While inside, a run may change buffers and gradients; the function tells what it did."""
    before = [(buffer, buffer.clone()) for buffer in network.buffers()]

    def results(outputs: Sequence[Tensor]) -> Results:
        found = {f"output {place}": tensor.detach() for place, tensor in enumerate(outputs)}
        found |= {n: p.grad for n, p in network.named_parameters() if p.grad is not None}
        return Results(found | {name: buffer.clone() for name, buffer in network.named_buffers()})

    try:
        yield results
    finally:
        network.zero_grad()
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _gradients(outputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Of a loss that weighs all numbers of the outputs at random."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        if tensor.requires_grad
        else None
        for tensor in outputs
    ]


def _backward(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    pairs = zip(tensors, gradients, strict=True)
    kept = [(t, gradient) for t, gradient in pairs if gradient is not None and t.requires_grad]
    torch.autograd.backward([t for t, _ in kept], [gradient for _, gradient in kept])


def size_of(part: nn.Module | Atom) -> int:
    """How many numbers the parameters of a part have."""
    return sum(parameter.numel() for parameter in part.parameters())


def embedding(network: nn.Module) -> int:
    """How many numbers the largest module without submodules has: an embedding, or a stem."""
    return max(
        size_of(child) for child in network.modules() if not any(True for _ in child.children())
    )


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The members of the outermost lists of equals: layers, blocks, bottlenecks."""
    lists = (
        child for child in network.modules() if isinstance(child, nn.ModuleList | nn.Sequential)
    )
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for each in lists:
        members = [child for child in each if any(True for _ in child.children())]
        kinds = {type(child) for child in members}
        if each not in inside and len(kinds) == 1 and all(map(size_of, members)):
            found += members
            inside.update(child for member in members for child in member.modules())
    return found


def num_cut(blocks: Sequence[nn.Module], atoms: Sequence[Atom]) -> int:
    """How many blocks don't end in the atom in which another block ends."""
    places = {id(p): place for place, atom in enumerate(atoms) for p in atom.parameters()}
    return len({max(places.get(id(p), -1) for p in block.parameters()) for block in blocks})
