"""Tables and amounts as text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines with aligned columns.

    >>> aligned([("rank", "state"), ("0", "1.0 MB")])
    ['rank  state', '0     1.0 MB']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def megabytes(amount: float) -> str:
    """Format bytes for people.

    >>> megabytes(1_500_000)
    '1.5 MB'
    """
    return f"{amount / 1e6:,.1f} MB" if amount < 1e9 else f"{amount / 1e9:,.2f} GB"
