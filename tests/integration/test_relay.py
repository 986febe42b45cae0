"""Blockwise relaying by a real Trainer: every mode gives what one device gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.integration.jobs import run, run_job
from tests.integration.relayed import (
    Relay,
    Relayed,
    reference,
    resume,
    train,
    train_all,
    train_broken,
    train_two_rounds,
)

pytestmark = pytest.mark.distributed
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def check(relay: Relay, found: list[Relayed]) -> None:
    """Weights of all ranks together, and the losses that every rank knows."""
    weights, means = reference(relay)
    together = {k: v for rank in reversed(found) for k, v in rank.weights.items()}
    assert together.keys() == weights.keys()
    assert found[0].weights.keys() == weights.keys()  # rank 0 has all of it again
    for name, value in weights.items():
        torch.testing.assert_close(together[name], value, **CLOSE, msg=name)
    for rank in found:
        for block, mean in enumerate(means[-1]):
            assert rank.metrics[f"train_loss/block_{block}"] == pytest.approx(mean, rel=1e-9)
        assert rank.metrics["train_loss"] == pytest.approx(sum(means[-1]), rel=1e-9)
        assert "val" in rank.metrics
        assert rank.metrics["val"] == pytest.approx(found[0].metrics["val"])


def run_all(relays: list[Relay], folder: Path, num_ranks: int) -> None:
    found = zip(*run(train_all, relays, folder=folder, num_ranks=num_ranks), strict=True)
    for relay, ranks in zip(relays, found, strict=True):
        check(relay, list(ranks))


def test_modes_on_two_ranks(tmp_path: Path) -> None:
    relays = [
        Relay(options={"mode": "dpu"}, module={"labelled": True}),
        Relay(options={"mode": "ir"}, module={"optimizer": "per block", "as_list": True}),
    ]
    run_all(relays, tmp_path, 2)


@pytest.mark.slow
def test_more_modes_on_two_ranks(tmp_path: Path) -> None:
    relays = [
        Relay(options={"mode": "tr"}, module={"labelled": True}),
        Relay(options={"mode": "dp"}),
        Relay(options={"mode": "ls"}, module={"labelled": True}),
        Relay(options={"mode": "ahd"}),
        Relay(options={"run_ahead": 0}, module={"norm": False, "as_list": True}),
    ]
    run_all(relays, tmp_path, 2)


@pytest.mark.slow
def test_shared_stages_on_four_ranks(tmp_path: Path) -> None:
    shared = {"mode": "ahd", "partition": [1, 3], "widths": [3, 1]}
    relays = [
        Relay(options=shared, module={"labelled": True}, num_ranks=4),
        Relay(options={**shared, "widths": [2, 2]}, module={"optimizer": "each"}, num_ranks=4),
    ]
    run_all(relays, tmp_path, 4)


@pytest.mark.slow
def test_one_device_trains_the_same(tmp_path: Path) -> None:
    run_all([Relay(num_ranks=1), Relay(num_ranks=1, module={"optimizer": "each"})], tmp_path, 1)


@pytest.mark.slow
def test_gradients_are_accumulated_and_clipped_over_all_stages(tmp_path: Path) -> None:
    trainer = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    relay = Relay(options={"mode": "ir"}, trainer=trainer, module={"norm": False})
    (alone,) = run(train, Relay(trainer=trainer, num_ranks=1, module={"norm": False}),
                   folder=tmp_path, num_ranks=1)  # fmt: skip
    for found in run(train, relay, folder=tmp_path, num_ranks=2)[:1]:
        for name, value in alone.weights.items():
            torch.testing.assert_close(found.weights[name], value, **CLOSE, msg=name)


@pytest.mark.slow
def test_rounds_alternate_on_all_ranks(tmp_path: Path) -> None:
    (alone,) = run(train_two_rounds, Relay(num_ranks=1), folder=tmp_path, num_ranks=1)
    relay = Relay(options={"mode": "ahd", "partition": [1, 3], "widths": [1, 2]}, num_ranks=3)
    found = run(train_two_rounds, relay, folder=tmp_path, num_ranks=3)
    for name, value in alone.weights.items():
        torch.testing.assert_close(found[0].weights[name], value, **CLOSE, msg=name)
    for rank in found:
        assert rank.global_step == alone.global_step
        assert rank.metrics == pytest.approx(alone.metrics, rel=1e-9)


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """From within an epoch, with other stages; and the file is a plain Lightning one."""
    relay = Relay(trainer={"enable_checkpointing": True}, module={"labelled": True})
    run(train, relay, folder=tmp_path, num_ranks=2)
    (file,) = tmp_path.glob("step=2.ckpt")
    weights, _ = reference(relay)
    state = torch.load(file, weights_only=True)
    assert state["state_dict"].keys() == weights.keys()
    assert len(state["optimizer_states"][0]["state"]) > 0
    other = Relay(options={"mode": "ahd", "partition": [1, 3], "widths": [2, 1]}, num_ranks=3,
                  module={"labelled": True})  # fmt: skip
    found = run(resume, other, str(file), folder=tmp_path, num_ranks=3)
    for name, value in weights.items():
        torch.testing.assert_close(found[0].weights[name], value, **CLOSE, msg=name)


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ("nan", r"the loss of block 3 \(student.3\) is nan"),
        pytest.param("killed", "", marks=pytest.mark.slow),
        pytest.param("raises", "no block", marks=pytest.mark.slow),
    ],
)
def test_what_breaks_ends_all_ranks(broken: str, expected: str, tmp_path: Path) -> None:
    job = run_job(train_broken, broken, folder=tmp_path, num_ranks=2, seconds=60)
    assert all(rank.exit_code not in {None, 0} for rank in job.ranks), job.output
    assert max(rank.seconds for rank in job.ranks) < 55  # by themselves
    assert any(re.search(expected, error) for error in job.errors), job.errors
