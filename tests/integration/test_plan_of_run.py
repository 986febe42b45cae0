"""The plan belongs to the run: kept in checkpoints, and the same in each deterministic run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.jobs import run
from tests.integration.planned import Planned, Went, train

SLOW = pytest.mark.slow
ASYNCHRONOUS = Planned("plain", {"schedule": "1f1b"})
MICRO_BATCHES = Planned("batchnorm", per_micro_batch=50.0)
FROZEN = Planned("dropout", frozen={1: 2, 2: 3}, trainer={"max_epochs": 3}, num_ranks=4)
HEADS = Planned("heads", {"num_microbatches": 1})
RELAYED = Planned("blocks", relay={"mode": "dpu"}, num_ranks=3)
RUNS = {
    "asynchronous": ASYNCHRONOUS,
    "micro-batches": MICRO_BATCHES,
    "repacked": FROZEN,
    "frozen": replace(FROZEN, repack=False, num_ranks=2),
    "heads": HEADS,
    "relayed": RELAYED,
    "dropout": Planned("dropout"),
}
SOME = [name if name == "asynchronous" else pytest.param(name, marks=SLOW) for name in RUNS]


def fit(it: Planned, folder: Path) -> list[Went]:
    found: list[Went] = run(train, it, num_ranks=it.num_ranks, folder=folder)
    return found


def other(it: Planned, **changes: Any) -> Planned:
    """The same where other costs are measured."""
    return replace(it, costs="falling", per_micro_batch=0.0, saves=False, **changes)


def assert_same(ranks: list[Went], whole: list[Went]) -> None:
    """To the last bit, from wherever it went on."""
    for rank, expected in zip(ranks, whole, strict=True):
        assert len(rank.losses) > 0
        losses = expected.losses[-len(rank.losses) :]
        torch.testing.assert_close(rank.losses, losses, rtol=0, atol=0)
        assert rank.placements == expected.placements[-len(rank.placements) :]
    torch.testing.assert_close(ranks[0].weights, whole[0].weights, rtol=0, atol=0)


@pytest.mark.parametrize("name", SOME)
def test_a_run_that_goes_on_goes_by_the_plan_of_the_one_that_was_stopped(
    name: str, tmp_path: Path
) -> None:
    it = replace(RUNS[name], saves=True)
    whole = fit(it, tmp_path)
    assert "made from measured times" in str(whole[0].notes)
    apart = tmp_path / "apart"
    apart.mkdir()
    elsewhere = fit(other(it), apart)  # where costs are others, so is the plan, and what comes out
    assert elsewhere[0].placements != whole[0].placements
    same = [torch.equal(v, whole[0].weights[key]) for key, v in elsewhere[0].weights.items()]
    assert all(same) == (name == "heads")  # whose trunk is never trained
    last = len(whole[0].losses)
    for step in (3, 4, last - 3) if name != "asynchronous" else (3,):
        ranks = fit(other(it, resume=str(tmp_path / f"step-{step}.ckpt")), apart)
        assert_same(ranks, whole)
        assert step != 3 or "that of the checkpoint" in str(ranks[0].notes)
        assert [rank.told for rank in ranks] == [[]] * it.num_ranks


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("pinned", ["deterministic", pytest.param("costs", marks=SLOW)])
def test_deterministic_runs_have_one_plan(name: str, pinned: str, tmp_path: Path) -> None:
    it = RUNS[name]
    if pinned == "deterministic":
        it = replace(it, trainer={**it.trainer, "deterministic": True})
    else:
        it = replace(it, options={**it.options, "costs": "flops"})
    first, second = fit(it, tmp_path), fit(other(it), tmp_path)
    assert_same(second, first)
    assert len(second[0].losses) == len(first[0].losses)
    assert "made from floating-point operations" in str(first[0].notes)
