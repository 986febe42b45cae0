"""A recorded run: who waited for what, and what the logger gets."""

from __future__ import annotations

import csv
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_tspipe import PipelineTimeline
from lightning_tspipe.simulation.attribution import Cause, attribute
from lightning_tspipe.simulation.timeline import Timeline
from tests.exactness.modules import make_epochs
from tests.integration.by_hand import ByHand, adversarial, network_and_probe
from tests.integration.jobs import run
from tests.integration.trainings import Session, Training, Unsized

BYOL = Training("Byol-group-2-by hand", "instance", {"num_microbatches": 2})
STEPS = {"start_step": 1, "num_steps": 5}


def fit(training: Training, window: dict[str, int], options: dict[str, Any]) -> None:
    """Train with a recorded window."""
    is_unsized = options.pop("unsized", False)
    logger = CSVLogger(".", name="", version="log")
    it = Session(training, PipelineTimeline(**window), **{"logger": logger, **options})
    it.fit(Unsized(make_epochs(it.module, training.sizes)) if is_unsized else None)


def recorded(
    folder: Path,
    num_ranks: int = 2,
    window: dict[str, int] = STEPS,
    training: Training = BYOL,
    **options: Any,
) -> Timeline:
    pytest.importorskip("matplotlib")
    run(
        fit, replace(training, num_ranks=num_ranks), window, options,
        num_ranks=num_ranks, folder=folder,
    )  # fmt: skip
    assert (folder / "log" / "timeline.png").exists()
    return Timeline.from_json((folder / "log" / "timeline.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_idle_moment_has_a_cause(num_ranks: int, tmp_path: Path) -> None:
    timeline = recorded(tmp_path, num_ranks, gradient_clip_val=0.1)
    assert timeline.steps == (1, 2, 3, 4, 5)
    assert timeline.pipeline is not None
    assert timeline.pipeline.num_ranks == timeline.num_ranks == num_ranks
    found = attribute(timeline)
    for rank, (start, end) in enumerate(timeline.windows):
        idle = (end - start - timeline.busy(rank)) / timeline.num_steady_steps
        assert found.seconds(rank) == pytest.approx(idle)
        assert found.seconds(rank, Cause.TRAINER) > 0
    data_rank = num_ranks - 1
    assert found.seconds(data_rank, Cause.LOADER) > 0
    for rank in range(num_ranks):
        # Clipping takes the norm over all ranks; what is awaited is another rank's.
        assert (found.seconds(rank, Cause.OPTIMIZER) > 0) == (num_ranks > 1)
        assert (found.seconds(rank, Cause.WAITING) > 0) == (num_ranks > 1)
        assert all(span.rank != rank for span, _ in found.awaited(rank))
    # The loss is one action with two halves: itself and its backward.
    losses = [span for span in timeline.spans if span.action == "0L"]
    assert len(losses) == 2 * len(timeline.steps)


@pytest.mark.slow
def test_the_logger_gets_the_figures_once(tmp_path: Path) -> None:
    timeline = recorded(tmp_path, log_every_n_steps=100)
    with (tmp_path / "log" / "metrics.csv").open() as file:
        (row,) = [row for row in csv.DictReader(file) if row.get("timeline/step_ms")]
    assert int(row["step"]) == 6
    assert float(row["timeline/step_ms"]) == pytest.approx(timeline.step_time * 1e3)
    assert float(row["timeline/bubble_ratio"]) == pytest.approx(timeline.bubble_ratio)
    for stage in (0, 1):
        for kind in ("forward", "backward", "teacher"):
            assert float(row[f"timeline/stage{stage}_{kind}_ms"]) > 0
        assert float(row[f"timeline/rank{stage}_idle_ms"]) > 0


@pytest.mark.parametrize(
    ("window", "steps"),
    [
        # From the first batch on, before the networks are cut.
        ({"start_step": 0, "num_steps": 2}, (0, 1)),
        # Training ends after 8 steps.
        ({"start_step": 6, "num_steps": 10}, (6, 7)),
    ],
)
def test_windows_at_the_ends_of_training(
    window: dict[str, int], steps: tuple[int, ...], tmp_path: Path
) -> None:
    assert recorded(tmp_path, window=window).steps == steps


@pytest.mark.slow
def test_a_loader_without_a_length(tmp_path: Path) -> None:
    timeline = recorded(tmp_path, unsized=True)
    assert {pause.rank for pause in timeline.pauses if pause.reason == "load"} == {0, 1}


@pytest.mark.slow
def test_optimization_by_hand(tmp_path: Path) -> None:
    """A critic's step is a part of the loss; that of the network is on every rank."""
    training = replace(BYOL, change=ByHand(adversarial, network_and_probe))
    timeline = recorded(tmp_path, training=training)
    assert timeline.steps == (1, 2, 3, 4, 5)
    for rank in range(timeline.num_ranks):
        spans = timeline.of_rank(rank)
        assert all(before.end <= after.start for before, after in pairwise(spans))
        assert sum(span.op == "O" for span in spans) >= 5
