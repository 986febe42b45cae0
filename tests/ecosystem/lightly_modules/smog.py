"""SMoG as in lightly's examples: now and then the step makes a new teacher of the student.

And new groups, of k-means over the memory bank: behind the calls here, since only the rank with the
loss has the bank. ``ClustersFirst`` does it where lightly's example does.
"""

from __future__ import annotations

import copy
from typing import Any

import pytorch_lightning as pl
import torch
from lightly.loss.memory_bank import MemoryBankModule
from lightly.models.modules import heads
from lightly.models.utils import deactivate_requires_grad, update_momentum
from sklearn.cluster import KMeans
from torch import Tensor, nn

from tests.ecosystem.lightly_modules.backbone import FEATURES, without_classifier


class SMoG(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = without_classifier()
        self.projection_head = heads.SMoGProjectionHead(FEATURES, 16, 6)
        self.prediction_head = heads.SMoGPredictionHead(6, 16, 6)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.memory_bank = MemoryBankModule(size=(8, 6))
        groups = nn.functional.normalize(torch.rand(5, 6), dim=1).to(self.device)
        self.smog = heads.SMoGPrototypes(group_features=groups, beta=0.99)
        self.criterion = nn.CrossEntropyLoss()

    def _reset_group_features(self) -> None:
        found = KMeans(5).fit(self.memory_bank.bank.cpu().numpy()).cluster_centers_
        self.smog.set_group_features(nn.functional.normalize(torch.from_numpy(found), dim=1))

    def _reset_momentum_weights(self) -> None:
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)

    @property
    def is_reset(self) -> bool:
        """Every 300 steps in lightly's example."""
        return self.global_step > 0 and self.global_step % 2 == 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.is_reset:
            self._reset_momentum_weights()
        else:
            update_momentum(self.backbone, self.backbone_momentum, 0.99)
            update_momentum(self.projection_head, self.projection_head_momentum, 0.99)
        (x0, x1), _, _ = batch
        if batch_idx % 2:
            x0, x1 = x1, x0
        encoded_0 = self.projection_head(self.backbone(x0).flatten(start_dim=1))
        predicted_0 = self.prediction_head(encoded_0)
        encoded_1 = self.projection_head_momentum(self.backbone_momentum(x1).flatten(start_dim=1))
        if self.is_reset:
            self._reset_group_features()
        assignments = self.smog.assign_groups(encoded_1)
        groups = self.smog.get_updated_group_features(encoded_0)
        logits = self.smog(predicted_0, groups, temperature=0.1)
        self.smog.set_group_features(groups)
        self.memory_bank(encoded_0, update=True)
        return self.criterion(logits, assignments)

    def configure_optimizers(self) -> Any:
        networks = (self.backbone, self.projection_head, self.prediction_head)
        params = [p for network in networks for p in network.parameters()]
        return torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=1e-6)


class ClustersFirst(SMoG):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.is_reset:
            self._reset_group_features()
        return super().training_step(batch, batch_idx)
