"""Costs that one run has measured are known to the next one, and all ranks go by one plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_tspipe import TSPipeStrategy
from lightning_tspipe.profiling.costs import CACHE
from tests.integration.jobs import run
from tests.integration.planned import WIDTH, Classifier
from tests.integration.trainings import quiet_trainer


def costs_of_step() -> float:
    """Train for a step; the seconds of all stages, by which it was planned."""
    module = Classifier("plain")
    data = TensorDataset(torch.randn(8, WIDTH), torch.zeros(8, dtype=torch.long))
    found: list[Any] = []

    def keep(*_: Any) -> None:
        found.append(trainer.strategy.resumption.now)  # type: ignore[attr-defined]

    module.on_before_optimizer_step = keep  # type: ignore[method-assign, assignment]
    trainer = quiet_trainer(devices=2, strategy=TSPipeStrategy(num_microbatches=2), max_steps=1)
    trainer.fit(module, DataLoader(data, batch_size=8))
    stages = found[0].plan.costs.student
    return round(sum(stage.forward + stage.backward for stage in stages), 12)


def test_the_next_run_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "costs"))
    first, other = run(costs_of_step, folder=tmp_path / "first")
    assert first == other  # of which no two measurements give the same
    assert run(costs_of_step, folder=tmp_path / "again") == [first, first]
    assert len(list((tmp_path / "costs").iterdir())) == 1


@pytest.mark.slow
def test_nothing_is_kept_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    first, _ = run(costs_of_step, folder=tmp_path / "first")
    again, _ = run(costs_of_step, folder=tmp_path / "again")
    assert first != again
    assert not (tmp_path / "home").exists()
