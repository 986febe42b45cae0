"""What the asynchronous benchmark says about its results."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from benchmarks.asynchronous.accuracy import figures_of
from benchmarks.asynchronous.entries import EMULATED, REAL
from benchmarks.asynchronous.figures import figures_of_emulated, figures_of_real
from benchmarks.asynchronous.tasks import NUM_STAGES, Classifier, Task
from benchmarks.asynchronous.train import Run
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


@pytest.mark.slow
def test_epochs_of_one_batch_are_trained_as_on_one_device() -> None:
    """Behind a drain nothing is late, whatever the policy."""
    task = Task(stages, lambda p: SGD(p, lr=0.5, momentum=0.9), "images", 8, 6, batch_size=8)
    torch.manual_seed(0)
    values = Classifier(task).state_dict()
    epochs = [[(torch.randn(8, 3), torch.randint(3, (8,)))] for _ in range(6)]
    run = Run(task, "pipeoptim", values, epochs, 1)
    test = torch.randn(400, 3), torch.randint(3, (400,))
    curve = run.on_stages(test)
    assert curve == run.on_one_device(test)
    assert len(set(curve)) > 1


def stages() -> list[nn.Sequential]:
    return [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(NUM_STAGES)]
