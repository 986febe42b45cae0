"""What is trained for accuracy: a ResNet with SGD, a VGG with AdamW, an LSTM with Adam."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torchvision.models import resnet18, vgg11_bn
from typing_extensions import override

from benchmarks.accuracy.data import VOCABULARY

NUM_CLASSES, NUM_STAGES = 10, 4


def resnet() -> nn.Module:
    """ResNet-18 with the stem of small images; its stride of 2 lets two cores train it."""
    network: nn.Module = resnet18(num_classes=NUM_CLASSES)
    network.conv1 = nn.Conv2d(3, 64, 3, stride=2, padding=1, bias=False)
    return network


def vgg() -> nn.Module:
    """VGG-11's convolutions with BatchNorm, and one linear layer."""
    return nn.Sequential(
        vgg11_bn().features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, NUM_CLASSES)
    )


class Recurrent(nn.Module):
    """One layer of an LSTM: ``(batch, length, width)`` to the same with another width."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(width, out, batch_first=True)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.cells(tokens)
        return outputs  # type: ignore[no-any-return]


class Mean(nn.Module):
    """The mean over the places: ``(batch, length, width)`` to ``(batch, width)``."""

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.mean(dim=1)


def lstm() -> nn.Module:
    """Three layers of an LSTM over word numbers ``(batch, length)``; two classes."""
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 64), Recurrent(64, 128), Recurrent(128, 128), Recurrent(128, 128),
        Mean(), nn.Linear(128, 2),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Task:
    """One training.

    Attributes:
        network: Makes the network.
        optimizer: Makes the optimizer; without the policy SpecTrain where it isn't momentum.
        data: ``images`` or ``sentences``.
        num_samples: Of the stated subset.
        epochs: Of the whole training.
        batch_size: Samples per update.
    """

    network: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    data: str
    num_samples: int
    epochs: int
    batch_size: int = 64


TASKS = {
    "resnet": Task(
        resnet, lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=5e-4), "images", 10_000, 10
    ),
    "vgg": Task(vgg, lambda p: AdamW(p, lr=1e-3, weight_decay=0.05), "images", 10_000, 10),
    "lstm": Task(lstm, lambda p: Adam(p, lr=1e-3), "sentences", 20_000, 6),
}


class Classifier(LightningModule):
    """Cross-entropy, and a learning rate that falls along a cosine.

    Args:
        task: What is trained.
        num_updates: Of the whole training.
    """

    def __init__(self, task: Task, num_updates: int) -> None:
        super().__init__()
        self._task, self._num_updates = task, num_updates
        self.student = task.network()

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        return functional.cross_entropy(self.student(inputs), labels)

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inputs, labels = batch
        right = (self.student(inputs).argmax(dim=1) == labels).float().mean()
        self.log("val_accuracy", right, batch_size=len(inputs))

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = self._task.optimizer(self.student.parameters())
        schedule = CosineAnnealingLR(optimizer, self._num_updates)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def flipped(images: Tensor, generator: torch.Generator) -> Tensor:
    """Half of ``(batch, 3, side, side)`` images mirrored, and all moved by up to 2 pixels."""
    mirrored = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    images = torch.where(mirrored, images.flip(3), images)
    down, right = torch.randint(-2, 3, (2,), generator=generator).tolist()
    return images.roll((down, right), (2, 3))
