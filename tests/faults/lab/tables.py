"""What was seen in many draws, as a table; and the place in the guide where it goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.lab.drawing import FAULTS, MOMENTS

BEGIN, END = "<!-- laboratory: begin -->", "<!-- laboratory: end -->"
_RESUME = "resume"


@dataclass(frozen=True)
class Result:
    """A draw that is over.

    Attributes:
        number: Of the draw.
        text: The draw in words.
        command: What repeats it.
        fault: Its kind.
        moment: When it happened.
        seconds: That the whole draw took.
        failures: What is wrong, by check.
        not_possible: Why it was not tried; "" if it was.
        labels: What else it is counted under: mode, strategy, launcher, ranks.
    """

    number: int
    text: str
    command: str
    fault: str
    moment: str
    seconds: float
    failures: Mapping[str, str] = field(default_factory=dict)
    not_possible: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def survived(self) -> bool:
        """Whether nothing is wrong."""
        return not self.failures and not self.not_possible


Cell = tuple[int, int]


def count(results: Iterable[Result]) -> dict[tuple[str, str], Cell]:
    """How many were tried and how many survived, by fault and moment."""
    cells: dict[tuple[str, str], Cell] = {}
    for result in results:
        if not result.not_possible:
            tried, survived = cells.get((result.fault, result.moment), (0, 0))
            cells[result.fault, result.moment] = tried + 1, survived + result.survived
    return cells


def _total(cells: Iterable[Cell]) -> Cell:
    found = list(cells)
    return sum(tried for tried, _ in found), sum(survived for _, survived in found)


def _word(cell: Cell) -> str:
    tried, survived = cell
    return f"{survived} of {tried}" if tried else ""


def rows(results: Sequence[Result]) -> list[list[str]]:
    """By fault and moment: survived of tried, with sums."""
    cells = count(results)
    moments = [m for m in (*MOMENTS, _RESUME) if any(moment == m for _, moment in cells)]
    found = [["survived of tried", *moments, "all"]]
    for fault in FAULTS:
        row = [cells.get((fault, moment), (0, 0)) for moment in moments]
        if any(tried for tried, _ in row):
            found.append([fault, *map(_word, row), _word(_total(row))])
    sums = [_total(cell for (_, m), cell in cells.items() if m == moment) for moment in moments]
    found.append(["all", *map(_word, sums), _word(_total(cells.values()))])
    return found


def by_label(results: Sequence[Result]) -> list[list[str]]:
    """The same by what was trained and who started it: one line for each label."""
    groups: dict[str, dict[str, list[Cell]]] = {}
    for result in results:
        for label, value in result.labels.items():
            if not result.not_possible:
                cell = (1, int(result.survived))
                groups.setdefault(label, {}).setdefault(value, []).append(cell)
    return [
        [label, ", ".join(f"{v}: {_word(_total(c))}" for v, c in sorted(values.items()))]
        for label, values in groups.items()
    ]


def as_text(table: Sequence[Sequence[str]]) -> str:
    """Columns of equal width."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
             for row in table]  # fmt: skip
    return "\n".join(lines)


def as_markdown(table: Sequence[Sequence[str]]) -> str:
    """A table of the guide."""
    head, *rest = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([head, "|---" * len(table[0]) + "|", *rest])


def put_into(path: Path, text: str) -> None:
    """Put a text between the two marks of a file.

    Raises:
        ValueError: The file has no such marks.
    """
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no place for the table: a line {BEGIN} and a line {END}")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
