"""MoCo v3 (Chen et al., 2021): contrastive learning of a vision transformer.

``python examples/mocov3.py --fast`` trains it for some steps over two CPU processes,
``python examples/mocov3.py fit --config examples/configs/mocov3.yaml`` on CIFAR-10.
"""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy

import torch
from lightly.models.modules.heads import MoCoProjectionHead
from lightly.models.utils import update_momentum
from lightly.transforms.moco_transform import MoCoV2Transform
from lightly.utils.scheduler import cosine_schedule
from lightning.pytorch import LightningModule
from pictures import Loaders, Transform
from running import run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torchvision.models import VisionTransformer


class MoCoV3(LightningModule):
    """MoCo v3; its negatives are the other pictures of the batch, all of them.

    Args:
        size: Height and width of the pictures.
        patch_size: Height and width of a patch.
        num_layers: Transformer blocks.
        width: Of the transformer; 64 for each head of its attention.
        num_hidden: Width of the heads behind it.
        momentum: Of the teacher at the start; it grows to 1 on a cosine.
        temperature: Of the contrastive loss.
        lr: Of AdamW.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the settings of the method
        self,
        size: int = 64,
        patch_size: int = 8,
        num_layers: int = 12,
        width: int = 384,
        num_hidden: int = 1024,
        momentum: float = 0.99,
        temperature: float = 0.2,
        lr: float = 3e-4,
    ) -> None:
        super().__init__()
        self.momentum, self.temperature, self.lr = momentum, temperature, lr
        vit = VisionTransformer(size, patch_size, num_layers, width // 64, width, 4 * width)
        vit.heads = nn.Identity()
        vit.conv_proj.requires_grad_(requires_grad=False)  # random patches: section 5 of the paper
        projector = MoCoProjectionHead(width, num_hidden, 256, num_layers=3, batch_norm=True)
        encoder = OrderedDict(backbone=vit, projector=projector)
        self.teacher = nn.Sequential(deepcopy(encoder)).requires_grad_(requires_grad=False)
        self.student = nn.Sequential(encoder)
        predictor = MoCoProjectionHead(256, num_hidden, 256, num_layers=2, batch_norm=True)
        self.student.add_module("predictor", predictor)

    def training_step(self, batch: tuple[list[Tensor], Tensor]) -> Tensor:
        """One symmetrised loss of two views, each ``(batch, 3, size, size)``."""
        num_steps = int(self.trainer.estimated_stepping_batches)
        momentum = cosine_schedule(self.global_step, num_steps, self.momentum, 1.0)
        update_momentum(self.student.backbone, self.teacher.backbone, m=momentum)
        update_momentum(self.student.projector, self.teacher.projector, m=momentum)
        (view0, view1), _ = batch
        query0, query1 = self.student(view0), self.student(view1)
        with torch.no_grad():
            key0, key1 = self.teacher(view0), self.teacher(view1)
        loss = self.contrast(query0, key1) + self.contrast(query1, key0)
        self.log("loss", loss, prog_bar=True)
        return loss

    def contrast(self, query: Tensor, key: Tensor) -> Tensor:
        """InfoNCE (algorithm 1 of the paper); both ``(batch, features)``."""
        logits = normalize(query) @ normalize(key).T / self.temperature
        labels = torch.arange(len(query), device=query.device)
        return 2 * self.temperature * cross_entropy(logits, labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW for what is trained."""
        trained = [p for p in self.student.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.lr, weight_decay=0.1)


class Views(Loaders):
    """Two views of each picture."""

    def transform(self) -> Transform:
        """MoCo's, as gentle as small pictures need it."""
        return MoCoV2Transform(self.size, cj_strength=0.5, gaussian_blur=0.0)


def module_and_data() -> tuple[MoCoV3, Views]:
    """For ``tspipe plan`` and ``tspipe check``: ViT-S/8, bundled pictures of 64 pixels."""
    return MoCoV3(), Views("digits", size=64, batch_size=16)


if __name__ == "__main__":
    run(MoCoV3, Views)
