"""All ranks go on from the checkpoint that rank 0 has chosen."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_tspipe import AutoResume
from tests.integration.jobs import run
from tests.integration.trainings import CLOSE, RESUMING, Session, Training

OPTIONS = {"num_microbatches": 1}
TRAINING = Training("Byol-group-2-by hand", "instance", OPTIONS, sizes=((4,) * 8,))
IGNORED = (RESUMING, "Checkpoint directory .* exists", "AutoResume skips")


def stop_and_start_again(training: Training) -> tuple[list[Any], list[Any], str]:
    """The losses of a whole run, those of one that goes on, and from where."""

    def session(*callbacks: Any, **trainer: Any) -> Session:
        saves = ModelCheckpoint("saved", every_n_train_steps=1, save_top_k=-1, filename="{step}")
        options = {"enable_checkpointing": True, "max_epochs": -1, **trainer}
        return Session(training, *callbacks, saves, ignored=IGNORED, **options)

    whole = Session(training).fit().trained.losses
    it = session(max_steps=5).fit()
    if it.trainer.is_global_zero:
        newest = Path("saved/step=5.ckpt")
        damaged = next(newest.glob("*.distcp")) if newest.is_dir() else newest
        os.truncate(damaged, 100)
    again = session(AutoResume(), max_steps=8).fit(weights_only=False)
    return whole, again.trained.losses, str(again.trainer.ckpt_path)


@pytest.mark.parametrize("shards", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_agree_on_the_newest_whole_checkpoint(shards: bool, tmp_path: Path) -> None:
    options = {**OPTIONS, "save_distributed_checkpoint": shards}
    training = replace(TRAINING, options=options)
    ranks = run(stop_and_start_again, training, folder=tmp_path)
    assert {path for _, _, path in ranks} == {str(tmp_path / "saved" / "step=4.ckpt")}
    whole, again, _ = ranks[0]
    assert len(again) == 4
    torch.testing.assert_close(again, whole[4:], **CLOSE)
