"""Layers freeze, pipelines get shorter, replicas join: the mathematics is that of one device."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tspipe.callbacks.cached_pipelines import CachedPrefix
from lightning_tspipe.strategy.training.repacking import Repacking
from tests.choosing import some_of
from tests.integration.freezing import Case, Found, train
from tests.integration.jobs import run, run_job
from tests.integration.trainings import CLOSE
from tests.leftovers import none_left


def alone(case: Case, folder: Path) -> Found:
    single = replace(case, strategy="auto", num_ranks=1, options={}, repack=False)
    found: Found = run(train, single, num_ranks=1, folder=folder)[0]
    return found


def together(case: Case, folder: Path) -> list[Found]:
    return run(train, case, num_ranks=case.num_ranks, folder=folder)


def assert_same(expected: Found, ranks: list[Found], *, reads: bool = True) -> None:
    """Losses of the whole batch, weights, optimizer, learning rates; and every sample once."""
    rank = ranks[0]
    torch.testing.assert_close(rank.weights, expected.weights, **CLOSE)
    torch.testing.assert_close(rank.optimizer["state"], expected.optimizer["state"], **CLOSE)
    assert rank.rates == expected.rates
    assert {found.global_step for found in ranks} == {expected.global_step}
    for epoch, whole in enumerate(expected.read if reads else ()):
        parts = [index for found in ranks for index in found.read[epoch]]
        assert sorted(parts) == sorted(whole)


def assert_same_metrics(expected: Found, ranks: list[Found]) -> None:
    """What is logged at the end of an epoch, in which a pipeline has changed."""
    metrics = dict(ranks[0].metrics)
    assert metrics.pop("transition_seconds") == ranks[0].history[-1]["seconds"] > 0
    assert metrics == pytest.approx(expected.metrics, rel=1e-9)


def by_hand(parts: int, **options: Any) -> dict[str, Any]:
    """The first cuts; stem, five blocks and head are an atom each."""
    cuts = [7 * (i + 1) // parts - 7 * i // parts for i in range(parts)]
    return {"partition": {"student": cuts}, "num_microbatches": 2, **options}


def test_a_frozen_part_runs_ahead_and_a_shorter_pipeline_trains_the_rest(tmp_path: Path) -> None:
    # 8 + 8 + 5 samples: of the last batch, two replicas get 3 and 2.
    case = Case(options=by_hand(2), frozen={1: 2, 2: 4}, repack={4: 1}, num_samples=21,
                compares=True, validates=True, shuffle=False, averaged=True)  # fmt: skip
    expected = alone(case, tmp_path)
    ranks = together(case, tmp_path)
    assert_same(expected, ranks)
    torch.testing.assert_close(ranks[0].losses[:6], expected.losses[:6], **CLOSE)
    assert_same_metrics(expected, ranks)
    assert set(expected.metrics) == {"val_loss", "val_loss_of_average", "frozen_layers"}
    for rank in ranks:
        assert rank.num_ranks == [2, 2, 1]
        assert rank.replicas == 2
        assert rank.ran_ahead == [False] * 3 + [False, True, True] * 2
        assert rank.moved == []
        assert [entry["num_replicas"] for entry in rank.history] == [1, 2]
        assert all(entry["seconds"] > 0 for entry in rank.history)


SELDOM: list[tuple[int, dict[int, int]]] = [(2, {4: 1}), (3, {}), (4, {4: 3}), (4, {2: 1})]
SLOW: list[tuple[int, dict[int, int]]] = [(2, {2: 1}), (3, {2: 2, 4: 1}), (4, {2: 2, 4: 1})]
SOME = [
    *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in SELDOM),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
]
"""Ranks at the start, and stages of what is trained by the number of frozen layers."""
SHORTENED = Case(frozen={1: 2, 3: 4}, epochs=5, num_samples=22, averaged=True, compares=True)
"""Cached, epoch 1 computes, 2 reads, 3 pushes on what was read, 4 reads."""


@pytest.fixture(scope="module")
def shortened(tmp_path_factory: Any) -> Found:
    return alone(SHORTENED, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(("num_ranks", "repack"), SOME, ids=str)
def test_any_number_of_stages(
    num_ranks: int, repack: dict[int, int], shortened: Found, tmp_path: Path
) -> None:
    case = replace(SHORTENED, options=by_hand(num_ranks), num_ranks=num_ranks, repack=repack)
    ranks = together(case, tmp_path)
    assert_same(shortened, ranks)
    assert [rank.moved for rank in ranks] == [[]] * num_ranks
    assert ranks[0].history[-1]["num_ranks"] * ranks[0].replicas == num_ranks


@pytest.mark.parametrize(("num_ranks", "repack"), SOME, ids=str)
def test_activations_that_are_read_are_those_that_would_be_computed(
    num_ranks: int, repack: dict[int, int], shortened: Found, tmp_path: Path
) -> None:
    case = replace(SHORTENED, options=by_hand(num_ranks), num_ranks=num_ranks, repack=repack,
                   cache=True)  # fmt: skip
    ranks = together(case, tmp_path)
    assert_same(shortened, ranks, reads=False)
    for rank in ranks:
        assert rank.moved == []
        assert [entry["hit_rate"] for entry in rank.history] == [1.0, 1.0]
        # Inputs are loaded until what was kept has been compared once, and never again.
        assert [len(read) for read in rank.read[3:]] == [0, 0]
    assert ranks[0].metrics["cache_hit_rate"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("memory", [8_000_000, 64 * (22 * 8 + 12)], ids=["all", "some"])
def test_samples_of_a_batch_that_are_known_differently_far(memory: int, tmp_path: Path) -> None:
    """Epochs that leave samples out, and a budget that is too small for all of them."""
    case = Case(options=by_hand(3), num_ranks=3, repack={}, frozen={1: 2, 3: 4}, epochs=6,
                num_samples=22, cache=True, drop_last=True, memory=memory)  # fmt: skip
    expected = alone(replace(case, cache=False), tmp_path)
    ranks = together(case, tmp_path)
    assert_same(expected, ranks, reads=False)
    rate = ranks[0].history[-1]["hit_rate"]
    assert rate > 0.9 if memory > 10**6 else 0 < rate < 0.9


@pytest.mark.slow
def test_normalisation_that_is_frozen_counts_nothing(tmp_path: Path) -> None:
    # Whole batches on one replica, as long as statistics of the batch are used.
    case = Case(options=by_hand(2, num_microbatches=1), normalised=True, frozen={0: 2, 1: 6},
                num_active=1, repack={6: 1}, validates=True, shuffle=False,
                averaged=True)  # fmt: skip
    expected = alone(case, tmp_path)
    ranks = together(case, tmp_path)
    assert_same(expected, ranks)
    assert ranks[0].num_ranks == [2, 1, 1]
    assert_same_metrics(expected, ranks)


@pytest.mark.slow
def test_replicas_from_the_start_and_a_run_that_goes_on(tmp_path: Path) -> None:
    """Two replicas of two stages become four of one; a checkpoint of these, and one of before."""
    case = Case(options=by_hand(2, num_stages=2), num_ranks=4, repack={2: 1}, frozen={1: 2},
                batch_size=4, num_samples=22, save_at=4)  # fmt: skip
    expected = alone(replace(case, batch_size=8, save_at=0), tmp_path)
    assert_same(expected, together(case, tmp_path))
    # The second batch of the second epoch was saved on the new mesh: go on from there.
    ranks = together(replace(case, resume=True), tmp_path)
    assert ranks[0].num_ranks == [1, 1]
    assert ranks[0].replicas == 4
    torch.testing.assert_close(ranks[0].weights, expected.weights, **CLOSE)
    torch.testing.assert_close(ranks[0].optimizer["state"], expected.optimizer["state"], **CLOSE)
    whole = sorted(index for rank in ranks for index in rank.read[1])
    assert whole == sorted(expected.read[2])


@pytest.mark.parametrize(
    ("step", "cache"),
    some_of([(2, False), (3, False), (6, True), (8, True)], slow=[(3, False), (8, True)]),
)
def test_a_checkpoint_between_transitions(step: int, cache: bool, tmp_path: Path) -> None:
    """Within the first epoch, at the ends of epochs that another mesh follows, in the last one."""
    case = Case(options=by_hand(2), repack={4: 1}, frozen={1: 2, 2: 4}, save_at=step, cache=cache,
                averaged=True)  # fmt: skip
    expected = alone(replace(case, save_at=0, cache=False), tmp_path)
    assert_same(expected, together(case, tmp_path), reads=not cache)
    ranks = together(replace(case, resume=True), tmp_path)
    assert [entry["num_frozen"] for entry in ranks[0].history] == [2, 4]
    torch.testing.assert_close(ranks[0].weights, expected.weights, **CLOSE)
    torch.testing.assert_close(ranks[0].optimizer["state"], expected.optimizer["state"], **CLOSE)


@pytest.mark.parametrize(
    ("num_ranks", "step"),
    some_of([(1, 2), (1, 4), (2, 3), (2, 6), (3, 4)], slow=[(1, 4), (2, 6)]),
)
def test_a_run_goes_on_with_other_devices(num_ranks: int, step: int, tmp_path: Path) -> None:
    """Global batches are two of the loader, whatever the number of replicas."""
    case = Case(options={"num_stages": 2, "num_microbatches": 2}, num_ranks=4, repack={2: 1},
                batch_size=4, num_samples=22, save_at=step)  # fmt: skip
    whole = together(case, tmp_path)
    # 3 batches per epoch; replicas: 2, and 4 from the second epoch on.
    assert [rank.replicas for rank in whole] == [4] * 4
    other = replace(case, num_ranks=num_ranks, options={"num_microbatches": 2}, resume=True)
    ranks = together(other, tmp_path)
    assert ranks[0].replicas == num_ranks
    torch.testing.assert_close(ranks[0].weights, whole[0].weights, **CLOSE)
    torch.testing.assert_close(ranks[0].optimizer["state"], whole[0].optimizer["state"], **CLOSE)
    read = sorted(index for rank in ranks for index in rank.read[-1])
    assert read == sorted(index for rank in whole for index in rank.read[-1])


@pytest.mark.slow
def test_statistics_of_other_replicas_are_told(tmp_path: Path) -> None:
    case = Case(options=by_hand(2, num_microbatches=1), num_ranks=2, normalised=True,
                frozen={1: 2}, repack={2: 1}, num_samples=24, save_at=2)  # fmt: skip
    together(case, tmp_path)
    for options, num_ranks in ((case.options, 2), ({"num_microbatches": 1}, 1)):
        other = replace(case, num_ranks=num_ranks, options=options, resume=True)
        job = run_job(train, other, num_ranks=num_ranks, folder=tmp_path)  # a warning ends it
        told = "BatchNorm normalises by the samples of a replica" in job.errors[0]
        assert told == (num_ranks == 1)
        assert any(job.errors) == told


@pytest.mark.slow
def test_random_numbers_of_other_replicas_are_told(tmp_path: Path) -> None:
    case = Case(options=by_hand(2), num_ranks=2, draws_samples=True, frozen={1: 2}, repack={2: 1},
                num_samples=24, save_at=2)  # fmt: skip
    together(case, tmp_path)
    for options, num_ranks in ((case.options, 2), ({"num_microbatches": 1}, 1)):
        other = replace(case, num_ranks=num_ranks, options=options, resume=True)
        job = run_job(train, other, num_ranks=num_ranks, folder=tmp_path)  # a warning ends it
        told = "training_step draws random numbers for the samples of a replica" in job.errors[0]
        assert told == (num_ranks == 1), job.output
        assert any(job.errors) == told


@pytest.mark.slow
def test_a_step_draws_the_same_after_a_transition(tmp_path: Path) -> None:
    case = Case(options=by_hand(2), frozen={1: 2}, num_samples=24, draws=True)
    stays, moves = (together(replace(case, repack=r), tmp_path) for r in (False, {2: 1}))
    assert [ranks[0].num_ranks[-1] for ranks in (stays, moves)] == [2, 1]
    torch.testing.assert_close(moves[0].weights, stays[0].weights, **CLOSE)


@pytest.mark.slow
def test_as_few_stages_as_memory_and_time_say(tmp_path: Path) -> None:
    case = Case(options={"num_microbatches": "auto"}, repack=True, num_samples=24)
    expected = alone(case, tmp_path)
    ranks = together(case, tmp_path)
    assert_same(expected, ranks)
    # Stages of microseconds: whatever is sent costs more.
    assert ranks[0].history[-1]["num_ranks"] == 1


@pytest.mark.slow
def test_ddp_freezes_only(tmp_path: Path) -> None:
    case = Case(strategy="ddp", batch_size=4, num_samples=16, shuffle=False)
    expected = alone(replace(case, batch_size=8), tmp_path)
    ranks = together(case, tmp_path)
    for rank in ranks:
        torch.testing.assert_close(rank.weights, expected.weights, **CLOSE)
        assert [entry["num_frozen"] for entry in rank.history] == [2, 4]


def killed(case: Case) -> None:
    """A rank is killed while groups are made anew."""
    original = Repacking._change

    def change(self: Repacking, num_ranks: int) -> None:
        if self.run.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, num_ranks)

    Repacking._change = change  # type: ignore[method-assign]
    train(case)


def test_a_rank_that_is_killed_in_a_transition(tmp_path: Path) -> None:
    case = Case(options={**by_hand(2), "timeout": timedelta(seconds=20)}, repack={2: 1}, save_at=2)
    job = run_job(killed, case, num_ranks=2, folder=tmp_path, seconds=60)
    assert job.ranks[1].exit_code == -signal.SIGKILL
    assert job.ranks[0].exit_code not in {0, -signal.SIGKILL}
    (cause,) = re.findall(r"The job ends, because rank 1 \(pid \d+ on \S+\) (.*?)\. ", job.output)
    assert cause == "was killed by SIGKILL in the beginning of epoch 1"
    assert "rank 0 waited at the barrier 'another mesh' for a rank that ended" in job.output
    # What was saved before is whole, and one can go on from it.
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert saved["global_step"] == 2
    ranks = together(replace(case, resume=True), tmp_path)
    expected = alone(replace(case, save_at=0), tmp_path)
    torch.testing.assert_close(ranks[0].weights, expected.weights, **CLOSE)


def all_killed(case: Case) -> None:
    """All ranks are killed while they read what they have kept, in memory and on disk."""
    Path(f"pid-{os.environ['LOCAL_RANK']}").write_text(str(os.getpid()), encoding="ascii")
    original = CachedPrefix.run

    def run(self: CachedPrefix, *args: Any) -> Any:
        found = original(self, *args)
        cache = self._shared.cache
        assert cache is not None
        if cache.counts.hits and min(cache.num_bytes) > 0:
            files = [f"/proc/self/fd/{part.file}" for part in cache.handle if part is not None]
            lines = [f"{identity(Path(file))}\n" for file in files]
            Path("files").write_text("".join(lines), encoding="ascii")
            own = f"pid-{os.environ['LOCAL_RANK']}"
            for file in sorted(Path().glob("pid-*"), key=lambda file: file.name == own):
                os.kill(int(file.read_text(encoding="ascii")), signal.SIGKILL)
        return found

    CachedPrefix.run = run  # type: ignore[method-assign,assignment]
    train(case)


def identity(file: Path) -> str:
    """What distinguishes an open file from all others, whatever number it has in a process."""
    status = file.stat()
    return f"{status.st_dev} {status.st_ino}"


def still_open() -> set[str]:
    """The files that any process has open."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it has been closed meanwhile, or is another user's
            found.add(identity(file))
    return found


@pytest.mark.slow
def test_a_job_that_is_killed_leaves_no_activations_behind(tmp_path: Path) -> None:
    case = Case(options=by_hand(2), frozen={1: 4}, cache=True, memory=512, disk=10**6)
    with none_left(tmp_path):
        job = run_job(all_killed, case, num_ranks=2, folder=tmp_path, seconds=60)
    assert [rank.exit_code for rank in job.ranks] == [-signal.SIGKILL] * 2, job.output
    files = (tmp_path / "files").read_text().splitlines()
    assert len(files) == 3  # the table, memory, disk
    assert not still_open().intersection(files)
    ours = {"files", "pid-0", "pid-1", "output-0.txt", "output-1.txt"}
    assert {path.name for path in tmp_path.iterdir()} == ours


def test_a_cache_that_is_asked_for_needs_ids_and_space(tmp_path: Path) -> None:
    case = Case(options=by_hand(2), cache=True, with_ids=False)
    for change, message in (
        (case, "WithIds(dataset)"),
        (replace(case, with_ids=True, memory=0), "budget above 0"),
    ):
        job = run_job(train, change, num_ranks=2, folder=tmp_path, seconds=60)
        assert all(message in error for error in job.errors), job.output
