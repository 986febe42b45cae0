"""From seconds and bytes to figures, rows and drawings; nothing here measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from lightning_tspipe.plots import Curve

METHODS = ("fanout", "independent", "trunk", "heads")
NUM_EPOCHS = 10
"""Of the comparison with features that are computed once."""
WORKLOADS = ("linear", "stage")

Row = dict[str, Any]


@dataclass
class Measured:
    """What came out of one workload at one batch size.

    Attributes:
        seconds: Per step, by method and round.
        peak_bytes: Of all processes together, by method.
        resident_bytes: The same as the system sees it.
        label_bytes: That left the data rank in a step.
        labels: Bytes of a batch's labels.
        placed: Of the fan-out: the first atom of the trunk's second part, how many of the first
            ones go through in pieces, and how many pieces.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    resident_bytes: dict[str, int] = field(default_factory=dict)
    label_bytes: int = 0
    labels: int = 1
    placed: dict[str, int] = field(default_factory=dict)

    def ratios(self, method: str, other: str) -> list[float]:
        """Round by round."""
        pairs = zip(self.seconds[method], self.seconds[other], strict=True)
        return [own / theirs for own, theirs in pairs]

    @property
    def ideals(self) -> list[float]:
        """(T/2 + h) / (T + h) of two heads on two devices, round by round."""
        both = zip(self.seconds["trunk"], self.seconds["heads"], strict=True)
        return [(trunk / 2 + head) / (trunk + head) for trunk, head in both]

    @property
    def precomputed(self) -> list[float]:
        """Epochs on features that were computed once, on all devices, over as many of ours."""
        parts = (self.seconds[name] for name in ("trunk", "heads", "fanout"))
        return [
            (trunk / 2 + NUM_EPOCHS * head) / (NUM_EPOCHS * ours)
            for trunk, head, ours in zip(*parts, strict=True)
        ]

    def memory(self, method: str = "fanout", other: str = "independent") -> float:
        """How much all processes of a method hold, over those of another one."""
        return self.peak_bytes[method] / self.peak_bytes[other]

    def resident(self, method: str = "fanout", other: str = "independent") -> float:
        """The same as the system sees it."""
        return self.resident_bytes[method] / self.resident_bytes[other]


def figures_of(real: Mapping[tuple[str, int], Measured]) -> dict[str, float]:
    """Medians over the batch sizes of medians over the rounds."""
    figures: dict[str, float] = {}
    for workload in WORKLOADS:
        own = [measured for (name, _), measured in real.items() if name == workload]
        times = [median(m.ratios("fanout", "independent")) for m in own]
        ideals = [median(m.ideals) for m in own]
        reached = [ideal / ours for ideal, ours in zip(ideals, times, strict=True)]
        figures |= {
            f"real.{workload}.time_over_independent": median(times),
            f"real.{workload}.ideal": median(ideals),
            f"real.{workload}.fraction_of_ideal": median(reached),
            f"real.{workload}.fraction_of_ideal_worst": min(reached),
            f"real.{workload}.memory_over_independent": median(m.memory() for m in own),
            f"real.{workload}.resident_over_independent": median(m.resident() for m in own),
            f"real.{workload}.precomputed_{NUM_EPOCHS}_epochs_over_fanout": median(
                median(m.precomputed) for m in own
            ),
        }
    copies = [m.label_bytes / m.labels for m in real.values()]
    figures |= {
        "real.time_over_independent": figures["real.linear.time_over_independent"],
        "real.memory_over_independent": figures["real.linear.memory_over_independent"],
        "real.fraction_of_ideal": min(figures[f"real.{w}.fraction_of_ideal"] for w in WORKLOADS),
        "real.label_copies_on_the_wire": max(copies),
    }
    return {name: round(value, 4) for name, value in figures.items()}


def row_of(workload: str, size: int, measured: Measured) -> Row:
    """One workload at one batch size."""
    ratios = measured.ratios("fanout", "independent")
    return {
        "workload": workload,
        "batch_size": size,
        **{
            f"{method}_ms": round(1e3 * median(values), 1)
            for method, values in measured.seconds.items()
        },
        "time_over_independent": round(median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
        "ideal": round(median(measured.ideals), 3),
        **{
            f"{method}_peak_mb": round(measured.peak_bytes[method] / 1e6, 1)
            for method in ("fanout", "independent")
        },
        "memory_over_independent": round(measured.memory(), 3),
        "resident_over_independent": round(measured.resident(), 3),
        "precomputed_over_fanout": round(median(measured.precomputed), 3),
        **measured.placed,
    }


def curves_of(rows: Sequence[Row]) -> dict[str, dict[str, Curve]]:
    """Time and memory over those of independent runs, against batch size, by workload."""
    found: dict[str, dict[str, Curve]] = {}
    lines = [
        ("time over independent runs", "time_over_independent", "{}"),
        ("time over independent runs", "ideal", "{}, ideal"),
        ("peak memory over independent runs", "memory_over_independent", "{}"),
    ]
    for panel, column, label in lines:
        for workload in WORKLOADS:
            own = [row for row in rows if row["workload"] == workload and column in row]
            sizes = tuple(float(row["batch_size"]) for row in own)
            curve = Curve(sizes, (), tuple(float(row[column]) for row in own))
            found.setdefault(panel, {})[label.format(workload)] = curve
    return found


def text_of(content: Mapping[str, Any]) -> str:
    """Tables of the rows, which have some columns in common each, then figures and machine."""
    tables: dict[tuple[str, ...], list[Row]] = {}
    for row in content["rows"]:
        tables.setdefault(tuple(row), []).append(row)
    parts = []
    for columns, rows in tables.items():
        cells = [columns, *(tuple(_cell(row[name]) for name in columns) for row in rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
        parts.append("\n".join(_line(line, widths) for line in cells))
    parts += [
        "\n".join(f"{key}: {value}" for key, value in content[name].items())
        for name in ("figures", "environment")
    ]
    return "\n\n".join(parts)


def _cell(value: object) -> str:
    return "-".join(map(str, value)) if isinstance(value, list) else str(value)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
