"""lightly's modules, as they stand, train in the pipeline what they train on one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightly.loss import NTXentLoss

from tests.ecosystem.methods import METHODS, Result, Run, train
from tests.integration.jobs import run as run_ranks
from tests.integration.jobs import run_job
from tests.integration.trainings import CLOSE

EXAMPLES = ("byol", "moco", "tico", "mmcr", "dino", "smog")
BENCHMARKS = tuple(name for name in METHODS if name not in EXAMPLES)


def assert_same(expected: Result, actual: Result) -> None:
    assert len(set(map(float, expected.losses))) > 1
    torch.testing.assert_close(actual.losses, expected.losses, **CLOSE)
    assert_same_state(expected, actual)
    assert actual.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert actual.metrics[name] == pytest.approx(value, rel=1e-9), name


def assert_same_state(expected: Result, actual: Result) -> None:
    assert actual.state.keys() == expected.state.keys()
    for state in (expected.state, actual.state):
        for name, values in state.items():
            if name.endswith("in_proj_bias"):
                # A bias of keys moves all logits of a softmax alike: its gradient is rounding.
                _, of_keys, _ = values.chunk(3)
                assert of_keys.abs().max() < 1e-10
                of_keys.zero_()
    torch.testing.assert_close(actual.state, expected.state, **CLOSE)
    assert actual.optimizer["param_groups"] == expected.optimizer["param_groups"]
    torch.testing.assert_close(actual.optimizer["state"], expected.optimizer["state"], **CLOSE)


def compare(run: Run, folder: Path) -> None:
    """One device with a delayed teacher, and stages."""
    alone = replace(run, num_ranks=1, num_stages=0)
    expected = run_ranks(train, alone, num_ranks=1, folder=folder)[0]
    ranks = run_ranks(train, run, num_ranks=run.num_ranks, folder=folder)
    assert set(expected) == set(ranks[0]) == set(run.methods)
    for name in run.methods:
        assert_same(expected[name], ranks[0][name])


NUM_STAGES = pytest.mark.parametrize("num_stages", [2, pytest.param(3, marks=pytest.mark.slow)])


@NUM_STAGES
def test_examples(num_stages: int, tmp_path: Path) -> None:
    compare(Run(EXAMPLES, num_stages, num_stages), tmp_path)


@pytest.mark.parametrize(
    "num_stages",
    [pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.exhaustive)],
)
def test_benchmarks(num_stages: int, tmp_path: Path) -> None:
    compare(Run(BENCHMARKS, num_stages, num_stages), tmp_path)


@pytest.mark.slow
def test_the_other_world(tmp_path: Path) -> None:
    methods = ("byol", "dino", "benchmark byol", "benchmark dino")
    compare(Run(methods, 2, 2, world="lightning.pytorch"), tmp_path)


@pytest.mark.slow
def test_with_accumulation(tmp_path: Path) -> None:
    """DINO drops the gradients of its last layer: in a hook, or in the middle of the step."""
    accumulating = {"accumulate_grad_batches": 2}
    compare(Run(("dino", "benchmark dino"), 2, 2, trainer=accumulating), tmp_path)


def gathering(module: Any) -> None:
    """Negatives and covariances of all replicas; DINO's centre is always that of all."""
    if type(module).__name__ == "MoCoV2":
        module.criterion = NTXentLoss(temperature=0.2, gather_distributed=True)
        # Steps have random numbers of their own: another half would be on each replica.
        torch.randperm = lambda n, **_: torch.arange(n).roll(1)
    if hasattr(module.criterion, "gather_distributed"):
        module.criterion.gather_distributed = True


@pytest.mark.slow
def test_losses_that_gather(tmp_path: Path) -> None:
    """Two replicas of two stages train what two devices train under DDP."""
    methods = ("tico", "dino", "benchmark mocov2", "benchmark tico", "benchmark dino")
    run = Run(methods, 4, 2, sizes=((8, 8, 6), (8, 8, 6)), change=gathering)
    ddp = replace(run, num_ranks=2, num_stages=0)
    expected = run_ranks(train, ddp, num_ranks=2, folder=tmp_path)
    ranks = run_ranks(train, run, num_ranks=4, folder=tmp_path)
    for name in methods:
        assert_same_state(expected[0][name], ranks[0][name])
        for replica in range(2):
            actual = ranks[2 * replica][name].losses
            torch.testing.assert_close(actual, expected[replica][name].losses, **CLOSE)


REASONS = {
    "smog that clusters first": (
        "CaptureError: the part of the step before its last call failed on a rank without data",
        "self.memory_bank.bank.cpu().numpy()",
    ),
    "capi": (
        "TrainedTeacherError: the teacher's output requires gradients",
        "belongs to the student",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    errors = run_job(train, Run((name,), 2, 2), num_ranks=2, folder=tmp_path).errors
    assert any(all(part in error for part in REASONS[name]) for error in errors), errors
