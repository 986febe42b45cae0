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

from lightning_tspipe.networks.chain import Atom, OutputRef
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.networks.profiler import weigh_atoms
from lightning_tspipe.planning.profile import AtomProfile


def estimate_atoms(
    atoms: Sequence[Atom],
    inputs: Tensor,
    flops_per_second: float,
    *,
    trainable: bool,
    wanted: Collection[OutputRef] | None = None,
) -> list[AtomProfile]:
    """Price every atom of a chain without running it: networks and inputs may be on ``meta``.

    Args:
        atoms: The chain.
        inputs: What the first atom gets, shape (batch, ...), where the network is.
        flops_per_second: What the device really does, not what its data sheet promises; an
            addition and a multiplication are two.
        trainable: Whether to price backward passes too.
        wanted: The outputs that the loss gets; None stands for all that the atoms emit.

    Returns:
        One record per atom, as :func:`~.profiler.profile_atoms` measures them.
    """
    with torch.set_grad_enabled(trainable):
        records = weigh_atoms(atoms, inputs, wanted)
        flops = _forward_flops(atoms, inputs)
    samples = len(inputs)
    return [
        _priced(record, amount / samples / flops_per_second, samples, trainable, place == 0)
        for place, (record, amount) in enumerate(zip(records, flops, strict=True))
    ]


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
    samples: int,
    trainable: bool,
    is_first: bool,
) -> AtomProfile:
    def times(factor: float) -> dict[int, float]:
        return {size: factor * seconds * size for size in {1, samples}}

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
