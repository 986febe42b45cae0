"""From seconds to figures: medians and ranges of paired ratios, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.throughput.entries import TINY_ACTIONS, Entry


@dataclass(frozen=True, slots=True)
class Range:
    """A median and what it lies between."""

    median: float
    min: float
    max: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.min:.2f}, {self.max:.2f}]"


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured of one method on one workload.

    Attributes:
        workload: Name of the workload.
        entry: The method, in its best variant.
        batch_size: Images of one step over all processes.
        seconds: Seconds per step, one value for each round; empty where the method failed.
        bytes_per_rank: Bytes by purpose that each rank holds for good.
        failure: Why there is nothing else.
    """

    workload: str
    entry: Entry
    batch_size: int
    seconds: tuple[float, ...] = ()
    bytes_per_rank: tuple[Mapping[str, int], ...] = ()
    failure: str | None = None

    @property
    def largest_bytes(self) -> int | None:
        """What the fullest rank holds, where it is known of all of them."""
        if not self.bytes_per_rank:
            return None
        return max(sum(held.values()) for held in self.bytes_per_rank)


def range_of(values: Iterable[float]) -> Range:
    """Median, smallest and largest of at least one value.

    >>> range_of([3.0, 1.0, 2.0])
    Range(median=2.0, min=1.0, max=3.0)
    """
    known = sorted(values)
    return Range(statistics.median(known), known[0], known[-1])


def speed_up(ours: Result, theirs: Result) -> Range | None:
    """Images per second of ``ours`` over ``theirs``, by round; None where one of them failed."""
    if not ours.seconds or not theirs.seconds:
        return None
    pairs = zip(theirs.seconds, ours.seconds, strict=True)
    images = ours.batch_size / theirs.batch_size
    return range_of(images * slow / fast for slow, fast in pairs)


def memory_ratio(ours: Result, theirs: Result) -> float | None:
    """The fullest rank's bytes of ``ours`` over those of ``theirs``."""
    if not ours.largest_bytes or not theirs.largest_bytes:
        return None
    return ours.largest_bytes / theirs.largest_bytes


def comparison_figures(results: Sequence[Result]) -> dict[str, float]:
    """The figures of one workload: TSPipe over every other method, its memory over DDP's."""
    by_name = {result.entry.name: result for result in results}
    ours = by_name.get("tspipe")
    if ours is None:
        return {}
    figures: dict[str, float] = {}
    for name, theirs in by_name.items():
        ratio = speed_up(ours, theirs)
        if name != "tspipe" and ratio is not None:
            figures[f"{ours.workload}.tspipe_over_{name}"] = ratio.median
    if "ddp" in by_name and (memory := memory_ratio(ours, by_name["ddp"])) is not None:
        figures[f"{ours.workload}.memory_over_ddp"] = memory
    return figures


def single_device_figures(results: Sequence[Result]) -> dict[str, float]:
    """The step time of the strategy on one device over plain Lightning's."""
    by_name = {result.entry.name: result for result in results}
    ratio = speed_up(by_name["plain"], by_name["tspipe1"])
    return {} if ratio is None else {"single_device_over_plain_lightning": ratio.median}


def overhead_figures(results: Sequence[Result]) -> dict[str, float]:
    """Milliseconds that the pipeline adds to each action of one rank."""
    by_name = {result.entry.name: result for result in results}
    pipeline, arithmetic = by_name["tspipe"], by_name["half"]
    if not pipeline.seconds or not arithmetic.seconds:
        return {}
    pairs = zip(pipeline.seconds, arithmetic.seconds, strict=True)
    added = range_of(whole - part for whole, part in pairs)
    return {"action_overhead_ms": added.median * 1e3 / TINY_ACTIONS}


def rows_of(results: Sequence[Result]) -> list[dict[str, object]]:
    """One JSON row for each method of a workload."""
    by_name = {result.entry.name: result for result in results}
    return [_row(result, by_name) for result in results]


def _row(result: Result, by_name: Mapping[str, Result]) -> dict[str, object]:
    row: dict[str, object] = {
        "workload": result.workload,
        "method": result.entry.name,
        "variant": dict(result.entry.options),
        "num_ranks": result.entry.num_ranks,
        "batch_size": result.batch_size,
    }
    if result.failure is not None:
        return {**row, "failure": result.failure}
    speed = range_of(result.batch_size / seconds for seconds in result.seconds)
    row |= {
        "images_per_second": asdict(speed),
        "milliseconds_per_step": [round(1e3 * seconds, 3) for seconds in result.seconds],
        "bytes_per_rank": [dict(held) for held in result.bytes_per_rank],
    }
    ours = by_name.get("tspipe")
    if ours is not None and ours != result and (ratio := speed_up(ours, result)) is not None:
        row["tspipe_over"] = asdict(ratio)
    if (ddp := by_name.get("ddp")) and (memory := memory_ratio(result, ddp)):
        row["memory_over_ddp"] = memory
    return row
