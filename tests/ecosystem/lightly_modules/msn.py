"""MSN as in lightly's examples: the student's backbone gets images and which patches to keep."""

from __future__ import annotations

import copy
from typing import Any

import pytorch_lightning as pl
import torch
from lightly.loss import MSNLoss
from lightly.models import utils
from lightly.models.modules import MaskedVisionTransformerTorchvision
from lightly.models.modules.heads import MSNProjectionHead
from torch import Tensor, nn

from tests.ecosystem.lightly_modules.backbone import FEATURES, small_vit


class MSN(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.mask_ratio = 0.15
        self.backbone = MaskedVisionTransformerTorchvision(vit=small_vit())
        self.projection_head = MSNProjectionHead(FEATURES, 16, 6)
        self.anchor_backbone = copy.deepcopy(self.backbone)
        self.anchor_projection_head = copy.deepcopy(self.projection_head)
        utils.deactivate_requires_grad(self.backbone)
        utils.deactivate_requires_grad(self.projection_head)
        self.prototypes = nn.Linear(6, 10, bias=False).weight
        self.criterion = MSNLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        utils.update_momentum(self.anchor_backbone, self.backbone, 0.9)
        utils.update_momentum(self.anchor_projection_head, self.projection_head, 0.9)
        views = [view.to(self.device, non_blocking=True) for view in batch[0]]
        targets_out = self.projection_head(self.backbone(images=views[0]))
        anchors_out = self.encode_masked(views[1])
        focal_out = self.encode_masked(torch.concat(views[2:], dim=0))
        anchors_out = torch.cat([anchors_out, focal_out], dim=0)
        return self.criterion(anchors_out, targets_out, self.prototypes.data)

    def encode_masked(self, anchors: Tensor) -> Tensor:
        batch_size, _, _, width = anchors.shape
        length = (width // self.anchor_backbone.vit.patch_size) ** 2
        idx_keep, _ = utils.random_token_mask(
            size=(batch_size, length), mask_ratio=self.mask_ratio, device=self.device
        )
        return self.anchor_projection_head(self.anchor_backbone(images=anchors, idx_keep=idx_keep))

    def configure_optimizers(self) -> Any:
        networks = (self.anchor_backbone, self.anchor_projection_head)
        params = [*(p for network in networks for p in network.parameters()), self.prototypes]
        return torch.optim.AdamW(params, lr=1.5e-4)
