"""CAPI as in lightly's examples: a loss of its own trains the head behind the averaged backbone.

lightly's predictor needs timm; a linear layer stands for it. The tokens of lightly's masked ViT are
those of a module that is called whole (``encode`` is a way past ``forward``, see ``ibot``).
"""

from __future__ import annotations

import copy
from typing import Any

import pytorch_lightning as pl
import torch
from lightly.loss import CAPILoss
from lightly.models.modules import CAPIProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils.scheduler import cosine_schedule
from torch import Tensor, nn

from tests.ecosystem.lightly_modules.backbone import FEATURES


def _tokens() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, FEATURES, 4, stride=4), nn.Flatten(2), _Swap(), nn.Linear(FEATURES, FEATURES)
    )


class _Swap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class CAPI(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.student_backbone = _tokens()
        self.predictor = nn.Linear(FEATURES, FEATURES)
        self.student_head = CAPIProjectionHead(input_dim=FEATURES, num_clusters=5, weight_norm=True)
        self.teacher_backbone = copy.deepcopy(self.student_backbone)
        self.teacher_head = CAPIProjectionHead(input_dim=FEATURES, num_clusters=5, bias=True)
        deactivate_requires_grad(self.teacher_backbone)
        self.criterion = CAPILoss()

    def forward_teacher(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.teacher_backbone(images)
        return self.teacher_head(features)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        momentum = cosine_schedule(self.current_epoch, 10, 0.9, 1)
        update_momentum(self.student_backbone, self.teacher_backbone, m=momentum)
        images = batch[0][0]
        student_logits = self.student_head(self.predictor(self.student_backbone(images)))
        teacher_logits = self.forward_teacher(images)
        index = torch.arange(teacher_logits.shape[1]).expand(len(images), -1)
        student_loss = self.criterion(
            teacher_logits=teacher_logits, student_logits=student_logits, teacher_index=index
        )
        clustering_loss = self.criterion(
            teacher_logits=teacher_logits, student_logits=teacher_logits
        )
        return student_loss + clustering_loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1.5e-4)
