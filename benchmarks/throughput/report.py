"""What comes out of a run: the JSON and the text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.environment import environment_of
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
        environment = self._environment
        facts = "\n".join(f"{name}: {value}" for name, value in environment.items())
        return f"{table(self.rows)}\n\n{figures_table(self.figures)}\n\n{facts}"

    @property
    def _environment(self) -> dict[str, object]:
        waiting = round(self.background, 4)
        return {**environment_of(PACKAGES), "cores_used_by_waiting_methods": waiting}

    def write(self, path: Path) -> None:
        """Write the JSON to ``path`` and the text beside it."""
        content = {
            "environment": self._environment,
            "figures": self.figures,
            "rows": self.rows,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n")
        path.with_suffix(".txt").write_text(self.text + "\n")
