"""``verify_checkpoint``: a Trainer refuses what differs from what was written, or reads it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tspipe import TSPipeStrategy
from lightning_tspipe.cli.exporting import read_part
from lightning_tspipe.errors import CheckpointError
from lightning_tspipe.strategy.checkpoints.folders import (
    CONTENTS_FILE,
    META_FILE,
    TABLE_FILE,
    FolderSource,
)
from tests.unit.strategy.test_damage import SHARD, Running


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Linear(4, 4)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = self.student(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def batches() -> Any:
    return DataLoader(TensorDataset(torch.ones(2, 4)), batch_size=2)


def fit(folder: Path, ckpt_path: Path | None = None, **options: Any) -> Trainer:
    """One batch; from a checkpoint on, a second one."""
    strategy = TSPipeStrategy(schedule="sequential", **options)
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        max_steps=1 if ckpt_path is None else 2,
    )  # fmt: skip
    trainer.fit(Module(), batches(), ckpt_path=ckpt_path)
    return trainer


@pytest.fixture(params=["file", "folder"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    shards = request.param == "folder"
    trainer = fit(tmp_path, save_distributed_checkpoint=shards)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").is_dir() == shards
    return tmp_path / "a.ckpt"


def damage(path: Path) -> None:
    """Flip a bit of a weight."""
    name, file = "student.weight", path
    if path.is_dir():
        weight, file = FolderSource(path).tensors([name])[name], path / SHARD
    else:
        weight = torch.load(path)["state_dict"][name]
    content = bytearray(file.read_bytes())
    content[content.index(weight.numpy().tobytes())] ^= 1
    file.write_bytes(content)


def test_what_is_whole_goes_on(path: Path, tmp_path: Path) -> None:
    assert fit(tmp_path, path).global_step == 2
    assert fit(tmp_path, path, verify_checkpoint=False).global_step == 2


def test_a_flipped_bit_is_refused_unless_nothing_is_compared(path: Path, tmp_path: Path) -> None:
    damage(path)
    with pytest.raises(CheckpointError, match=r"a\.ckpt' is damaged: .* Give another ckpt_path"):
        fit(tmp_path, path)
    assert fit(tmp_path, path, verify_checkpoint=False).global_step == 2


def test_what_has_no_checksums_is_read_with_one_warning(path: Path, tmp_path: Path) -> None:
    file = path / META_FILE if path.is_dir() else path
    if path.is_dir():
        (path / TABLE_FILE).unlink()
    content = torch.load(file)
    content.pop("lightning_tspipe_checksums", None)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(content, file)
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.warns(UserWarning, match="has no checksums: it is loaded without verif") as told:
        assert fit(tmp_path, path).global_step == 2
    assert len([one for one in told if "checksums" in str(one.message)]) == 1
    assert fit(tmp_path, path, verify_checkpoint=False).global_step == 2


@pytest.mark.parametrize("path", ["folder"], indirect=True)
@pytest.mark.parametrize("weights_only", [None, True, False])
def test_a_folder_runs_nothing(path: Path, weights_only: bool | None, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    (path / TABLE_FILE).unlink()
    (path / CONTENTS_FILE).write_bytes(pickle.dumps(Running(trace)))
    trainer = Trainer(accelerator="cpu", devices=1, strategy="tspipe", logger=False, max_steps=2)
    with pytest.raises(CheckpointError, match=r"would load posix\.mkdir"):
        trainer.fit(Module(), batches(), ckpt_path=path, weights_only=weights_only)
    assert not trace.exists()


def test_a_file_of_plain_lightning_is_read(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, max_steps=1,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Module(), batches())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    assert fit(tmp_path, tmp_path / "plain.ckpt").global_step == 2


def test_an_export_compares_too_unless_told_not_to(path: Path) -> None:
    """``tspipe export``, with and without ``--no-verify``."""
    expected = read_part(path, "student")["weight"].clone()  # which may be mapped to the file
    damage(path)
    with pytest.raises(CheckpointError, match=r"a\.ckpt' is damaged"):
        read_part(path, "student")
    found = read_part(path, "student", verify=False)
    assert not torch.equal(found["weight"], expected)
