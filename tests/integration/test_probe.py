"""The online linear probe learns under a pipeline what it learns on one device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tspipe import KNNEvaluator, OnlineLinearProbe, TSPipeStrategy
from tests.exactness.modules import NUM_CLASSES, encoder, frozen_copy, images, labels
from tests.integration.jobs import run
from tests.integration.test_callbacks import column, rows_of
from tests.integration.trainings import CLOSE, metrics_of, quiet_trainer, strict, weights_of

CHECKPOINT = "after_one_epoch.ckpt"


class Distillation(LightningModule):
    """Neither labels nor features are used by its step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head = encoder("group"), nn.Linear(6, 6)
        self.teacher = frozen_copy(encoder("group"))

    def training_step(self, batch: Any) -> Tensor:
        views = batch[0]
        return F.mse_loss(self.head(self.backbone(views)), self.teacher(views))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2)


def labelled(size: int, seed: int) -> TensorDataset:
    return TensorDataset(images(size, seed), labels(size, seed))


def train_with_probe(
    strategy: str, num_ranks: int, num_epochs: int, *, probed: bool, resume: bool
) -> dict[str, Any]:
    """Fit; what rank 0 knows then."""
    strict(".*sync_dist=True.*", "You're resuming from a checkpoint that ended")
    module, batch_size = Distillation(), 4
    chosen: Any = strategy
    if strategy == "tspipe":
        chosen = TSPipeStrategy(student=["backbone", "head"], num_stages=2)
    number = {"auto": 1, "ddp": num_ranks, "tspipe": num_ranks // 2}[strategy]
    probe = OnlineLinearProbe(NUM_CLASSES, labelled(10, 7), "backbone", lr=0.3, batch_size=3)
    knn = KNNEvaluator(labelled(11, 8), labelled(10, 7), "backbone", k=3, batch_size=3)
    trainer = quiet_trainer(
        devices=num_ranks, strategy=chosen, max_epochs=num_epochs,
        callbacks=[probe, knn] if probed else [], logger=CSVLogger(".", name="", version="csv"),
        use_distributed_sampler=False,
    )  # fmt: skip
    # Replicas share each batch: its first half is that of the first one.
    data = labelled(16, 3)
    place = int(os.environ.get("LOCAL_RANK", "0")) // max(num_ranks // number, 1)
    share = batch_size // number
    starts = [start + place * share for start in range(0, len(data), batch_size)]
    mine = [list(range(start, start + share)) for start in starts]
    loader = DataLoader(data, batch_sampler=mine)
    trainer.fit(module, loader, ckpt_path=CHECKPOINT if resume else None)
    trainer.save_checkpoint(CHECKPOINT)
    state = {} if probe.classifier is None else probe.classifier.state_dict()
    return {
        "probe": {name: tensor.clone() for name, tensor in state.items()},
        "module": weights_of(module),
        "metrics": metrics_of(trainer),
        "is_clean": "training_step" not in vars(module),
    }


def trained(folder: Path, strategy: str = "auto", num_ranks: int = 1, **options: Any) -> Any:
    folder.mkdir(exist_ok=True)
    chosen = {"num_epochs": 2, "probed": True, "resume": False, **options}
    return run(
        _train, strategy, num_ranks, chosen, num_ranks=num_ranks, folder=folder
    )  # fmt: skip


def _train(strategy: str, num_ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    return train_with_probe(strategy, num_ranks, **options)


def losses_of(folder: Path) -> list[float]:
    return column(rows_of(folder / "csv" / "metrics.csv"), "train_probe_loss")


def assert_like(folder: Path, ranks: list[Any], expected: Any, alone: Path) -> None:
    torch.testing.assert_close(ranks[0]["probe"], expected["probe"], **CLOSE)
    for name in ("val_probe_top1", "val_probe_top5", "train_probe_loss", "val_knn_top1"):
        assert ranks[0]["metrics"][name] == pytest.approx(expected["metrics"][name], rel=1e-9)
    assert losses_of(folder) == pytest.approx(losses_of(alone), rel=1e-9)
    assert all(rank["is_clean"] for rank in ranks)


def test_a_pipeline_learns_what_one_device_learns(tmp_path: Path) -> None:
    (expected,) = trained(tmp_path / "alone")
    first, *_ = losses_of(tmp_path / "alone")
    assert first == pytest.approx(torch.tensor(NUM_CLASSES).log().item())
    assert len(losses_of(tmp_path / "alone")) == 8
    ranks = trained(tmp_path / "piped", "tspipe", 2)
    assert_like(tmp_path / "piped", ranks, expected, tmp_path / "alone")
    assert ranks[1]["probe"] == {}


@pytest.mark.slow
def test_it_goes_on_from_a_checkpoint_and_leaves_training_alone(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", "tspipe", 2)
    trained(tmp_path / "parts", "tspipe", 2, num_epochs=1)
    ranks = trained(tmp_path / "parts", "tspipe", 2, resume=True)
    torch.testing.assert_close(ranks[0]["probe"], whole[0]["probe"], rtol=0, atol=0)
    without = trained(tmp_path / "without", "tspipe", 2, probed=False)
    torch.testing.assert_close(without[0]["module"], whole[0]["module"], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "num_ranks"), [("ddp", 2), ("tspipe", 4)])
def test_replicas_average_its_gradients(strategy: str, num_ranks: int, tmp_path: Path) -> None:
    (expected,) = trained(tmp_path / "alone")
    ranks = trained(tmp_path / "replicas", strategy, num_ranks)
    assert_like(tmp_path / "replicas", ranks, expected, tmp_path / "alone")
