"""What a plan from configurations says of memory, and what the ranks of a run hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_tspipe import TSPipeStrategy
from lightning_tspipe.cli.language import LanguageStep, profile_language_step
from lightning_tspipe.planning.plan import Plan
from tests.integration.jobs import run
from tests.unit.cli.test_language_models import LENGTH, Distils, llama


class Watched(Distils):
    held: tuple[int, int] = (0, 0)

    def on_train_batch_end(self, *_: Any) -> None:
        """Count bytes of parameters and buffers that are here, and of their moments."""
        if self.trainer.global_step == 0:
            return
        state = self.trainer.optimizers[0].state
        here: list[Tensor] = [p for p in self.parameters() if not p.is_meta]
        moments = [v for p in here for key, v in state.get(p, {}).items() if key != "step"]
        read = [b for name, b in self.named_buffers() if "original" not in name and not b.is_meta]
        self.held = sum(t.nbytes for t in [*here, *read]), sum(t.nbytes for t in moments)


def trained(folder: Path, plan: str) -> tuple[int, int]:
    module = Watched(folder / "student", folder / "teacher", torch.float32)
    tokens, positions = torch.zeros(8, LENGTH).long(), torch.arange(LENGTH).repeat(8, 1)
    trainer = Trainer(
        strategy=TSPipeStrategy(plan=Plan.from_json(plan)), accelerator="cpu", devices=2,
        max_epochs=1, accumulate_grad_batches=4, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader([*zip(tokens, positions, tokens, strict=True)], 1))
    return module.held


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_ranks_hold_what_was_planned(schedule: str, tmp_path: Path) -> None:
    llama(16, 2).save_pretrained(tmp_path / "teacher")
    llama(8, 2, tied=True).save_pretrained(tmp_path / "student")
    step = LanguageStep(str(tmp_path / "student"), str(tmp_path / "teacher"), LENGTH)
    costs = profile_language_step(step, 1e9)
    plan = costs.plan(2, schedule=schedule, window=4, weights="synchronous")
    use = plan.memory
    assert use is not None
    held = map(sum, zip(use.parameters, use.teacher, strict=True))
    found = run(trained, tmp_path, plan.to_json(), folder=tmp_path / "run")
    assert found == list(zip(held, use.optimizer, strict=True))
