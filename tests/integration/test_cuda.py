"""On GPUs: the same mathematics, whatever carries the tensors. Skipped where there are none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_tspipe import DelayedTeacherUpdate
from tests.faults.breaking import BYOL, over
from tests.faults.test_killed import check_end
from tests.integration.by_hand import Notes
from tests.integration.comparing import both
from tests.integration.jobs import run
from tests.integration.replicas import tap_delayed, train_share
from tests.integration.test_data_parallel import SPLIT, alone, assert_same, together
from tests.integration.test_evaluation import fit_and_validate_parts
from tests.integration.trainings import (
    Session,
    Trained,
    Training,
    train,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU"),
]


def delayed() -> list[DelayedTeacherUpdate]:
    return [DelayedTeacherUpdate()]


SHARED = Training(
    "Byol-group-2-by hand",
    "instance",
    {"num_microbatches": 2, "ranks_per_device": 2},
    callbacks=delayed,
    trainer={"accelerator": "gpu", "devices": 1},
)
ALONE = replace(SHARED, strategy="auto", num_ranks=1, options={})


def test_two_ranks_on_one_gpu_are_exact(tmp_path: Path) -> None:
    """Through pinned host memory, in float64."""
    expected = run(train, ALONE, num_ranks=1, folder=tmp_path)[0]
    results = run(train, SHARED, num_ranks=2, folder=tmp_path)
    torch.testing.assert_close(results[0].losses, expected.losses, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(results[0].weights, expected.weights, rtol=1e-9, atol=1e-12)


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
GPU = {"accelerator": "gpu"}


@TWO_GPUS
def test_two_gpus_are_exact(tmp_path: Path) -> None:
    """Through NCCL, in float64."""
    piped = replace(
        SHARED,
        options={"num_microbatches": 2},
        trainer={"accelerator": "gpu", "devices": 2},
    )
    expected = run(train, ALONE, num_ranks=1, folder=tmp_path)[0]
    results = run(train, piped, num_ranks=2, folder=tmp_path)
    torch.testing.assert_close(results[0].losses, expected.losses, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(results[0].weights, expected.weights, rtol=1e-9, atol=1e-12)


@TWO_GPUS
def test_two_gpus_evaluate_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    training = Training(callbacks=delayed, trainer={**GPU, "val_check_interval": 2})
    expected, results = both(fit_and_validate_parts, training, tmp_path, 2)
    for metrics, was_whole in results:
        assert metrics == pytest.approx(expected[0], rel=1e-9)
        assert not any(was_whole)


@TWO_GPUS
def test_replicas_on_gpus(tmp_path: Path) -> None:
    """Of two stages each, where there are four GPUs."""
    num_ranks = 4 if torch.cuda.device_count() >= 4 else 2
    options = {"num_stages": num_ranks // 2, "num_microbatches": 2}
    training = replace(
        SPLIT, options=options, num_ranks=num_ranks, trainer=GPU, callbacks=tap_delayed
    )
    expected = alone(train_share, training, tmp_path)
    assert_same(expected, training, together(train_share, training, tmp_path))


@TWO_GPUS
@pytest.mark.parametrize(("where", "rank"), [("train", 0), ("train", 1), ("validate", 0)])
def test_a_killed_rank_ends_the_other_gpus(where: str, rank: int, tmp_path: Path) -> None:
    training = over(BYOL, 2)
    check_end(replace(training, trainer={**training.trainer, **GPU}), where, rank, tmp_path)


def to_single(module: Any) -> None:
    """In float32, batches too: on a GPU, autocast leaves float64 as it is."""
    module.float()
    module.on_before_batch_transfer = in_single


def in_single(batch: Any, _: int) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.float() if x.is_floating_point() else x, batch)


def test_bfloat16_trains_as_on_one_device(tmp_path: Path) -> None:
    """Losses agree to what bfloat16 resolves."""
    trainer = {**SHARED.trainer, "precision": "bf16-mixed"}
    expected = run(
        train, replace(ALONE, trainer=trainer, change=to_single), num_ranks=1, folder=tmp_path
    )[0]
    results = run(
        train, replace(SHARED, trainer=trainer, change=to_single), num_ranks=2, folder=tmp_path
    )
    torch.testing.assert_close(
        [loss.float() for loss in results[0].losses],
        [loss.float() for loss in expected.losses],
        rtol=0.05,
        atol=0.02,
    )


def train_half(training: Training) -> tuple[Trained, list[float]]:
    """In 16-bit precision, and the scales of the losses."""
    notes = Notes()
    return Session(training, notes).fit().trained, notes.scales


def test_float16_skips_the_steps_that_one_device_skips(tmp_path: Path) -> None:
    trainer = {**SHARED.trainer, "precision": "16-mixed"}
    alone = replace(ALONE, trainer=trainer, change=to_single)
    shared = replace(SHARED, trainer=trainer, change=to_single)
    expected, scales = run(train_half, alone, num_ranks=1, folder=tmp_path)[0]
    results = run(train_half, shared, num_ranks=2, folder=tmp_path)
    assert [found for _, found in results] == [scales, scales]
    torch.testing.assert_close(
        [loss.float() for loss in results[0][0].losses],
        [loss.float() for loss in expected.losses],
        rtol=0.01,
        atol=0.01,
    )
