"""Activation checkpointing and compilation, as options of the strategy."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_tspipe import TSPipeStrategy
from lightning_tspipe.cli.modules import measure
from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.runtime.stages import stage as execution
from lightning_tspipe.strategy.setup.declared import find_networks
from lightning_tspipe.strategy.setup.options import SetupOptions
from tests.integration.jobs import run_job
from tests.integration.test_exact import assert_same, reference
from tests.integration.trainings import Session, Trained, Training, train

BATCH = Training("Byol-batch-2-by hand", "instance", {"num_microbatches": 2}, optimizer="adamw")


def train_and_tell(training: Training) -> tuple[Trained, Counter[str]]:
    """Train, and print what the strategy says; how often which way of running was taken."""
    logging.getLogger("lightning_tspipe").addHandler(logging.StreamHandler())
    counts: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return run

    compiler = torch.compile
    runtime: Any = execution
    runtime.checkpoint = counted("again", runtime.checkpoint)
    torch.compile = lambda *args, **kwargs: counted("compiled", compiler(*args, **kwargs))
    return train(training), counts


def check(training: Training, folder: Path, *ways: str) -> str:
    """Train as the reference does, every rank in these ways; what was printed."""
    job = run_job(
        train_and_tell, training, num_ranks=training.num_ranks, folder=folder, seconds=240
    )
    assert all(rank.exit_code == 0 for rank in job.ranks), job.output
    assert_same(reference(training, num_microbatches=2), job.ranks[0].value[0])
    for rank in job.ranks:
        assert rank.value[1].keys() == set(ways), job.output
    return job.output


def with_options(**options: Any) -> Training:
    return replace(BATCH, options={**BATCH.options, **options})


def test_some_activations_are_computed_again(tmp_path: Path) -> None:
    training = with_options(activation_checkpointing=["student.0.[0-4]*", "student.2*"])
    check(training, tmp_path, "again")


def least_limit(profile: StepProfile) -> int:
    """The smallest memory limit that a plan fits."""
    low, high = 0, max(profile.plan(2, num_microbatches=2).memory_bytes)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            profile.plan(2, num_microbatches=2, memory_limit=middle)
            high = middle
        except PartitionError:
            low = middle
    return high


def test_activations_are_computed_again_if_nothing_fits_otherwise(tmp_path: Path) -> None:
    it = Session(BATCH)
    profile = measure(
        it.module, it.loader, accelerator="cpu", student=["student"], teacher=["teacher"]
    )
    again = least_limit(profile.recomputing(range(profile.student.num_atoms)))
    plain = least_limit(profile)
    assert again < plain
    limited = with_options(activation_checkpointing="auto", memory_limit=(again + plain) // 2)
    output = check(limited, tmp_path, "again")
    assert "activation_checkpointing='auto' was switched on" in output
    assert "atoms recomputed" in output


@pytest.mark.slow
def test_stages_are_compiled(tmp_path: Path) -> None:
    options = {"compile": {"backend": "aot_eager"}, "activation_checkpointing": True}
    output = check(with_options(**options), tmp_path, "again", "compiled")
    assert "torch.compile failed" not in output


@pytest.mark.timeout(300)  # compilers take as long as they take
@pytest.mark.parametrize(
    ("backend", "case"),
    [
        pytest.param("eager", "Byol-layer-2-lightly", marks=pytest.mark.exhaustive),
        pytest.param("inductor", "Tap-batch-False", marks=pytest.mark.slow),
    ],
)
def test_more_stages_are_compiled(backend: str, case: str, tmp_path: Path) -> None:
    training = replace(with_options(compile={"backend": backend}), case=case)
    assert "torch.compile failed" not in check(training, tmp_path, "compiled")


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"activation_checkpointing": "always"}, "'auto', True, or a list of patterns"),
        ({"activation_checkpointing": True, "split_backward": True}, "Leave one of them out"),
        ({"activation_checkpointing": ["a"], "split_backward": True}, "Leave one of them out"),
        ({"compile": True, "split_backward": True}, "Leave one of them out"),
        ({"compile": {"mode": "reduce-overhead"}}, "max-autotune-no-cudagraphs"),
        ({"compile": {"options": {"triton.cudagraphs": True}}}, "runs CUDA graphs"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together(options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigurationError, match=remedy):
        TSPipeStrategy(**options)


def test_a_pattern_of_no_atom() -> None:
    options = SetupOptions(activation_checkpointing=["student.0*", "nowhere*"])
    with pytest.raises(ConfigurationError, match=r"'nowhere\*' matches no atom; there are"):
        options.recomputed(["student.0.Conv2d", "student.1.Linear"])


class Compiled(nn.Module):
    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        if whole:
            self.student = torch.compile(self.student)  # type: ignore[assignment]
        else:
            self.student[1].compile()


@pytest.mark.parametrize("whole", [True, False])
def test_networks_that_are_compiled_already_are_refused(whole: bool) -> None:
    with pytest.raises(ConfigurationError, match=r"TSPipeStrategy\(compile=True\)"):
        find_networks(Compiled(whole=whole), SetupOptions())
