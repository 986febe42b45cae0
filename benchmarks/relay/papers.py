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
        dataset: What is read.
        over_dp: The paper's speed-up over data parallelism, on 4 GPUs.
    """

    name: str
    workload: str
    dataset: str
    over_dp: float

    @property
    def pixels(self) -> int:
        """Height and width."""
        return {"cifar": 32, "imagenet": 224}[self.dataset]


PAPERS = (
    Paper("nas_cifar", "nas", "cifar", 3.1),
    Paper("nas_imagenet", "nas", "imagenet", 4.4),
    Paper("compression_cifar", "compression", "cifar", 7.3),
    Paper("compression_imagenet", "compression", "imagenet", 3.8),
)
EMULATED_RATES = {"cifar": 40_000.0, "imagenet": 4_000.0}
"""Images per second of all loader processes together, as the emulation has them."""
SLOWEST_RATES = {"cifar": 6 * 50_000 / 31.5, "imagenet": 6 * 1_281_167 / (62 * 60)}
"""The paper's loaders brought at least as many: in data parallelism six blocks each read all images
within the 31.5 s and the 62 min of the search's epochs."""


EVEN_BLOCKS = 8


def even_profile() -> RelayProfile:
    """Equal blocks, that all devices can be kept busy with."""
    times = dict.fromkeys(_sizes(), 1.0)
    block = BlockProfile("even", {n: s / 4 for n, s in times.items()}, times)
    return RelayProfile((block,) * EVEN_BLOCKS, BATCH_SIZE)


def _sizes() -> list[int]:
    return sorted({largest_share(width, BATCH_SIZE) for width in range(1, NUM_DEVICES + 1)})


def profile(paper: Paper) -> RelayProfile:
    """What its blocks cost on a device, for each share of a batch."""
    made = module(paper.workload).to("meta").eval()
    x = torch.zeros(1, 3, paper.pixels, paper.pixels, device="meta")
    sizes = _sizes()
    paths = NUM_OPERATIONS if paper.workload == "nas" else 1
    blocks = []
    for pair in made.block_pairs(x):
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
