"""DINO as in lightly's examples: crops of two sizes, a centre, a last layer that waits."""

from __future__ import annotations

import copy
from typing import Any

import pytorch_lightning as pl
import torch
from lightly.loss import DINOLoss
from lightly.models.modules import DINOProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils.scheduler import cosine_schedule
from torch import Tensor

from tests.ecosystem.lightly_modules.backbone import FEATURES, without_classifier


class DINO(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        backbone = without_classifier()
        self.student_backbone = backbone
        self.student_head = DINOProjectionHead(FEATURES, 16, 6, 12, freeze_last_layer=1)
        self.teacher_backbone = copy.deepcopy(backbone)
        self.teacher_head = DINOProjectionHead(FEATURES, 16, 6, 12)
        deactivate_requires_grad(self.teacher_backbone)
        deactivate_requires_grad(self.teacher_head)
        self.criterion = DINOLoss(output_dim=12, warmup_teacher_temp_epochs=5)

    def forward(self, x: Tensor) -> Tensor:
        return self.student_head(self.student_backbone(x).flatten(start_dim=1))

    def forward_teacher(self, x: Tensor) -> Tensor:
        return self.teacher_head(self.teacher_backbone(x).flatten(start_dim=1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        momentum = cosine_schedule(self.current_epoch, 10, 0.9, 1)
        update_momentum(self.student_backbone, self.teacher_backbone, m=momentum)
        update_momentum(self.student_head, self.teacher_head, m=momentum)
        views, _, _ = batch
        views = [view.to(self.device) for view in views]
        global_views = views[:2]
        teacher_out = [self.forward_teacher(view) for view in global_views]
        student_out = [self.forward(view) for view in views]
        return self.criterion(teacher_out, student_out, epoch=self.current_epoch)

    def on_after_backward(self) -> None:
        self.student_head.cancel_last_layer_gradients(current_epoch=self.current_epoch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.001)
