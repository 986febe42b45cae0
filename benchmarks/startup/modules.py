"""What is trained: BYOL with three backbones, and one batch of random pictures."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torchvision.models import resnet18, resnet50, vit_b_16
from typing_extensions import override

SAMPLES = 8
"""In a batch: of one pipeline, or of all processes that share it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A network, and what it is given.

    Attributes:
        backbone: Makes the network, without weights from elsewhere.
        head: The name of its last layer.
        features: What goes into that.
        pixels: On each side of a picture.
    """

    backbone: Callable[[], nn.Module]
    head: str
    features: int
    pixels: int

    def batch(self, samples: int) -> tuple[Tensor, Tensor]:
        """Two views, float32 ``(samples, 3, pixels, pixels)`` each."""
        generator = torch.Generator().manual_seed(0)
        shape = (samples, 3, self.pixels, self.pixels)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


ENTRIES = {
    "resnet18": Entry(resnet18, "fc", 512, 64),
    "resnet50": Entry(resnet50, "fc", 2048, 64),
    "vit_b_16": Entry(vit_b_16, "heads", 768, 224),
}


def _head(features: int, inside: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(features, inside), nn.BatchNorm1d(inside), nn.ReLU(), nn.Linear(inside, outputs)
    )


class BYOL(LightningModule):
    """BYOL (Grill et al., 2020).

    Args:
        entry: Its backbone.
    """

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        backbone = entry.backbone()
        setattr(backbone, entry.head, nn.Identity())
        encoder = OrderedDict(backbone=backbone, projector=_head(entry.features, 1024, 256))
        self.teacher = nn.Sequential(copy.deepcopy(encoder)).requires_grad_(requires_grad=False)
        self.student = nn.Sequential(encoder)
        self.student.add_module("predictor", _head(256, 1024, 256))

    @torch.no_grad()
    def average(self) -> None:
        """Average the teacher."""
        for name in ("backbone", "projector"):
            own = self.student.get_submodule(name).parameters()
            others = self.teacher.get_submodule(name).parameters()
            for kept, new in zip(others, own, strict=True):
                kept.lerp_(new, 0.01)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.average()
        predictions = [self.student(view) for view in batch]
        with torch.no_grad():
            targets = [self.teacher(view) for view in batch]
        pairs = zip(predictions, targets[::-1], strict=True)
        likenesses = [functional.cosine_similarity(p, t).mean() for p, t in pairs]
        return 1 - torch.stack(likenesses).mean()

    @override
    def configure_optimizers(self) -> Optimizer:
        return SGD(self.student.parameters(), lr=0.06, momentum=0.9)
