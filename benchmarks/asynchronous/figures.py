"""The figures that the project quotes."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.asynchronous.entries import NUM_EMULATED, POLICIES, SYNCHRONOUS
from benchmarks.throughput.figures import Result, speed_up


def figures_of_real(results: Sequence[Result]) -> dict[str, float]:
    """PipeOptim, and windows, over GPipe and DDP, in images per second."""
    by_name = {result.entry.name: result for result in results}
    ratios = {
        f"real.{one}_over_{other}": speed_up(by_name[one], by_name[other])
        for one in ("pipeoptim", SYNCHRONOUS)
        for other in ("gpipe4", "ddp")
    }
    return {name: ratio.median for name, ratio in ratios.items() if ratio}


def figures_of_emulated(results: Sequence[Result]) -> dict[str, float]:
    """The policies over GPipe on emulated devices, and the weights that they keep."""
    by_name = {result.entry.name: result for result in results}
    found: dict[str, float] = {}
    for policy in (*POLICIES, SYNCHRONOUS):
        result = by_name[policy]
        ratio = speed_up(result, by_name["gpipe4"])
        if ratio is not None:
            found[f"emulated.{NUM_EMULATED}.{policy}_over_gpipe4"] = ratio.median
        if result.bytes_per_rank:
            versions = (held["student"] / held["gradients"] for held in result.bytes_per_rank)
            found[f"weight_versions.{policy}"] = max(versions)
    return found
