"""What each atom of a network needs, found on tensors without values: bytes, operations, kinds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.networks.fakes import Fakes
from lightning_tspipe.networks.kinds import kind_of
from lightning_tspipe.networks.program import Atom, Program
from lightning_tspipe.networks.swap import without_values
from lightning_tspipe.networks.tape import memory_of
from lightning_tspipe.planning.profile import AtomProfile


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


def _weighed(program: Program, atoms: Sequence[Atom], received: Tensors, number: int) -> Weighed:
    counted = {memory_of(tensor) for tensor in state_of(program)}
    saved: list[Tensor] = []
    alive: list[object] = []  # so that no address is used twice
    weighed = Weighed(number, [], [])

    def pack(tensor: Tensor) -> None:
        # Handing the tensor back would tie it to its own graph, a cycle that nothing collects.
        whole = tensor if tensor._base is None else tensor._base  # noqa: SLF001 - no public way
        if not isinstance(whole, nn.Parameter):
            saved.append(tensor)

    for index, atom in enumerate(atoms):
        weighed.kinds.append(kind_of(program, index, received))
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
        weighed.records.append(record)
        received = cut_off(passed)
    return weighed


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
