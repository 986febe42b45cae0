"""BYOL with ResNet-18 on images of 64 pixels: ``tspipe plan examples/byol.py --devices 4``.

``python examples/byol.py`` trains it on random images; put your own dataset in ``images``. With
``--plan`` it carries a saved plan out, with ``--timeline`` it records some steps.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from copy import deepcopy

import torch
from lightly.models.modules.heads import BYOLPredictionHead, BYOLProjectionHead
from lightly.models.utils import update_momentum
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

from lightning_tspipe import PipelineTimeline, TSPipeStrategy


class BYOL(LightningModule):
    """Bootstrap Your Own Latent (Grill et al., 2020), as in lightly's examples."""

    def __init__(self) -> None:
        super().__init__()
        backbone = resnet18()
        backbone.fc = nn.Identity()
        encoder = OrderedDict(backbone=backbone, projector=BYOLProjectionHead(512, 1024, 256))
        self.teacher = nn.Sequential(deepcopy(encoder)).requires_grad_(requires_grad=False)
        self.student = nn.Sequential(encoder)
        self.student.add_module("predictor", BYOLPredictionHead(256, 1024, 256))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002
        """One symmetrised loss of two views, each ``(batch, 3, 64, 64)``."""
        update_momentum(self.student.backbone, self.teacher.backbone, m=0.99)
        update_momentum(self.student.projector, self.teacher.projector, m=0.99)
        view0, view1 = batch
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
        return torch.optim.SGD(self.student.parameters(), lr=0.06, momentum=0.9, weight_decay=5e-4)


def images(number: int = 512) -> TensorDataset:
    """Two random views of each image."""
    return TensorDataset(torch.randn(number, 3, 64, 64), torch.randn(number, 3, 64, 64))


def module_and_data() -> tuple[BYOL, DataLoader[tuple[Tensor, ...]]]:
    """What ``tspipe plan`` measures."""
    return BYOL(), DataLoader(images(), batch_size=64, drop_last=True)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="tspipe")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=8)
    parser.add_argument("--plan", help="what `tspipe plan --save` wrote; decides the strategy")
    parser.add_argument("--timeline", help="folder for the timeline of steps 2 to 6")
    options = parser.parse_args()
    module, data = module_and_data()
    trainer = Trainer(
        strategy=TSPipeStrategy(plan=options.plan) if options.plan else options.strategy,
        devices=options.devices,
        max_steps=options.max_steps,
        logger=False,
        enable_checkpointing=False,
        callbacks=[PipelineTimeline(2, 5, options.timeline)] if options.timeline else [],
    )
    trainer.fit(module, data)


if __name__ == "__main__":
    main()
