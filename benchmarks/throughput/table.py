"""The rows of the JSON as a text table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEAD = ("workload", "method", "variant", "images/s", "TSPipe is faster by", "MB per rank", "of DDP")

FIXED = {"schedule", "state_limit", "split_backward"}
"""Options that belong to a method's name."""
Row = Mapping[str, Any]  # as in the JSON


def table(rows: Sequence[Row]) -> str:
    """Aligned text, one line for each row; ranges read ``median [smallest, largest]``."""
    lines = [HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join(_line(cells, widths) for cells in lines)


def figures_table(figures: Mapping[str, float]) -> str:
    """The figures, one for each line."""
    width = max((len(name) for name in figures), default=0)
    return "\n".join(f"{name:<{width}}  {value:.3f}" for name, value in figures.items())


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join(padded).rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    options = (f"{name}={value}" for name, value in row["variant"].items() if name not in FIXED)
    name = (row["workload"], row["method"], " ".join(options))
    if "failure" in row:
        return (*name, "failed", "", "", "")
    largest = max((sum(held.values()) for held in row["bytes_per_rank"]), default=0)
    memory = row.get("memory_over_ddp")
    return (
        *name,
        _range(row["images_per_second"], digits=1),
        _range(row.get("tspipe_over"), digits=2),
        f"{largest / 1e6:.1f}",
        "" if memory is None else f"{memory:.2f}",
    )


def _range(values: Mapping[str, float] | None, digits: int) -> str:
    if values is None:
        return ""
    median, low, high = (f"{values[name]:.{digits}f}" for name in ("median", "min", "max"))
    return f"{median} [{low}, {high}]"
