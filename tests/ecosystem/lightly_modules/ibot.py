"""iBOT as in lightly's examples: one backbone feeds class tokens and masked patches to a head."""

from __future__ import annotations

import copy
from typing import Any

import pytorch_lightning as pl
import torch
from lightly.loss import DINOLoss, IBOTPatchLoss
from lightly.models.modules import DINOProjectionHead, MaskedVisionTransformerTorchvision
from lightly.models.utils import random_block_mask, update_momentum
from torch import Tensor, nn

from tests.ecosystem.lightly_modules.backbone import FEATURES, small_vit


def freeze_eval_module(module: nn.Module) -> None:
    for param in module.parameters():
        param.requires_grad = False
    module.eval()


class IBOT(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.teacher_backbone = MaskedVisionTransformerTorchvision(vit=small_vit())
        self.student_backbone = copy.deepcopy(self.teacher_backbone)
        freeze_eval_module(self.teacher_backbone)
        self.student_head = DINOProjectionHead(FEATURES, 16, 6, 12, norm_last_layer=False)
        self.student_cls_head = self.student_patch_head = self.student_head
        self.teacher_head = DINOProjectionHead(FEATURES, 16, 6, 12)
        self.teacher_cls_head = self.teacher_patch_head = self.teacher_head
        freeze_eval_module(self.teacher_head)
        self.cls_criterion = DINOLoss(output_dim=12, teacher_temp=0.07)
        self.patch_criterion = IBOTPatchLoss(output_dim=12, teacher_temp=0.07)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        views = batch[0]
        images = torch.cat(views[:2])
        mask = images.new_zeros((len(images), 10), dtype=torch.bool)
        block_mask = random_block_mask(
            size=(len(images), 3, 3), device=mask.device, min_num_masks_per_block=1
        )
        mask[:, 1:] = block_mask.flatten(start_dim=1)
        with torch.no_grad():
            teacher_features = self.teacher_backbone.encode(images)
            teacher_cls = self.teacher_cls_head.forward(teacher_features[:, 0])
            teacher_patches = self.teacher_patch_head.forward(teacher_features[mask])
        features = self.student_backbone.encode(images, mask=mask)
        student_cls = self.student_cls_head.forward(features[:, 0])
        student_patches = self.student_patch_head.forward(features[mask])
        return self.cls_criterion(
            teacher_out=teacher_cls.chunk(2), student_out=student_cls.chunk(2)
        ) + self.patch_criterion(
            teacher_out=teacher_patches, student_out=student_patches, mask=block_mask
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.001)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        update_momentum(self.student_backbone, self.teacher_backbone, m=0.9)
        update_momentum(self.student_head, self.teacher_head, m=0.9)
