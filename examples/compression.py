"""VGG-16 compressed block by block: each convolution is replaced by a depthwise separable one.

Each block learns from its own block of the trained VGG alone (as in Pipe-BD, Jang et al., DATE
2023), so that all blocks train at once, on as many devices as there are; afterwards
``compression_finetune.py`` trains the small network on labels. ``python examples/compression.py
--fast`` trains for some steps over two CPU processes, ``python examples/compression.py fit --config
examples/configs/compression.yaml`` on CIFAR-10.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from lightning.pytorch import LightningModule
from pictures import LabelledLoaders
from running import run
from torch import Tensor, nn
from torchvision import models

from lightning_tspipe import BlockwiseDistillation


class Compression(BlockwiseDistillation, LightningModule):
    """A separable VGG-16 that learns from an ordinary one.

    Args:
        weights: File of the teacher's state dict (torchvision's ``vgg16_bn``); None: it has learned
            nothing.
        num_classes: Of the teacher.
        lr: Of SGD.
    """

    def __init__(self, weights: str | None = None, num_classes: int = 10, lr: float = 0.05) -> None:
        super().__init__()
        vgg = models.vgg16_bn(num_classes=num_classes)
        if weights is not None:
            vgg.load_state_dict(torch.load(weights, weights_only=True))
        self.teacher = nn.Sequential(*convolutions(vgg.features))
        self.student = nn.Sequential(*(separable(block) for block in self.teacher))
        # What the teacher makes of its last block's output: it judges the student's as well.
        self.head = nn.Sequential(vgg.avgpool, nn.Flatten(), vgg.classifier)
        self.head.eval().requires_grad_(requires_grad=False)
        self.lr = lr

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """How often the assembled student is right, with the teacher's head."""
        pictures, labels = batch
        right = self.head.eval()(self.student(pictures)).argmax(dim=1) == labels
        self.log("val_accuracy", right.float().mean(), prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer for all blocks; each device updates its own."""
        return torch.optim.SGD(self.student.parameters(), self.lr, 0.9, weight_decay=5e-4)


def convolutions(features: nn.Module) -> list[nn.Sequential]:
    """VGG's layers, a block for each convolution: with its norm, its ReLU and its pooling."""
    blocks: list[list[nn.Module]] = []
    for layer in features.children():
        if isinstance(layer, nn.Conv2d):
            blocks.append([])
        blocks[-1].append(layer)
    return [nn.Sequential(*layers) for layers in blocks]


def separable(block: nn.Sequential) -> nn.Sequential:
    """The same shapes with a depthwise and a pointwise convolution."""
    conv, _, *rest = block
    assert isinstance(conv, nn.Conv2d)
    pooled = [deepcopy(layer) for layer in rest if isinstance(layer, nn.MaxPool2d)]
    before, after = conv.in_channels, conv.out_channels
    return nn.Sequential(
        nn.Conv2d(before, before, 3, padding=1, groups=before, bias=False),
        nn.BatchNorm2d(before),
        nn.ReLU(),
        nn.Conv2d(before, after, 1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
        *pooled,
    )


def module_and_data() -> tuple[Compression, LabelledLoaders]:
    """For ``tspipe plan``: bundled pictures."""
    return Compression(), LabelledLoaders("digits", size=32, batch_size=16)


if __name__ == "__main__":
    run(Compression, LabelledLoaders)
