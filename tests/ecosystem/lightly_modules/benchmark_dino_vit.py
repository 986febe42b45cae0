"""DINO as in lightly's benchmark with a ViT: the hooks clip, and change weight decay and gradients.

The clipping hook is the one of the iBOT and DINOv2 benchmarks.
"""

from __future__ import annotations

from typing import Any

import torch
from lightly.loss import DINOLoss
from lightly.models.modules import DINOProjectionHead
from lightly.models.utils import update_momentum
from lightly.utils.benchmarking import OnlineLinearClassifier
from lightly.utils.optim import update_param_groups
from lightly.utils.scheduler import cosine_schedule
from pytorch_lightning import LightningModule
from torch import Tensor

from tests.ecosystem.lightly_modules.backbone import FEATURES, small_vit
from tests.ecosystem.lightly_modules.benchmark import (
    parameter_groups,
    validate_online,
    with_schedule,
)


def _head(freeze_last_layer: int = -1) -> DINOProjectionHead:
    return DINOProjectionHead(
        FEATURES, 16, 6, 12, freeze_last_layer=freeze_last_layer, norm_last_layer=False
    )


class DINO(LightningModule):
    def __init__(self, batch_size_per_device: int, num_classes: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size_per_device = batch_size_per_device
        self.backbone = small_vit()
        self.projection_head = _head()
        self.student_backbone = small_vit()
        self.student_projection_head = _head(freeze_last_layer=1)
        self.criterion = DINOLoss(output_dim=12, warmup_teacher_temp=0.04, teacher_temp=0.04)
        self.online_classifier = OnlineLinearClassifier(FEATURES, num_classes=num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(x)

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
        global_views = torch.cat(views[:2])
        local_views = torch.cat(views[2:])
        with torch.no_grad():
            teacher_features = self.forward(global_views).flatten(start_dim=1)
            teacher_projections = self.projection_head(teacher_features)
        student_projections = torch.cat(
            [self.forward_student(global_views), self.forward_student(local_views)]
        )
        loss = self.criterion(
            teacher_out=teacher_projections.chunk(2),
            student_out=student_projections.chunk(len(views)),
            epoch=self.current_epoch,
            teacher_temp=0.04,
        )
        self.log_dict(
            {"train_loss": loss, "ema_momentum": momentum},
            prog_bar=True,
            sync_dist=True,
            batch_size=len(targets),
        )

        cls_loss, cls_log = self.online_classifier.training_step(
            (teacher_features.chunk(2)[0].detach(), targets), batch_idx
        )
        self.log_dict(cls_log, sync_dist=True, batch_size=len(targets))
        return loss + cls_loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return validate_online(self, batch, batch_idx)

    def configure_optimizers(self) -> Any:
        networks = [self.student_backbone, self.student_projection_head]
        groups = parameter_groups(self, "dino", networks)
        groups[0]["weight_decay"] = 0.04
        lr = 0.1 * self.batch_size_per_device * self.trainer.world_size / 256
        return with_schedule(self, torch.optim.AdamW(groups, lr=lr))

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        self.clip_gradients(
            optimizer=optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm"
        )

    def on_before_optimizer_step(self, optimizer: Any, *args: Any) -> None:
        self.student_projection_head.cancel_last_layer_gradients(self.current_epoch)
        weight_decay = cosine_schedule(
            step=self.trainer.global_step,
            max_steps=self.trainer.estimated_stepping_batches,
            start_value=0.04,
            end_value=0.4,
        )
        update_param_groups(optimizer, updates=[{"name": "dino", "weight_decay": weight_decay}])
