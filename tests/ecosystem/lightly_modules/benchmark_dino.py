"""DINO as in lightly's benchmark with a ResNet: the update is the last thing of the step."""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightly.loss import DINOLoss
from lightly.models.modules import DINOProjectionHead
from lightly.models.utils import activate_requires_grad, deactivate_requires_grad, update_momentum
from lightly.utils.benchmarking import OnlineLinearClassifier
from lightly.utils.scheduler import cosine_schedule
from pytorch_lightning import LightningModule
from torch import Tensor

from tests.ecosystem.lightly_modules.backbone import FEATURES, with_identity
from tests.ecosystem.lightly_modules.benchmark import (
    parameter_groups,
    validate_online,
    with_schedule,
)


class DINO(LightningModule):
    def __init__(self, batch_size_per_device: int, num_classes: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size_per_device = batch_size_per_device
        self.backbone = with_identity()
        self.projection_head = DINOProjectionHead(FEATURES, 16, 6, 12, freeze_last_layer=1)
        self.student_backbone = copy.deepcopy(self.backbone)
        self.student_projection_head = DINOProjectionHead(FEATURES, 16, 6, 12, freeze_last_layer=1)
        self.criterion = DINOLoss(output_dim=12)
        self.online_classifier = OnlineLinearClassifier(FEATURES, num_classes=num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(x)

    def forward_student(self, x: Tensor) -> Tensor:
        return self.student_projection_head(self.student_backbone(x).flatten(start_dim=1))

    def on_train_start(self) -> None:
        deactivate_requires_grad(self.backbone)
        deactivate_requires_grad(self.projection_head)

    def on_train_end(self) -> None:
        activate_requires_grad(self.backbone)
        activate_requires_grad(self.projection_head)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        views, targets = batch[0], batch[1]
        global_views = torch.cat(views[:2])
        local_views = torch.cat(views[2:])

        teacher_features = self.forward(global_views).flatten(start_dim=1)
        teacher_projections = self.projection_head(teacher_features)
        student_projections = torch.cat(
            [self.forward_student(global_views), self.forward_student(local_views)]
        )
        self.student_projection_head.cancel_last_layer_gradients(self.current_epoch)
        loss = self.criterion(
            teacher_projections.chunk(2),
            student_projections.chunk(len(views)),
            epoch=self.current_epoch,
        )
        self.log("train_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(targets))

        cls_loss, cls_log = self.online_classifier.training_step(
            (teacher_features.chunk(2)[0].detach(), targets), batch_idx
        )
        self.log_dict(cls_log, sync_dist=True, batch_size=len(targets))

        momentum = cosine_schedule(
            step=self.trainer.global_step,
            max_steps=self.trainer.estimated_stepping_batches,
            start_value=0.9,
            end_value=1.0,
        )
        update_momentum(self.student_backbone, self.backbone, m=momentum)
        update_momentum(self.student_projection_head, self.projection_head, m=momentum)
        return loss + cls_loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return validate_online(self, batch, batch_idx)

    def configure_optimizers(self) -> Any:
        networks = [self.student_backbone, self.student_projection_head]
        optimizer = torch.optim.SGD(
            parameter_groups(self, "dino", networks),
            lr=0.03 * self.batch_size_per_device * self.trainer.world_size,
            momentum=0.9,
            weight_decay=1e-4,
        )
        return with_schedule(self, optimizer)
