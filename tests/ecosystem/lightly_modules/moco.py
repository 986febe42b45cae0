"""MoCo as in lightly's examples: the loss keeps a memory bank of keys."""

from __future__ import annotations

import copy
from typing import Any

import pytorch_lightning as pl
import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import MoCoProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from torch import Tensor

from tests.ecosystem.lightly_modules.backbone import FEATURES, without_classifier


class MoCo(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = without_classifier()
        self.projection_head = MoCoProjectionHead(FEATURES, 16, 6)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NTXentLoss(memory_bank_size=(10, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def forward_momentum(self, x: Tensor) -> Tensor:
        key = self.backbone_momentum(x).flatten(start_dim=1)
        return self.projection_head_momentum(key).detach()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        update_momentum(self.backbone, self.backbone_momentum, m=0.9)
        update_momentum(self.projection_head, self.projection_head_momentum, m=0.9)
        x_query, x_key = batch[0]
        query = self.forward(x_query)
        key = self.forward_momentum(x_key)
        return self.criterion(query, key)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.06)
