"""What comes out of a run: the JSON and the text."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.throughput.figures import Result, rows_of
from benchmarks.throughput.table import figures_table, table

PACKAGES = ("torch", "torchvision", "lightning", "lightly")


@dataclass
class Report:
    """Collects contests.

    Attributes:
        figures: The numbers that the project quotes.
        rows: One for each method of each contest.
        background: The largest share of a core that waiting methods used.
    """

    figures: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, object]] = field(default_factory=list)
    background: float = 0.0

    def add(self, results: Sequence[Result], figures: dict[str, float], background: float) -> None:
        """Add one contest."""
        self.figures |= figures
        self.rows += rows_of(results)
        self.background = max(self.background, background)

    @property
    def complete(self) -> bool:
        """Whether no method failed."""
        return not any("failure" in row for row in self.rows)

    @property
    def text(self) -> str:
        """The tables, and what they were measured on."""
        environment = environment_of(self.background)
        facts = "\n".join(f"{name}: {value}" for name, value in environment.items())
        return f"{table(self.rows)}\n\n{figures_table(self.figures)}\n\n{facts}"

    def write(self, path: Path) -> None:
        """Write the JSON to ``path`` and the text beside it."""
        content = {
            "environment": environment_of(self.background),
            "figures": self.figures,
            "rows": self.rows,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n")
        path.with_suffix(".txt").write_text(self.text + "\n")


def environment_of(background: float) -> dict[str, object]:
    """Machine, versions, date and command."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads_per_process": 1,
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "command": f"python {shlex.join(sys.argv)}",
        "cores_used_by_waiting_methods": round(background, 4),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
