"""What the benchmark of heads on a trunk makes of seconds and bytes."""

from __future__ import annotations

import pytest

from benchmarks.fanout.figures import Measured, curves_of, figures_of, row_of, text_of


def measured(fanout: float) -> Measured:
    """A trunk of three seconds and heads of one."""
    seconds = {"fanout": fanout, "independent": 4.0, "trunk": 3.0, "heads": 1.0}
    return Measured(
        {method: [value, 2 * value] for method, value in seconds.items()},
        {"fanout": 60, "independent": 100},
        {"fanout": 80, "independent": 100},
        label_bytes=24,
        labels=24,
    )


def test_figures_compare_with_independent_runs_and_the_ideal() -> None:
    real = {("linear", 32): measured(2.5), ("stage", 32): measured(2.0)}
    found = figures_of(real)
    assert found["real.linear.ideal"] == (3 / 2 + 1) / (3 + 1)
    assert found["real.time_over_independent"] == 2.5 / 4
    assert found["real.linear.fraction_of_ideal"] == 1.0
    assert found["real.stage.fraction_of_ideal"] == 1.25
    assert found["real.fraction_of_ideal"] == 1.0
    assert found["real.memory_over_independent"] == 0.6
    assert found["real.label_copies_on_the_wire"] == 1.0
    precomputed = (3 / 2 + 10) / (10 * 2.5)
    assert found["real.linear.precomputed_10_epochs_over_fanout"] == pytest.approx(precomputed)


def test_rows_are_drawn_and_printed() -> None:
    rows = [row_of(name, size, measured(2.5)) for name in ("linear", "stage") for size in (1, 2)]
    curves = curves_of(rows)
    assert curves["time over independent runs"]["linear, ideal"].values == (0.625, 0.625)
    assert curves["peak memory over independent runs"]["stage"].steps == (1.0, 2.0)
    text = text_of({"rows": rows, "figures": {"a": 1.0}, "environment": {"cores": 2}})
    assert "0.625-0.625" in text
    assert text.endswith("a: 1.0\n\ncores: 2")
