"""The plan belongs to the run: kept in checkpoints, and the same in each deterministic run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.strategy.setup.options import load_plan
from tests.choosing import some_of
from tests.integration.jobs import run
from tests.integration.planned import Planned, Went, train, train_as_planned

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
    "random heads": replace(HEADS, kind="random heads"),
    "relayed": RELAYED,
    "dropout": Planned("dropout"),
}
SOME = some_of(RUNS, slow=[*RUNS][1::4], always=["asynchronous"])


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
    elsewhere = fit(other(it), apart)  # where costs are others, so is the plan, and what comes out
    assert elsewhere[0].placements != whole[0].placements
    same = [torch.equal(v, whole[0].weights[key]) for key, v in elsewhere[0].weights.items()]
    assert all(same) == (name == "heads")  # whose trunk is never trained, and draws nothing
    last = len(whole[0].losses)
    for step in (3, 4, last - 3) if name != "asynchronous" else (3,):
        ranks = fit(other(it, resume=str(tmp_path / f"step-{step}.ckpt")), apart)
        assert_same(ranks, whole)
        assert step != 3 or "the plan comes from the checkpoint" in str(ranks[0].notes)
        assert [rank.told for rank in ranks] == [[]] * it.num_ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", ["repacked", "frozen"])
def test_the_plan_for_layers_that_froze_is_not_made_again(name: str, tmp_path: Path) -> None:
    """Another version of the planner, or another machine's memory, would make another one."""
    it = replace(RUNS[name], saves=True)
    whole = fit(it, tmp_path)
    last = replace(it, saves=False, resume=f"step-{len(whole[0].losses) - 3}.ckpt")
    ranks = run(train_as_planned, last, num_ranks=it.num_ranks, folder=tmp_path)
    assert_same(ranks, whole)


@pytest.mark.parametrize("name", [*SOME, pytest.param("by option", marks=SLOW)])
def test_deterministic_runs_have_one_plan(name: str, tmp_path: Path) -> None:
    if name == "by option":
        it = replace(ASYNCHRONOUS, options={**ASYNCHRONOUS.options, "costs": "flops"})
    else:
        it = replace(RUNS[name], trainer={**RUNS[name].trainer, "deterministic": True})
    first, second = fit(it, tmp_path), fit(other(it), tmp_path)
    assert_same(second, first)
    assert len(second[0].losses) == len(first[0].losses)
    assert "made from floating-point operations" in str(first[0].notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("asynchronous", "a layer's stage decides which version of its weights it reads"),
        ("dropout", "draws from the generator of the rank"),
        pytest.param("plain", "", marks=pytest.mark.exhaustive),
        ("heads", ""),
    ],
)
def test_other_devices_change_what_is_told(name: str, changed: str, tmp_path: Path) -> None:
    it = replace({**RUNS, "plain": Planned("plain")}[name], saves=True)
    whole = fit(it, tmp_path)
    ranks = fit(replace(it, num_ranks=3, resume="step-5.ckpt", saves=False), tmp_path)
    assert ranks[1].told == ranks[2].told == []
    if not changed:
        assert ranks[0].told == []
        assert "devices (2 then, 3 now)" in str(ranks[0].notes)
        torch.testing.assert_close(ranks[0].weights, whole[0].weights, rtol=1e-9, atol=1e-12)
        return
    (told,) = ranks[0].told
    assert "devices (2 then, 3 now)" in told
    assert changed in told
    assert "start it as the first run was started" in told


@pytest.mark.slow
def test_micro_batches_that_are_given_are_not_those_of_the_checkpoint(tmp_path: Path) -> None:
    it = replace(MICRO_BATCHES, saves=True)
    whole = fit(it, tmp_path)
    assert whole[0].placements[0].num_microbatches == 1
    two = replace(it, options={"num_microbatches": 2}, resume="step-5.ckpt", saves=False)
    ranks = fit(two, tmp_path)
    assert ranks[0].placements[0].num_microbatches == 2
    (told,) = ranks[0].told
    assert "num_microbatches ('auto' then, 2 now)" in told
    assert "BatchNorm normalises by micro-batches: 1 per call then, 2 now" in told


@pytest.mark.slow
@pytest.mark.parametrize("as_shards", [False, True])
def test_a_checkpoint_is_a_plan(as_shards: bool, tmp_path: Path) -> None:
    options = {"save_distributed_checkpoint": as_shards}
    it = replace(ASYNCHRONOUS, options={**ASYNCHRONOUS.options, **options}, saves=True)
    whole = fit(it, tmp_path)
    path = tmp_path / "step-5.ckpt"
    file = path / "meta.pt" if as_shards else path
    [entry] = torch.load(file, weights_only=True)["lightning_tspipe"]
    plan = Plan.from_json(entry["plan"])
    assert load_plan(path) == plan
    assert plan.placement == whole[0].placements[0]
    given = fit(other(it, options={**it.options, "plan": path}), tmp_path)
    assert given[0].placements == whole[0].placements
    if not as_shards:
        assert_same(given, whole)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "the checkpoint has no plan"),
        ({"lightning_tspipe": [{"plan": None}]}, "with a given partition"),
        ({"callback": Planned()}, "can't be read without running code from it"),
    ],
    ids=str,
)
def test_a_file_without_a_plan(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "other.ckpt")
    with pytest.raises(ConfigurationError, match=message):
        load_plan(tmp_path / "other.ckpt")
