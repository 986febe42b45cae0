"""MoCo v2 as in lightly's benchmark.

The update comes between student and teacher, the teacher's batch is shuffled, and its features feed
the classifier. ``backbone`` is the teacher here.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import MoCoProjectionHead
from lightly.models.utils import batch_shuffle, batch_unshuffle, update_momentum
from lightly.utils.benchmarking import OnlineLinearClassifier
from pytorch_lightning import LightningModule
from torch import Tensor

from tests.ecosystem.lightly_modules.backbone import FEATURES, with_identity
from tests.ecosystem.lightly_modules.benchmark import (
    parameter_groups,
    validate_online,
    with_schedule,
)


class MoCoV2(LightningModule):
    def __init__(self, batch_size_per_device: int, num_classes: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size_per_device = batch_size_per_device
        self.backbone = with_identity()
        self.projection_head = MoCoProjectionHead(FEATURES, 16, 6)
        self.query_backbone = copy.deepcopy(self.backbone)
        self.query_projection_head = MoCoProjectionHead(FEATURES, 16, 6)
        self.criterion = NTXentLoss(temperature=0.2, memory_bank_size=(16, 6))
        self.online_classifier = OnlineLinearClassifier(FEATURES, num_classes=num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(x)

    @torch.no_grad()
    def forward_key_encoder(self, x: Tensor) -> tuple[Tensor, Tensor]:
        distributed = self.trainer.num_devices > 1
        x, shuffle = batch_shuffle(batch=x, distributed=distributed)
        features = self.forward(x).flatten(start_dim=1)
        projections = self.projection_head(features)
        features = batch_unshuffle(features, shuffle, distributed=distributed)
        projections = batch_unshuffle(projections, shuffle, distributed=distributed)
        return features, projections

    def forward_query_encoder(self, x: Tensor) -> Tensor:
        return self.query_projection_head(self.query_backbone(x).flatten(start_dim=1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        views, targets = batch[0], batch[1]
        query = self.forward_query_encoder(views[1])
        update_momentum(self.query_backbone, self.backbone, m=0.9)
        update_momentum(self.query_projection_head, self.projection_head, m=0.9)
        key_features, key = self.forward_key_encoder(views[0])
        loss = self.criterion(query, key)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(targets))

        cls_loss, cls_log = self.online_classifier.training_step(
            (key_features.detach(), targets), batch_idx
        )
        self.log_dict(cls_log, sync_dist=True, batch_size=len(targets))
        return loss + cls_loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return validate_online(self, batch, batch_idx)

    def configure_optimizers(self) -> Any:
        networks = [self.query_backbone, self.query_projection_head]
        optimizer = torch.optim.SGD(
            parameter_groups(self, "mocov2", networks),
            lr=0.3 * self.batch_size_per_device * self.trainer.world_size / 256,
            momentum=0.9,
            weight_decay=1e-4,
        )
        return with_schedule(self, optimizer, num_warmup_epochs=0)
