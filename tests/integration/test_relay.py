"""Blockwise relaying by a real Trainer: every mode gives what one device gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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
from tests.integration.trainings import CLOSE

pytestmark = pytest.mark.distributed


def check(relay: Relay, found: list[Relayed]) -> None:
    """Weights of all ranks together, the losses that every rank knows, what was run and read."""
    weights, means = reference(relay)
    if relay.num_ranks > 1:
        check_work(relay, found)
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


def check_work(relay: Relay, found: list[Relayed]) -> None:
    """Where the teacher is relayed, each block of it has run once for each sample."""
    mode, epochs = relay.options.get("mode", "dpu"), relay.epochs()
    samples = sum(map(sum, relay.sizes))
    read = sum(8 * t.numel() for batches in epochs for batch in batches for t in batch)
    ran = [sum(r.forwards.get(i, 0) for r in found) for i in range(relay.num_blocks)]
    loaded = sum(rank.bytes_loaded for rank in found)
    if mode == "dp":
        assert ran == [(relay.num_blocks - i) * samples for i in range(relay.num_blocks)]
        assert loaded == relay.num_blocks * read
    elif mode == "ls":
        assert (ran[0], ran[-1]) == (relay.num_ranks * samples, samples)
        assert loaded == relay.num_ranks * read
    else:
        assert ran == [samples] * relay.num_blocks
        assert loaded == read


def run_all(relays: list[Relay], folder: Path, num_ranks: int) -> None:
    found = zip(*run(train_all, relays, folder=folder, num_ranks=num_ranks), strict=True)
    for relay, ranks in zip(relays, found, strict=True):
        check(relay, list(ranks))


@pytest.mark.slow
def test_modes_on_two_ranks(tmp_path: Path) -> None:
    relays = [
        Relay(options={"mode": "dpu"}, module={"labelled": True, "network": "net"}),
        Relay(options={"mode": "ir"}, module={"optimizer": "per block", "network": "list"}),
    ]
    run_all(relays, tmp_path, 2)


@pytest.mark.slow
def test_more_modes_on_two_ranks(tmp_path: Path) -> None:
    relays = [
        Relay(options={"mode": "tr"}, module={"labelled": True}),
        Relay(options={"mode": "dp"}),
        Relay(options={"mode": "ls"}, module={"labelled": True}),
        Relay(options={"mode": "ahd"}),
        Relay(options={"run_ahead": 0}, module={"norm": False, "network": "list"}),
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
    """From between two batches of an update, of a shared stage; and the file is a plain one."""
    more = {"module": {"labelled": True}, "sizes": ((5, 6, 3, 7), (5, 6, 3, 7))}
    trainer = {"accumulate_grad_batches": 2}
    relay = Relay(options={"mode": "ahd", "partition": [1, 3], "widths": [2, 1]}, num_ranks=3,
                  trainer=trainer, **more)  # fmt: skip
    whole = run(train, relay, folder=tmp_path, num_ranks=3)[0].weights
    file = tmp_path / "accumulating.ckpt"
    state = torch.load(file, weights_only=True)
    assert state["state_dict"].keys() == whole.keys()
    assert state["global_step"] == 1
    assert len(state["optimizer_states"][0]["state"]) > 0
    found = run(resume, Relay(trainer=trainer, **more), str(file), folder=tmp_path, num_ranks=2)
    for name, value in whole.items():
        torch.testing.assert_close(found[0].weights[name], value, **CLOSE, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"mode": "ahd"}, {"mode": "ir"}, {"partition": [1, 3]}])
def test_blocks_that_fit_no_device(options: dict[str, Any], tmp_path: Path) -> None:
    relay = Relay(options={**options, "memory_limit": "1kB"})
    job = run_job(train, relay, folder=tmp_path, num_ranks=2, seconds=60)
    for error in job.errors:
        assert re.search(r"PartitionError: .*block.*student\.0.*MB", error), error


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
