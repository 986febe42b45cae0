"""What the asynchronous benchmark says about its results."""

from __future__ import annotations

import pytest

from benchmarks.asynchronous.accuracy import figures_of
from benchmarks.asynchronous.entries import EMULATED, REAL
from benchmarks.asynchronous.figures import figures_of_emulated, figures_of_real
from benchmarks.throughput.figures import Result

HELD = {"student": 30, "gradients": 10, "optimizer": 0, "fixed": 0}


def test_figures_are_ratios_of_speeds_and_of_copies() -> None:
    seconds = {"pipeoptim": (1.0, 2.0), "gpipe4": (1.5, 3.0), "ddp": (2.0, 2.0)}
    real = [Result("resnet", entry, 8, seconds[entry.name]) for entry in REAL]
    assert figures_of_real(real) == {
        "real.pipeoptim_over_gpipe4": 1.5,
        "real.pipeoptim_over_ddp": 1.5,
    }
    emulated = [
        Result("emulated", entry, 4, (1.75 if entry.name == "gpipe4" else 1.0,), (HELD,))
        for entry in EMULATED
    ]
    found = figures_of_emulated(emulated)
    assert found["emulated.4.2bw_over_gpipe4"] == 1.75
    assert found["weight_versions.spectrain"] == 3.0


def test_accuracies_are_means_and_targets_those_of_the_baseline() -> None:
    runs = {
        ("vgg", "gpipe1", 0): [0.5, 0.8],
        ("vgg", "gpipe1", 1): [0.5, 0.6],
        ("vgg", "pipeoptim", 0): [0.69, 0.7],
    }
    found = figures_of(runs)
    assert found["accuracy.vgg.gpipe1"] == pytest.approx(0.7)
    assert found["epochs_to_target.vgg.gpipe1"] == 2
    assert found["epochs_to_target.vgg.pipeoptim"] == 1
    assert "accuracy.lstm.gpipe1" not in found
