"""What each atom of a network needs, found on tensors without values: bytes, operations, kinds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.networks.fakes import Fakes
from lightning_tspipe.networks.guards import one_moment
from lightning_tspipe.networks.program import Atom, Program
from lightning_tspipe.networks.swap import without_values
from lightning_tspipe.networks.tape import memory_of
from lightning_tspipe.planning.profile import AtomProfile
from lightning_tspipe.profiling.kinds import kind_of


class Weighed(NamedTuple):
    """What is known of atoms without running them.

    Attributes:
        number: Samples that it was found with.
        records: A profile without times of each atom.
        kinds: The kind of each atom; None: it is like no other.
    """

    number: int
    records: list[AtomProfile]
    kinds: list[str | None]


def weigh(
    program: Program, atoms: Sequence[Atom], inputs: Tensors, sizes: Sequence[int]
) -> Weighed:
    """Weigh the first atoms of a network, with gradients if these are enabled.

    Args:
        program: The network.
        atoms: Its first atoms.
        inputs: What the first one gets, of shapes (batch, ...).
        sizes: Numbers of samples; the first that the network can run is taken (BatchNorm refuses a
            single value per channel).

    Raises:
        PartitionError: It can run none.
    """
    for number in sizes:
        with suppress(ValueError), without_weights(program, inputs, number) as received:
            return _weighed(program, atoms, received, number)
    raise PartitionError(
        f"the network cannot run {len(inputs[0])} samples or fewer in its present modes; use "
        "larger batches"
    )


def runs(program: Program, num_atoms: int, inputs: Tensors, number: int) -> bool:
    """Whether the first atoms can run a number of samples."""
    with torch.no_grad(), suppress(ValueError):  # a BatchNorm that needs more samples
        with without_weights(program, inputs, number) as received:
            program.run(received, 0, num_atoms)
        return True
    return False


class _Passed(NamedTuple):
    """What an atom passed on, for atoms that do the same.

    Attributes:
        record: Its profile.
        tensors: What it passed on.
        counted: For each of those, whether its memory was counted by then.
    """

    record: AtomProfile
    tensors: Tensors
    counted: list[bool]

    @property
    def is_plain(self) -> bool:
        """Whether each of the tensors has memory of its own, all of which it is."""
        own = {memory_of(tensor) for tensor in self.tensors}
        whole = all(t.untyped_storage().nbytes() == t.nbytes for t in self.tensors)
        return whole and len(own) == len(self.tensors)

    def again(self, counted: set[int]) -> Tensors:
        """What another atom that does the same passes on, in memory of its own."""
        made = tuple(
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            for t in self.tensors
        )
        counted |= {memory_of(t) for t, is_kept in zip(made, self.counted, strict=True) if is_kept}
        pairs = zip(made, self.tensors, strict=True)
        return tuple(tensor.requires_grad_(was.requires_grad) for tensor, was in pairs)


def _weighed(program: Program, atoms: Sequence[Atom], received: Tensors, number: int) -> Weighed:
    counted = {memory_of(tensor) for tensor in state_of(program)}
    known: dict[object, _Passed] = {}
    alive: list[object] = []  # so that no address is used twice
    weighed = Weighed(number, [], [])
    with one_moment():
        for index, atom in enumerate(atoms):
            kind = kind_of(program, index, received)
            # What was kept for a backward before is not kept once more.
            key = kind, *(memory_of(tensor) in counted for tensor in received)
            found = None if atom.num_outputs else known.get(key)  # those are weighed, too
            if found is None:
                record, passed = _run(program, index, received, number, counted, alive)
                found = _Passed(record, passed, [memory_of(t) in counted for t in passed])
                if kind is not None and found.is_plain:
                    known[key] = found
            else:
                record, passed = replace(found.record, name=atom.name), found.again(counted)
            weighed.kinds.append(kind)
            weighed.records.append(record)
            alive += [received, passed]
            received = cut_off(passed)
    return weighed


def _run(  # noqa: PLR0913, PLR0917 - what is run, and what is known by then
    program: Program,
    index: int,
    received: Tensors,
    number: int,
    counted: set[int],
    alive: list[object],
) -> tuple[AtomProfile, Tensors]:
    """Run an atom: its profile without times, and what it passes on."""
    atom, saved = program.atoms[index], list[Tensor]()

    def pack(tensor: Tensor) -> None:
        # Handing the tensor back would tie it to its own graph, a cycle that nothing collects.
        whole = tensor if tensor._base is None else tensor._base  # noqa: SLF001 - no public way
        if not isinstance(whole, nn.Parameter):
            saved.append(tensor)

    counter = FlopCounterMode(display=False)
    with counter, saved_tensors_hooks(pack, lambda nothing: nothing):
        passed, results = program.run(received, index, index + 1)
    alive += [results, *saved]
    storages = {memory_of(tensor): tensor.untyped_storage().nbytes() for tensor in saved}
    kept = sum(nbytes for key, nbytes in storages.items() if key not in counted)
    counted.update(storages)
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
    return record, passed


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def cut_off(passed: Tensors) -> Tensors:
    """The same values as the leaves of the next atom's graph."""
    return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in passed)


def state_of(program: Program) -> list[Tensor]:
    """The parameters and buffers of a network."""
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
def without_weights(program: Program, inputs: Tensors, number: int) -> Iterator[Tensors]:
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
