"""What atoms would cost on a device that is not here: floating-point operations at a stated rate.

A backward does twice the work of its forward: once for the gradients of the inputs, once for those
of the weights (Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters*,
SC 2021, appendix). Calls without matrix products or convolutions count as free.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.networks.chain import Atom, OutputRef
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.networks.profiler import weigh_atoms
from lightning_tspipe.planning.profile import AtomProfile


def estimate_atoms(  # noqa: PLR0913 - what to price, and how
    atoms: Sequence[Atom],
    inputs: Tensor,
    flops_per_second: float,
    *,
    trainable: bool,
    wanted: Collection[OutputRef] | None = None,
    sizes: Collection[int] = (),
) -> list[AtomProfile]:
    """Price every atom of a chain without running it: networks and inputs may be on ``meta``.

    Args:
        atoms: The chain.
        inputs: What the first atom gets, shape (batch, ...), where the network is.
        flops_per_second: What the device really does, not what its data sheet promises; an
            addition and a multiplication are two.
        trainable: Whether to price backward passes too.
        wanted: The outputs that the loss gets; None stands for all that the atoms emit.
        sizes: Numbers of samples to price, up to that of the input. One that the network can't run
            is left out: BatchNorm refuses a single value per channel. Not given: any number.

    Returns:
        One record per atom, as :func:`~.profiler.profile_atoms` measures them.

    Raises:
        PartitionError: The network can run none of the sizes.
    """
    samples = len(inputs)
    priced = [size for size in sorted(sizes) if _runs(atoms, inputs[:size])] if sizes else [1]
    if not priced:
        raise PartitionError(
            f"the network cannot run {samples} samples or fewer in its present modes; use larger "
            "batches"
        )
    times = sorted({*priced, *([] if sizes else [samples])})
    with torch.set_grad_enabled(trainable):
        whole = inputs[: times[-1]]
        records = weigh_atoms(atoms, whole, wanted)
        flops = _forward_flops(atoms, whole)
    return [
        _priced(record, amount / len(whole) / flops_per_second, times, trainable, place == 0)
        for place, (record, amount) in enumerate(zip(records, flops, strict=True))
    ]


def _runs(atoms: Sequence[Atom], x: Tensor) -> bool:
    received: Tensors = (x,)
    try:
        with torch.no_grad():
            for atom in atoms:
                received, _ = atom(*received)
    except ValueError:  # a BatchNorm that needs more samples
        return False
    return True


def _forward_flops(atoms: Sequence[Atom], x: Tensor) -> list[int]:
    counts = []
    received: Tensors = (x,)
    with torch.no_grad():
        for atom in atoms:
            counter = FlopCounterMode(display=False)
            with counter:
                received, _ = atom(*received)
            counts.append(counter.get_total_flops())
    return counts


def _priced(
    record: AtomProfile,
    seconds: float,
    sizes: Sequence[int],
    trainable: bool,
    is_first: bool,
) -> AtomProfile:
    def times(factor: float) -> dict[int, float]:
        return {size: factor * seconds * size for size in sizes}

    if not trainable:
        return replace(record, forward=times(1))
    inputs = 0 if is_first else 1  # nobody needs the gradient of the images
    weights = 1 if record.trainable_bytes else 0
    return replace(
        record,
        forward=times(1),
        backward=times(inputs + weights),
        input_backward=times(inputs),
        weight_backward=times(weights),
    )
