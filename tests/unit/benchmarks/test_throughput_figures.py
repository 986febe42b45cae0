from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.throughput.entries import TINY_ACTIONS, Entry, comparison
from benchmarks.throughput.figures import (
    Range,
    Result,
    comparison_figures,
    memory_ratio,
    overhead_figures,
    range_of,
    rows_of,
    single_device_figures,
    speed_up,
)
from benchmarks.throughput.table import HEAD, figures_table, table


def result(name: str, *seconds: float, held: tuple[int, ...] = ()) -> Result:
    ranks = tuple({"student": amount, "fixed": 1} for amount in held)
    return Result("byol", Entry(name, name), 8, seconds=seconds, bytes_per_rank=ranks)


def failed(name: str) -> Result:
    return Result("byol", Entry(name, name), 8, failure="rank 0 failed")


def test_range_is_median_smallest_and_largest() -> None:
    assert range_of([4.0, 1.0, 2.0, 3.0]) == Range(2.5, 1.0, 4.0)


def test_ratios_are_taken_within_a_round() -> None:
    # A machine that is slow for the whole of round 2 slows both down and leaves the ratio alone.
    assert speed_up(result("tspipe", 1.0, 10.0), result("ddp", 2.0, 20.0)) == Range(2.0, 2.0, 2.0)


def test_images_count_not_steps() -> None:
    twins = replace(result("twins", 3.0), batch_size=16)  # two trainings, 8 images each
    assert speed_up(result("tspipe", 2.0), twins) == Range(0.75, 0.75, 0.75)


def test_rounds_that_don_t_pair_up_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        speed_up(result("tspipe", 1.0, 1.0), result("ddp", 2.0))


def test_fullest_rank_counts() -> None:
    ours, theirs = result("tspipe", 1.0, held=(29, 59)), result("ddp", 1.0, held=(99, 99))
    assert memory_ratio(ours, theirs) == pytest.approx(0.6)


def test_figures_have_the_names_that_are_quoted() -> None:
    results = [
        result("tspipe", 1.0, held=(50, 50)),
        result("ddp", 1.5, held=(101, 101)),
        result("sequential", 2.0),
    ]
    assert comparison_figures(results) == {
        "byol.tspipe_over_ddp": 1.5,
        "byol.tspipe_over_sequential": 2.0,
        "byol.memory_over_ddp": 0.5,
    }


def test_a_failed_method_has_a_row_and_no_figure() -> None:
    results = [result("tspipe", 1.0), failed("ddp")]
    assert comparison_figures(results) == {}
    assert rows_of(results)[1]["failure"] == "rank 0 failed"


def test_without_tspipe_there_are_no_figures() -> None:
    assert comparison_figures([failed("tspipe"), result("ddp", 1.0)]) == {}
    assert comparison_figures([result("ddp", 1.0)]) == {}


def test_single_device_is_a_ratio_of_step_times() -> None:
    results = [result("tspipe1", 1.02, 2.04), result("plain", 1.0, 2.0)]
    figures = single_device_figures(results)
    assert figures["single_device_over_plain_lightning"] == pytest.approx(1.02)


def test_overhead_is_what_the_pipeline_adds_per_action() -> None:
    results = [result("tspipe", 0.010), result("half", 0.002)]
    assert overhead_figures(results)["action_overhead_ms"] == pytest.approx(8 / TINY_ACTIONS)


def test_rows_hold_medians_and_ranges() -> None:
    rows = rows_of([result("tspipe", 1.0, 2.0, 4.0, held=(9,)), result("ddp", 2.0, 4.0, 4.0)])
    assert rows[0]["images_per_second"] == {"median": 4.0, "min": 2.0, "max": 8.0}
    assert rows[1]["tspipe_over"] == {"median": 2.0, "min": 1.0, "max": 2.0}


def test_table_is_aligned_and_marks_failures() -> None:
    lines = table(rows_of([result("tspipe", 1.0, held=(2_999_999,)), failed("ddp")])).splitlines()
    column = lines[0].index("images/s")
    assert lines[0].split()[0] == HEAD[0]
    assert [line[column:].split("  ")[0] for line in lines[2:]] == ["8.0 [8.0, 8.0]", "failed"]
    assert lines[2].endswith("3.0")


def test_no_figures_make_an_empty_table() -> None:
    assert not figures_table({})


def test_every_number_of_microbatches_is_tried() -> None:
    tried = [entry.options for entry in comparison((1, 2)) if entry.name == "torch_gpipe"]
    assert tried == [(("num_microbatches", 1),), (("num_microbatches", 2),)]
