"""What the benchmark of freezing says about its results."""

from __future__ import annotations

import pytest

from benchmarks.freeze.figures import (
    figures_of_accuracy,
    figures_of_emulated,
    figures_of_real,
    figures_of_tuning,
)
from benchmarks.freeze.main import main


def test_figures_are_ratios_of_all_steps() -> None:
    history = [
        {"seconds": 9.0, "num_replicas": 1},
        {"seconds": 1.5, "num_replicas": 2},
        {"seconds": 0.5, "num_replicas": 4},
    ]
    seconds = {"freeze": 0.5, "unpipelined": 0.75, "repack": 0.25, "cache": 0.2}
    runs = {
        method: {"seconds": [1.0, each], "history": history, "ideal": [0.5, 0.1]}
        for method, each in seconds.items()
    }
    runs["baseline"] = {"seconds": [1.0], "history": []}
    found = figures_of_emulated(runs, 4)
    # Ten epochs, the last of those measured stands for all that follow.
    assert found["emulated.4.freeze_over_baseline"] == pytest.approx(10 / 5.5)
    assert found["emulated.4.repack_over_baseline"] == pytest.approx(10 / 3.25)
    assert found["emulated.4.total_over_baseline"] == pytest.approx(10 / 2.8)
    assert found["emulated.4.ideal_over_baseline"] == pytest.approx(10 / 1.4)
    assert found["prefix_in_bubbles_over_unpipelined"] == 1.5
    assert found["transition_seconds"] == 9.0
    assert found["transition_seconds_median"] == 1.5
    # What has not been measured yet is left out.
    assert figures_of_emulated({"baseline": runs["baseline"]}, 4) == {}
    runs["balanced"] = {"seconds": [0.7], "history": []}
    assert figures_of_emulated(runs, 4)["emulated.4.total_over_balanced"] == pytest.approx(7 / 2.8)


def test_real_figures_are_medians_of_rounds_and_accuracies_means_of_seeds() -> None:
    seconds = {"baseline": 6.0, "freeze": 4.0, "repack": 3.0, "cache": 2.0}
    runs = {(m, n): {"seconds": s + n} for m, s in seconds.items() for n in range(1)}
    assert figures_of_real(runs) == {
        "real.freeze_over_baseline": 1.5,
        "real.repack_over_baseline": 2.0,
        "real.cache_over_baseline": 3.0,
    }
    assert figures_of_real({("baseline", 0): {"seconds": 6.0}}) == {}
    accuracies = {("baseline", 0): 0.5, ("cache", 0): 0.51, ("baseline", 1): 0.6, ("cache", 1): 0.6}
    found = figures_of_accuracy({key: {"accuracy": a} for key, a in accuracies.items()})
    assert found["real.accuracy_difference"] == pytest.approx(0.5)
    assert found["real.accuracy_difference_standard_error"] == pytest.approx(0.5)
    rates = {("baseline", 1e-4): {"accuracy": 0.5}, ("baseline", 1e-3): {"accuracy": 0.6}}
    assert figures_of_tuning(rates) == {"real.learning_rate": 1e-3}


def test_nothing_is_measured_without_images(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--parts", "real", "accuracy"]) == 0
    assert not capsys.readouterr().out.strip()
