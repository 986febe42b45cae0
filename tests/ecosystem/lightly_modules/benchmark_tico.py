"""TiCo as in lightly's benchmark: ``backbone`` is the teacher, whose features are classified."""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightly.loss.tico_loss import TiCoLoss
from lightly.models.modules.heads import TiCoProjectionHead
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


class TiCo(LightningModule):
    def __init__(
        self, batch_size_per_device: int, num_classes: int, gather_distributed: bool = False
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size_per_device = batch_size_per_device
        self.backbone = with_identity()
        self.projection_head = TiCoProjectionHead(FEATURES, 16, 6)
        self.student_backbone = copy.deepcopy(self.backbone)
        self.student_projection_head = copy.deepcopy(self.projection_head)
        self.criterion = TiCoLoss(gather_distributed=gather_distributed)
        self.online_classifier = OnlineLinearClassifier(FEATURES, num_classes=num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(x)

    @torch.no_grad()
    def forward_teacher(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self(x).flatten(start_dim=1)
        return features, self.projection_head(features)

    def forward_student(self, x: Tensor) -> Tensor:
        return self.student_projection_head(self.student_backbone(x).flatten(start_dim=1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        momentum = cosine_schedule(
            step=self.trainer.global_step,
            max_steps=self.trainer.estimated_stepping_batches,
            start_value=0.9,
            end_value=1.0,
        )
        update_momentum(self.student_backbone, self.backbone, m=momentum)
        update_momentum(self.student_projection_head, self.projection_head, m=momentum)

        views, targets = batch[0], batch[1]
        teacher_features, teacher_projections = self.forward_teacher(views[0])
        student_projections = self.forward_student(views[1])
        loss = self.criterion(teacher_projections, student_projections)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(targets))

        cls_loss, cls_log = self.online_classifier.training_step(
            (teacher_features.detach(), targets), batch_idx
        )
        self.log_dict(cls_log, sync_dist=True, batch_size=len(targets))
        return loss + cls_loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return validate_online(self, batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = LARS(
            parameter_groups(self, "tico", [self.student_backbone, self.student_projection_head]),
            lr=0.2 * self.batch_size_per_device * self.trainer.world_size / 256,
            momentum=0.9,
            weight_decay=1.5e-6,
        )
        return with_schedule(self, optimizer)
