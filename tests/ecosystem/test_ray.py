"""Pipelines whose ranks are the workers of a local Ray cluster."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import strict_backend
from tests.ecosystem.examples import EXAMPLES, ROOT, command
from tests.ecosystem.workers import train_as_worker
from tests.integration.comparing import alone
from tests.integration.jobs import run, run_job
from tests.integration.trainings import CLOSE, Training, delayed, train
from tests.leftovers import none_left

# A cluster starts in ten seconds, its workers in as many; some of them start three times.
pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(300)]
SCRIPT = str(ROOT / "tests" / "ecosystem" / "ray_runs.py")


@pytest.fixture(autouse=True)
def without_statistics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")


def losses(file: Path) -> dict[int, float]:
    """The loss of each step; of one that was done again, the last."""
    return dict(json.loads(line) for line in file.read_text().splitlines())


@pytest.mark.exhaustive
def test_workers_train_what_one_device_trains_and_report(tmp_path: Path) -> None:
    with none_left(tmp_path):
        output = command(tmp_path, SCRIPT, "compared", seconds=280)
    expected = losses(tmp_path / "alone.jsonl")
    assert [*expected] == [*range(1, 13)]
    assert losses(tmp_path / "ray.jsonl") == pytest.approx(expected, rel=1e-9)
    assert losses(tmp_path / "other.jsonl") == pytest.approx(expected, rel=1e-9)
    told = json.loads(output.splitlines()[-1])
    assert told["metrics"]["step"] == 12
    assert told["metrics"]["loss"] == pytest.approx(expected[12], rel=1e-9)
    # An ordinary file, of both ranks' stages.
    saved = torch.load(Path(told["checkpoint"]) / "checkpoint.ckpt", weights_only=False)
    assert {name.partition(".")[0] for name in saved["state_dict"]} == {"student", "teacher"}
    assert len(saved["optimizer_states"][0]["state"]) == 8
    assert not any(tensor.is_meta for tensor in saved["state_dict"].values())


def test_workers_that_fail_are_started_again_and_go_on_exactly(tmp_path: Path) -> None:
    with none_left(tmp_path):
        output = command(tmp_path, SCRIPT, "retried", seconds=280)
    assert {path.name for path in tmp_path.glob("failed-*")} == {"failed-0", "failed-1"}
    found = [json.loads(line)[0] for line in (tmp_path / "ray.jsonl").read_text().splitlines()]
    assert len(found) > 12  # some steps were done again
    expected = losses(tmp_path / "alone.jsonl")
    assert losses(tmp_path / "ray.jsonl") == pytest.approx(expected, rel=1e-9)
    cause = r"The job ends, because rank 1 \(pid \d+ on \S+\) raised ValueError in training step 7"
    assert re.search(cause, output)


@pytest.mark.exhaustive
def test_the_example_trains_in_two_workers(tmp_path: Path) -> None:
    with none_left(tmp_path):
        output = command(tmp_path, str(EXAMPLES / "ray_train.py"), "--fast", seconds=280)
    (metrics,) = re.findall(r"^metrics: (.*)$", output, re.MULTILINE)
    (loss,) = re.findall(r"'loss': ([\d.e-]+)", metrics)
    assert math.isfinite(float(loss))
    assert "'step': 4" in metrics
    assert [*(tmp_path / "runs" / "ray_train").rglob("checkpoint.ckpt")]


TRAINING = Training(callbacks=delayed, strategy="instance")


def check_workers(
    nodes: tuple[int, ...], transport: str, folder: Path, **options: bool
) -> list[dict[str, Any]]:
    """Train in workers on given nodes, and compare with one device; what each rank knows."""
    (expected,) = run(train, alone(TRAINING), num_ranks=1, folder=folder / "alone")
    training = replace(TRAINING, options=options)
    ranks = run(train_as_worker, training, nodes, folder=folder / "workers")
    torch.testing.assert_close(ranks[0][0].losses, expected.losses, **CLOSE)
    for _, known in ranks:
        if strict_backend.VARIABLE not in os.environ:
            assert known["transport"] == transport
        assert known["group"]  # the strategy's own, with its own timeout
        assert (known["nodes"], known["devices"]) == (len({*nodes}), nodes.count(0))
    return [known for _, known in ranks]


@pytest.mark.exhaustive
def test_stages_on_one_node(tmp_path: Path) -> None:
    check_workers((0, 0), "SharedMemoryTransport", tmp_path)


@pytest.mark.exhaustive
def test_stages_on_two_nodes_and_shards_that_one_cant_see(tmp_path: Path) -> None:
    ranks = check_workers((0, 1), "GlooTransport", tmp_path, save_distributed_checkpoint=True)
    for known in ranks:
        assert "every rank was given a folder of its own" in known["refused"]


@pytest.mark.exhaustive
def test_unequal_nodes_are_refused(tmp_path: Path) -> None:
    job = run_job(train_as_worker, TRAINING, (0, 0, 1), num_ranks=3, folder=tmp_path)
    for error in job.errors:
        assert "the nodes have 2 and 1 workers" in error
