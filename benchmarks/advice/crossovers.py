"""Where DDP, FSDP2 and a pipeline change places: tables of calculated plans, nothing is run.

    python benchmarks/advice/crossovers.py

A transformer learns from a frozen one of the same size, on eight devices; one thing is varied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lightning_tspipe.cli.comparing import Comparison, compare
from lightning_tspipe.cli.plan_options import Options
from lightning_tspipe.cli.quantities import format_seconds
from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.planning.cluster import Cluster, Link
from lightning_tspipe.planning.data_parallel import DataParallelPlan
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.profile import AtomProfile, NetworkProfile
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.planning.table import megabytes

GB = 10**9
TENSORS = 15
"""Tensors of a layer's width that autograd saves of it; attention keeps no matrix of scores."""


@dataclass(frozen=True)
class Case:
    """What is trained, and on what; float32, AdamW.

    Attributes:
        layers: Layers of each of the two networks.
        width: Features of a token.
        batch: Samples of a batch, of 256 tokens each.
        link: Bytes per second between two devices.
        memory: Bytes of a device.
        devices: Number of devices.
        flops: Operations per second that a device really does.
    """

    layers: int = 24
    width: int = 1024
    batch: int = 256
    link: float = 25e9
    memory: int = 40 * GB
    devices: int = 8
    flops: float = 60e12


VARIED: dict[str, tuple[Sequence[Case], Callable[[Case], str]]] = {
    "memory": (
        [Case(width=width, batch=64) for width in (1024, 2048, 3072, 4096, 6144)],
        lambda case: f"{24 * case.width**2 * 12 / 1e9:.1f} billion parameters each",
    ),
    "link": (
        [Case(link=speed * GB) for speed in (100, 25, 12.5, 6, 3, 1)],
        lambda case: f"{case.link / GB:g} GB/s",
    ),
    "batch size": (
        [Case(batch=batch) for batch in (4, 8, 16, 32, 64, 256, 1024)],
        lambda case: f"{case.batch} samples",
    ),
    "depth": (
        [Case(layers=layers, link=3 * GB) for layers in (4, 8, 12, 24, 48)],
        lambda case: f"{case.layers} layers, at 3 GB/s",
    ),
}
"""What is varied, and how a line is called."""


def network(case: Case, *, trained: bool) -> NetworkProfile:
    """Layers of a transformer, cut behind attention and behind the MLP."""
    tokens, width = 256, case.width

    def half(name: str, matrices: int, scores: int) -> AtomProfile:
        operations = 2 * matrices * width**2 * tokens + 4 * scores * tokens**2 * width
        seconds = operations / case.flops
        times = {size: seconds * size for size in (1, case.batch)}
        twice = {size: 2 * each for size, each in times.items()}
        return AtomProfile(
            name, times,
            backward=twice if trained else {},
            input_backward=times if trained else {},
            weight_backward=times if trained else {},
            output_bytes_per_sample=4 * tokens * width,
            activation_bytes_per_sample=4 * tokens * width * TENSORS // 2,
            parameter_bytes=4 * matrices * width**2,
            trainable_bytes=4 * matrices * width**2 * trained,
        )  # fmt: skip

    layers = range(case.layers)
    halves = (("attention", 4, 1), ("mlp", 8, 0))
    return NetworkProfile(
        tuple(half(f"layers.{layer}.{name}", *each) for layer in layers for name, *each in halves)
    )


def step(case: Case) -> StepProfile:
    """Distillation of a frozen network into one of the same size."""
    return StepProfile(
        network(case, trained=True), network(case, trained=False), (1, 1), (case.batch,),
        paired=False, optimizer_bytes_per_parameter_byte=2.0,
        update_seconds_per_byte=500 / case.flops,
    )  # fmt: skip


def compared(case: Case) -> Comparison:
    """The best pipeline (its schedule is ``tspipe``) beside data parallelism."""
    profile, cluster = step(case), Cluster(case.devices, Link(2e-5, case.link))
    best: Plan | None
    try:
        best = profile.plan(
            case.devices, thorough=False, cluster=cluster, memory_limit=case.memory
        )  # fmt: skip
    except (ConfigurationError, PartitionError):
        best = None
    return compare(profile, cluster, best, Options("", devices=case.devices, memory=case.memory))


def cells(found: Comparison) -> Iterator[str]:
    """A row's cells: each way, and the choice in bold."""
    ways: list[DataParallelPlan | Plan | str | None] = [*found.others.values(), found.pipeline]
    for plan in ways:
        if plan is None:
            yield "does not fit"
        elif isinstance(plan, str):
            yield "cannot be divided"
        elif not isinstance(plan, Plan) and not plan.fits:
            yield f"does not fit ({megabytes(plan.memory_bytes)})"
        else:
            most = max(plan.memory_bytes) if isinstance(plan, Plan) else plan.memory_bytes
            text = f"{format_seconds(plan.step_seconds)}, {megabytes(most)}"
            yield f"**{text}**" if plan is found.choice else text


def main() -> int:
    """Print a table for each thing that is varied."""
    for name, (cases, title) in VARIED.items():
        print(f"\n| {name} | DDP | FSDP2 | `tspipe` |\n|---|---|---|---|")
        for case in cases:
            print(f"| {title(case)} | {' | '.join(cells(compared(case)))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
