"""The rarer ways to log: from callbacks, with collections, groups and functions of one's own."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torchmetrics import MeanMetric, MetricCollection, MinMetric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import ClasswiseWrapper

from tests.integration.comparing import both, labelled
from tests.integration.trainings import (
    CLOSE,
    Session,
    Training,
)

CLASSIFIER = Training(
    "Classifier-group", "instance", {"num_microbatches": 1}, sizes=((5, 5, 3), (5, 5, 3))
)


class Logging(Callback):
    """Logs from every hook that may, in its own name and in the module's."""

    log: Any  # Lightning gives them to callbacks
    log_dict: Any

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("begun", 1.0)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.log("epoch_begun", float(trainer.current_epoch))

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.log("begins", batch_idx * 2.0, on_step=True, on_epoch=True, reduce_fx="sum")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.log("rate", optimizer.param_groups[0]["lr"], on_step=True)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.log_dict({"ends": batch_idx + 0.5, "step": float(trainer.global_step)}, on_epoch=True)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *indices: int
    ) -> None:
        pl_module.log("places", float(sum(indices)), on_epoch=True, add_dataloader_idx=True)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.log("epoch_over", float(trainer.current_epoch), prog_bar=True)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.log("val_over", trainer.callback_metrics["train_step"] * 2)


def log_rarely(module: Any) -> None:
    """Collections, wrappers, attributes by name, functions and groups."""
    module.train_metrics = MetricCollection(
        {"accuracy": MulticlassAccuracy(4), "best": MinMetric()}, prefix="train_"
    )
    module.val_metrics = MetricCollection([MulticlassAccuracy(4, average="micro")]).clone("val_")
    module.by_name = nn.ModuleDict({"mean": MeanMetric()})
    module.classes = ClasswiseWrapper(MulticlassAccuracy(4, average=None))
    module.accuracies = MetricCollection({"accuracy": MulticlassAccuracy(4)}, postfix="_step_end")

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        logits = module.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        values = module.accuracies(logits, batch[1])
        module.log_dict(values)
        module.train_metrics["accuracy"](logits, batch[1])
        module.train_metrics["best"](loss.detach())
        module.log_dict(module.train_metrics, on_step=True, on_epoch=True)
        module.by_name["mean"](loss.detach())
        module.log("named", module.by_name["mean"], metric_attribute="by_name.mean")
        module.log("train_step", float(module.global_step), on_epoch=True, reduce_fx="max")
        module.log("smallest", loss, on_step=False, on_epoch=True, reduce_fx="min")
        module.log("joined", loss, sync_dist=True, sync_dist_group=dist.group.WORLD)
        module.log("graph", loss, enable_graph=True, on_epoch=True)
        module.log("quiet", loss, prog_bar=False, logger=False, on_epoch=True, batch_size=2)
        return loss

    def validation_step(batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        logits = module.net(batch[0])
        module.classes.update(logits, batch[1])
        module.val_metrics.update(logits, batch[1])
        module.log_dict(
            {"loss": F.cross_entropy(logits, batch[1]), "count": float(len(batch[1]))},
            batch_size=len(batch[1]), on_step=True, on_epoch=True,
        )  # fmt: skip

    def on_validation_epoch_end() -> None:
        module.log_dict(module.classes.compute())
        module.log_dict(module.val_metrics.compute(), sync_dist=True)
        module.classes.reset()
        module.val_metrics.reset()

    module.training_step, module.validation_step = training_step, validation_step
    module.on_validation_epoch_end = on_validation_epoch_end


def fit_logging(training: Training) -> Any:
    logger = CSVLogger(".", name="", version="log")
    it = Session(training, Logging(), change=log_rarely, logger=logger, log_every_n_steps=2)
    it.fit(validation=[labelled(50), labelled(60)])
    bar = {name: float(value) for name, value in it.trainer.progress_bar_metrics.items()}
    return it.trained, bar


def test_rarer_forms_of_log(tmp_path: Path) -> None:
    expected, results = both(fit_logging, CLASSIFIER, tmp_path)
    assert expected[0].metrics.keys() >= {
        "begins_epoch", "ends", "epoch_over", "val_over", "train_accuracy_epoch", "train_best_step",
        "named", "joined", "places/dataloader_idx_1", "val_MulticlassAccuracy", "rate",
        "multiclassaccuracy_3", "loss_epoch/dataloader_idx_1", "accuracy_step_end", "smallest",
    }  # fmt: skip
    torch.testing.assert_close(results[0][0].weights, expected[0].weights, **CLOSE)
    for trained, _ in results:
        assert trained.metrics == pytest.approx(expected[0].metrics, rel=1e-9)
    assert results[0][1] == pytest.approx(expected[1], rel=1e-9)
    rows = []
    for name in ("alone", "together"):
        with (tmp_path / name / "log/metrics.csv").open() as file:
            rows.append(
                [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
            )
    assert len(rows[0]) > 4
    for theirs, ours in zip(*rows, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
