"""BYOL as in lightly's examples: an update in the step, two views, a symmetric loss."""

from __future__ import annotations

import copy
from typing import Any

import pytorch_lightning as pl
import torch
from lightly.loss import NegativeCosineSimilarity
from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils.scheduler import cosine_schedule
from torch import Tensor

from tests.ecosystem.lightly_modules.backbone import FEATURES, without_classifier


class BYOL(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = without_classifier()
        self.projection_head = BYOLProjectionHead(FEATURES, 16, 6)
        self.prediction_head = BYOLPredictionHead(6, 16, 6)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, x: Tensor) -> Tensor:
        features = self.backbone(x).flatten(start_dim=1)
        return self.prediction_head(self.projection_head(features))

    def forward_momentum(self, x: Tensor) -> Tensor:
        features = self.backbone_momentum(x).flatten(start_dim=1)
        return self.projection_head_momentum(features).detach()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        momentum = cosine_schedule(self.current_epoch, 10, 0.9, 1)
        update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
        (x0, x1) = batch[0]
        p0 = self.forward(x0)
        z0 = self.forward_momentum(x0)
        p1 = self.forward(x1)
        z1 = self.forward_momentum(x1)
        loss = 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.06)
