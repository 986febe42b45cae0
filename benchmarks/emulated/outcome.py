"""What came out: figures, table, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.emulated.rows import Row
from benchmarks.environment import environment_of

PACKAGES = ("torch", "torchvision", "lightning", "lightly")


@dataclass
class Outcome:
    """One model on a number of devices.

    Attributes:
        row: The model.
        num_devices: Emulated devices.
        work: Seconds of one device for a whole step.
        emulated: Seconds per step by method.
        simulated: The same, as planned.
        failures: What went wrong, by method.
    """

    row: Row
    num_devices: int
    work: float
    emulated: dict[str, float] = field(default_factory=dict)
    simulated: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def figures(self) -> Iterator[tuple[str, float]]:
        """The row's figures by name."""
        ours = self.emulated.get("tspipe")
        if ours is None:
            return
        prefix = f"{self.row.name}.{self.num_devices}"
        for method in ("sequential", "gpipe", "gpipe_joined"):
            if method in self.emulated:
                yield f"{prefix}.tspipe_over_{method}", self.emulated[method] / ours
        yield f"{prefix}.utilization", self.work / (self.num_devices * ours)
        yield f"{prefix}.simulated_over_emulated", self.simulated["tspipe"] / ours


@dataclass
class Report:
    """Collects outcomes.

    Attributes:
        seconds_per_device: What a step takes if no device ever waits, for each device.
        fraction: Of the real bytes that travelled.
        real: Simulated over measured seconds per step of real runs on two processes.
        seconds: What all of it took.
    """

    seconds_per_device: float
    fraction: float
    outcomes: list[Outcome] = field(default_factory=list)
    real: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Add one model on a number of devices."""
        self.outcomes.append(outcome)

    @property
    def complete(self) -> bool:
        """Whether no method failed."""
        return not any(outcome.failures for outcome in self.outcomes)

    @property
    def figures(self) -> dict[str, float]:
        """Everything that the project quotes."""
        found = dict(pair for outcome in self.outcomes for pair in outcome.figures)
        for num_devices in {outcome.num_devices for outcome in self.outcomes}:
            used = [
                value
                for name, value in found.items()
                if name.startswith("kd_") and name.endswith(f".{num_devices}.utilization")
            ]
            if used:
                found[f"kd.{num_devices}.utilization"] = min(used)
        ratios = [
            outcome.simulated[method] / seconds
            for outcome in self.outcomes
            for method, seconds in outcome.emulated.items()
        ]
        if ratios:
            found["simulated_over_emulated"] = median(ratios)
            found["simulated_over_emulated_min"] = min(ratios)
            found["simulated_over_emulated_max"] = max(ratios)
        if self.real:
            found |= {f"{name}.simulated_over_real": ratio for name, ratio in self.real.items()}
            found["simulated_over_real"] = median(self.real.values())
        return found

    @property
    def text(self) -> str:
        """The table, and what it was measured on."""
        facts = "\n".join(f"{name}: {value}" for name, value in environment_of(PACKAGES).items())
        real = ", ".join(f"{name} {ratio:.2f}" for name, ratio in self.real.items())
        return (
            f"EMULATED devices: each action sleeps for its profiled time; "
            f"{self.fraction:.1%} of the real bytes travel.\n\n{self._table}\n\n"
            f"simulated over real, two processes: {real or '-'}\n\n{facts}"
        )

    @property
    def _table(self) -> str:
        rows = [
            ("model", "devices", "over sequential", "paper's", "over gpipe", "joined",
             "utilization", "simulated/emulated"),
        ]  # fmt: skip
        for outcome in self.outcomes:
            figures = {name.rpartition(".")[2]: value for name, value in outcome.figures}
            rows.append((
                outcome.row.name,
                str(outcome.num_devices),
                _cell(figures.get("tspipe_over_sequential")),
                _cell(outcome.row.paper.get(outcome.num_devices)),
                _cell(figures.get("tspipe_over_gpipe")),
                _cell(figures.get("tspipe_over_gpipe_joined")),
                _cell(figures.get("utilization")),
                _cell(figures.get("simulated_over_emulated")),
            ))  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )

    def write(self, path: Path) -> None:
        """Write the JSON to ``path`` and the text beside it."""
        content = {
            "environment": environment_of(PACKAGES),
            "emulated": True,
            "seconds_per_device": self.seconds_per_device,
            "fraction_of_bytes": self.fraction,
            "measured_in_seconds": round(self.seconds),
            "figures": self.figures,
            "rows": [
                {
                    "model": outcome.row.name,
                    "devices": outcome.num_devices,
                    "emulated_seconds": outcome.emulated,
                    "simulated_seconds": outcome.simulated,
                    "failures": outcome.failures,
                }
                for outcome in self.outcomes
            ],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        path.with_suffix(".txt").write_text(self.text + "\n", encoding="utf-8")


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
