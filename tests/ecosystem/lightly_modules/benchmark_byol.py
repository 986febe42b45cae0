"""BYOL as in lightly's benchmark: LARS with groups, and a classifier on the student's features."""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightly.loss import NegativeCosineSimilarity
from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
from lightly.models.utils import update_momentum
from lightly.utils.benchmarking import OnlineLinearClassifier
from lightly.utils.lars import LARS
from lightly.utils.scheduler import cosine_schedule
from pytorch_lightning import LightningModule
from torch import Tensor

from tests.ecosystem.lightly_modules.backbone import FEATURES, with_identity
from tests.ecosystem.lightly_modules.benchmark import (
    parameter_groups,
    validate_online,
    with_schedule,
)


class BYOL(LightningModule):
    def __init__(self, batch_size_per_device: int, num_classes: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size_per_device = batch_size_per_device
        self.backbone = with_identity()
        self.projection_head = BYOLProjectionHead(FEATURES, 16, 6)
        self.prediction_head = BYOLPredictionHead(6, 16, 6)
        self.teacher_backbone = copy.deepcopy(self.backbone)
        self.teacher_projection_head = BYOLProjectionHead(FEATURES, 16, 6)
        self.criterion = NegativeCosineSimilarity()
        self.online_classifier = OnlineLinearClassifier(FEATURES, num_classes=num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(x)

    def forward_student(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self(x).flatten(start_dim=1)
        return features, self.prediction_head(self.projection_head(features))

    @torch.no_grad()
    def forward_teacher(self, x: Tensor) -> Tensor:
        return self.teacher_projection_head(self.teacher_backbone(x).flatten(start_dim=1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        momentum = cosine_schedule(
            step=self.trainer.global_step,
            max_steps=self.trainer.estimated_stepping_batches,
            start_value=0.9,
            end_value=1.0,
        )
        update_momentum(self.backbone, self.teacher_backbone, m=momentum)
        update_momentum(self.projection_head, self.teacher_projection_head, m=momentum)

        views, targets = batch[0], batch[1]
        teacher_0 = self.forward_teacher(views[0])
        teacher_1 = self.forward_teacher(views[1])
        features_0, predictions_0 = self.forward_student(views[0])
        _, predictions_1 = self.forward_student(views[1])
        loss = 2 * self.criterion(teacher_0, predictions_1)
        loss = loss + 2 * self.criterion(teacher_1, predictions_0)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(targets))

        cls_loss, cls_log = self.online_classifier.training_step(
            (features_0.detach(), targets), batch_idx
        )
        self.log_dict(cls_log, sync_dist=True, batch_size=len(targets))
        return loss + cls_loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return validate_online(self, batch, batch_idx)

    def configure_optimizers(self) -> Any:
        networks = [self.backbone, self.projection_head, self.prediction_head]
        optimizer = LARS(
            parameter_groups(self, "byol", networks),
            lr=0.45 * self.batch_size_per_device * self.trainer.world_size / 256,
            momentum=0.9,
            weight_decay=1e-6,
        )
        return with_schedule(self, optimizer)
