"""Pipe-BD's four workloads as floating-point operations and bytes (Jang et al., DATE 2023)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.relay.workloads import module
from lightning_tspipe.ir.shares import largest_share
from lightning_tspipe.planning.relay import BlockProfile, RelayProfile

NUM_DEVICES = 4
BATCH_SIZE = 256
FLOPS_PER_SECOND = 1.0e13
"""Of one device, what convolutions really reach."""
KERNEL_SECONDS = 1.0e-5
"""Of each layer besides its arithmetic, however few samples it gets: starting a kernel."""
NUM_OPERATIONS = 6
"""Of a mixed cell, of which a step runs one, drawn at random, as the paper's search does."""


@dataclass(frozen=True)
class Paper:
    """One workload.

    Attributes:
        name: In the figures.
        workload: Whose blocks.
        pixels: Height and width.
        images_per_second: What the machine's loader processes bring, all together.
        over_dp: The paper's speed-up over data parallelism, on 4 GPUs.
    """

    name: str
    workload: str
    pixels: int
    images_per_second: float
    over_dp: float


PAPERS = (
    Paper("nas_cifar", "nas", 32, 40_000, 3.1),
    Paper("nas_imagenet", "nas", 224, 4_000, 4.4),
    Paper("compression_cifar", "compression", 32, 40_000, 7.3),
    Paper("compression_imagenet", "compression", 224, 4_000, 3.8),
)


def profile(paper: Paper) -> RelayProfile:
    """What its blocks cost on a device, for each share of a batch."""
    made = module(paper.workload).to("meta").eval()
    x = torch.zeros(1, 3, paper.pixels, paper.pixels, device="meta")
    sizes = sorted({largest_share(width, BATCH_SIZE) for width in range(1, NUM_DEVICES + 1)})
    paths = NUM_OPERATIONS if paper.workload == "nas" else 1
    blocks = []
    for pair in made.block_pairs:
        input_bytes = x.nbytes
        student, _ = _priced(pair.student, x, sizes, paths)
        teacher, x = _priced(pair.teacher, x, sizes, 1)
        gradients = sum(p.nbytes for p in pair.student.parameters())
        times = {n: 3 * seconds for n, seconds in student.items()}  # a backward is two forwards
        blocks.append(BlockProfile(pair.name, teacher, times, 0.0, input_bytes, gradients))
    return RelayProfile(tuple(blocks), BATCH_SIZE, latency=1e-5, bandwidth=12e9)


@torch.no_grad()
def _priced(
    block: nn.Module, x: torch.Tensor, sizes: list[int], paths: int
) -> tuple[dict[int, float], torch.Tensor]:
    """Seconds by the number of samples, and what comes out of one."""
    counter = FlopCounterMode(display=False)
    with counter:
        y = block(x)
    flops = counter.get_total_flops() / paths
    layers = sum(1 for m in block.modules() if not list(m.children())) / paths
    return {n: n * flops / FLOPS_PER_SECOND + layers * KERNEL_SECONDS for n in sizes}, y


def load_seconds(paper: Paper) -> float:
    """To read one batch."""
    return BATCH_SIZE / paper.images_per_second


def scaled(profile: RelayProfile, factor: float) -> RelayProfile:
    """The same proportions at another speed."""
    return replace(
        profile,
        blocks=tuple(
            replace(
                block,
                teacher={n: factor * s for n, s in block.teacher.items()},
                student={n: factor * s for n, s in block.student.items()},
            )
            for block in profile.blocks
        ),
        latency=factor * profile.latency,
        bandwidth=profile.bandwidth / factor,
    )
