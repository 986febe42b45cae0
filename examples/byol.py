"""BYOL (Grill et al., 2020): a student that predicts what a slowly following teacher sees.

``python examples/byol.py --fast`` trains it for some steps over two CPU processes,
``python examples/byol.py fit --config examples/configs/byol.yaml`` on CIFAR-10.
"""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy

import torch
from lightly.models.modules.heads import BYOLPredictionHead, BYOLProjectionHead
from lightly.models.utils import update_momentum
from lightly.transforms.byol_transform import (
    BYOLTransform,
    BYOLView1Transform,
    BYOLView2Transform,
)
from lightning.pytorch import LightningModule
from pictures import Loaders, Transform
from running import run
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torchvision import models


class BYOL(LightningModule):
    """BYOL with a ResNet of torchvision.

    Args:
        backbone: Name of the ResNet.
        num_hidden: Width of the heads.
        momentum: Of the teacher.
        lr: Of SGD.
    """

    def __init__(
        self,
        backbone: str = "resnet18",
        num_hidden: int = 1024,
        momentum: float = 0.99,
        lr: float = 0.06,
    ) -> None:
        super().__init__()
        self.momentum, self.lr = momentum, lr
        resnet = models.get_model(backbone, weights=None)
        num_features = resnet.fc.in_features
        resnet.fc = nn.Identity()
        projector = BYOLProjectionHead(num_features, num_hidden, 256)
        encoder = OrderedDict(backbone=resnet, projector=projector)
        self.teacher = nn.Sequential(deepcopy(encoder)).requires_grad_(requires_grad=False)
        self.student = nn.Sequential(encoder)
        self.student.add_module("predictor", BYOLPredictionHead(256, num_hidden, 256))

    def training_step(self, batch: tuple[list[Tensor], Tensor]) -> Tensor:
        """One symmetrised loss of two views, each ``(batch, 3, size, size)``."""
        update_momentum(self.student.backbone, self.teacher.backbone, m=self.momentum)
        update_momentum(self.student.projector, self.teacher.projector, m=self.momentum)
        (view0, view1), _ = batch
        prediction0, prediction1 = self.student(view0), self.student(view1)
        with torch.no_grad():
            target0, target1 = self.teacher(view0), self.teacher(view1)
        similarity = cosine_similarity(prediction0, target1) + cosine_similarity(
            prediction1, target0
        )
        loss = 2 - similarity.mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(
            self.student.parameters(), lr=self.lr, momentum=0.9, weight_decay=5e-4
        )


class Views(Loaders):
    """Two views of each picture."""

    def transform(self) -> Transform:
        """BYOL's two, as gentle as small pictures need it."""
        return BYOLTransform(
            BYOLView1Transform(self.size, cj_strength=0.5, gaussian_blur=0.0),
            BYOLView2Transform(self.size, cj_strength=0.5, gaussian_blur=0.0),
        )


def module_and_data() -> tuple[BYOL, Views]:
    """For ``tspipe plan`` and ``tspipe check``: ResNet-18, bundled pictures of 64 pixels."""
    return BYOL(), Views("digits", size=64, batch_size=64)


if __name__ == "__main__":
    run(BYOL, Views)
