"""What the asynchronous benchmark says about its results."""

from __future__ import annotations

import json
from dataclasses import replace
from math import pi, sin
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from benchmarks.asynchronous import accuracy, causes, memory, prediction
from benchmarks.asynchronous.accuracy import Key, figures_of, table_of
from benchmarks.asynchronous.entries import EMULATED, REAL
from benchmarks.asynchronous.figures import figures_of_emulated, figures_of_real
from benchmarks.asynchronous.main import _parse
from benchmarks.asynchronous.tasks import NUM_STAGES, TASKS, Classifier, Rate, Task, tasks_of
from benchmarks.asynchronous.train import Run
from benchmarks.throughput.figures import Result

HELD = {"student": 30, "gradients": 10, "optimizer": 0, "fixed": 0}


def test_figures_are_ratios_of_speeds_and_of_copies() -> None:
    seconds = {
        "pipeoptim": (1.0, 2.0),
        "synchronous": (1.2, 2.4),
        "gpipe4": (1.5, 3.0),
        "ddp": (2.0, 2.0),
    }
    real = [Result("resnet", entry, 8, seconds[entry.name]) for entry in REAL]
    assert figures_of_real(real) == {
        "real.pipeoptim_over_gpipe4": 1.5,
        "real.pipeoptim_over_ddp": 1.5,
        "real.synchronous_over_gpipe4": 1.25,
        "real.synchronous_over_ddp": pytest.approx(1.25),
    }
    emulated = [
        Result("emulated", entry, 4, (1.75 if entry.name == "gpipe4" else 1.0,), (HELD,))
        for entry in EMULATED
    ]
    found = figures_of_emulated(emulated)
    assert found["emulated.4.2bw_over_gpipe4"] == 1.75
    assert found["weight_versions.spectrain"] == 3.0


def test_accuracies_are_means_and_targets_those_of_the_baseline() -> None:
    rate = TASKS["vgg"].rate
    runs = {
        Key("vgg", rate, "gpipe1", 0): [0.5, 0.8],
        Key("vgg", rate, "gpipe1", 1): [0.5, 0.6],
        Key("vgg", rate, "pipeoptim", 0): [0.69, 0.7],
        Key("vgg", Rate(7.0, 1), "gpipe1", 0): [0.1, 0.2],
    }
    found = figures_of(runs, speeds={"emulated.4.pipeoptim_over_gpipe4": 2.0})
    assert found["accuracy.vgg.gpipe1"] == pytest.approx(0.7)
    assert found["epochs_to_target.vgg.gpipe1"] == 2
    assert found["epochs_to_target.vgg.pipeoptim"] == 1
    assert found["time_to_target.vgg.gpipe1"] == 1.0
    assert found["time_to_target.vgg.pipeoptim"] == 0.25  # half the epochs, twice the throughput
    assert "accuracy.lstm.gpipe1" not in found
    assert found["accuracy.vgg.rate_7w.gpipe1"] == 0.2
    own, *others = [line.split()[1:3] for line in table_of(runs, found).splitlines()[1:]]
    assert own == [str(rate), "gpipe1"]
    assert others == [[str(rate), "pipeoptim"], ["7w", "gpipe1"]]


@pytest.mark.parametrize("task", [*TASKS.values(), *tasks_of(64).values()])
def test_arms_are_compared_at_a_rate_that_was_tried(task: Task) -> None:
    assert task.rate in task.rates


def test_tasks_differ_by_batches_and_by_the_rates_chosen_for_them() -> None:
    assert tasks_of(8) == TASKS
    assert {task.batch_size for task in tasks_of(64).values()} == {64}
    with pytest.raises(KeyError):
        tasks_of(32)


def test_runs_of_another_setting_are_not_mixed_in(tmp_path: Path) -> None:
    runs = ["--accuracy", "--runs", str(tmp_path)]
    options = _parse(runs)
    key = Key("lstm", TASKS["lstm"].rate, "gpipe1", 0)
    setting = accuracy._setting(options, TASKS["lstm"])
    assert setting["batch_size"] == 8
    file = tmp_path / f"{accuracy._name(options, key)}.json"
    file.write_text(json.dumps({"setting": setting, "accuracy": [0.5]}))
    assert accuracy._load(options, key) == [0.5]
    assert accuracy._load(_parse([*runs, "--epochs", "1"]), key) is None
    assert accuracy._load(_parse([*runs, "--batch-size", "64"]), key) is None


def test_a_rate_rises_for_an_epoch_and_falls_to_nothing() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.8)
    schedule = Rate.parse("0.8w").schedule(optimizer, epoch=3, num_epochs=3)
    seen = []
    for _ in range(9):
        seen += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    assert seen[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert seen[6] == pytest.approx(0.4)
    assert schedule.get_last_lr() == pytest.approx([0.0])


def test_memory_has_a_figure_for_each_rank() -> None:
    found = memory.figures_of({("2bw", False): [1_000_000, 3_000_000], ("2bw", True): [500_000, 0]})
    assert found["memory.2bw.rank1"] == 3.0
    assert found["memory.2bw.rank0.recomputed"] == 0.5
    assert len(memory.table_of({("2bw", True): [1, 2]}).splitlines()) == 2


def test_noise_can_be_predicted_by_about_half() -> None:
    """One update: v becomes 0.9 v + g, the rule says v, and g is 0.436 of what moves."""
    assert prediction.expected(1) == pytest.approx(0.2**0.5)
    assert prediction.expected(1, best=True) == pytest.approx(0.19**0.5)
    lines = prediction.table_of({"resnet": {1: 0.4, 2: 0.5, 3: 0.6}}).splitlines()
    assert lines[-1].split() == ["resnet", "0.40", "0.50", "0.60"]


def test_late_gradients_are_stable_for_small_rates_only() -> None:
    """Known: 2 (1 + m) in time; without momentum 2 sin(pi / (4 s + 2)) for s updates late."""
    assert causes.stable(0, 0.9, predicts=True) == pytest.approx(3.8, rel=0.02)
    assert causes.stable(0, 0.0, predicts=False) == pytest.approx(2.0, rel=0.01)
    assert causes.stable(3, 0.0, predicts=False) == pytest.approx(2 * sin(pi / 14), rel=0.01)
    predicted, old = (causes.stable(3, 0.9, predicts=predicts) for predicts in (True, False))
    assert predicted > 2 * old


def test_a_backward_reads_what_a_reading_says() -> None:
    """y = b a x: a is trained with b of the backward, b with what the forward made of a."""
    module = Classifier(replace(TASKS["resnet"], network=chain))
    images, labels = torch.randn(4, 2), torch.tensor([0, 1, 0, 1])
    names = [name for name, _ in module.student.named_parameters()]
    forward = {name: torch.randn(2, 2, requires_grad=True) for name in names}
    other = {name: torch.randn(2, 2) for name in names}
    hidden = images @ forward[names[0]].T
    output = (hidden @ forward[names[1]].T).detach().requires_grad_()
    loss = torch.nn.functional.cross_entropy(output, labels)
    (slope,) = torch.autograd.grad(loss, output)
    found = causes._gradients(module, (images, labels), forward, other)
    torch.testing.assert_close(found[names[1]], slope.T @ hidden)
    torch.testing.assert_close(found[names[0]], (slope @ other[names[1]]).T @ images)


@pytest.mark.slow
def test_epochs_of_one_batch_are_trained_as_on_one_device() -> None:
    """Behind a drain nothing is late, whatever the policy."""
    task = Task(
        stages,
        lambda p, rate: SGD(p, lr=rate, momentum=0.9),
        "images",
        8,
        6,
        Rate(0.5),
        batch_size=8,
    )  # fmt: skip
    torch.manual_seed(0)
    values = Classifier(task).state_dict()
    epochs = [[(torch.randn(8, 3), torch.randint(3, (8,)))] for _ in range(6)]
    run = Run(task, "pipeoptim", values, epochs, 1)
    test = torch.randn(400, 3), torch.randint(3, (400,))
    curve = run.on_stages(test)
    assert curve == run.on_one_device(test)
    assert len(set(curve)) > 1


def chain() -> list[nn.Sequential]:
    return [nn.Sequential(nn.Linear(2, 2, bias=False)) for _ in range(2)]


def stages() -> list[nn.Sequential]:
    return [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(NUM_STAGES)]
