"""What is trained: BYOL and MoCo-v3 on images, soft-target distillation on sentences."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from lightly.models.modules.heads import (
    BYOLPredictionHead,
    BYOLProjectionHead,
    MoCoProjectionHead,
)
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchvision.models import VisionTransformer, resnet18
from typing_extensions import override

from benchmarks.accuracy.data import IMAGE_SIZE, SENTENCE_LENGTH, VOCABULARY

Batch = tuple[Tensor, Tensor]


class SelfSupervised(LightningModule):
    """A student with a predictor learns what an averaged teacher sees in another view.

    Args:
        encoder: Backbone and projector; the teacher starts as a copy.
        predictor: What only the student has.
        num_steps: Of the whole training, for the learning rate's cosine.
    """

    def __init__(
        self, encoder: OrderedDict[str, nn.Module], predictor: nn.Module, num_steps: int
    ) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.teacher = nn.Sequential(deepcopy(encoder)).requires_grad_(requires_grad=False)
        self.student = nn.Sequential(encoder)
        self.student.add_module("predictor", predictor)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        view0, view1 = batch
        query0, query1 = self.student(view0), self.student(view1)
        with torch.no_grad():
            key0, key1 = self.teacher(view0), self.teacher(view1)
        loss = self.distance(query0, key1) + self.distance(query1, key0)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(view0))
        return loss

    def distance(self, query: Tensor, key: Tensor) -> Tensor:
        """Loss of predictions against the teacher's outputs, both ``(batch, features)``."""
        raise NotImplementedError

    def with_cosine(self, optimizer: Optimizer) -> OptimizerLRSchedulerConfig:
        """The optimizer, with one epoch in ten of warm-up and a cosine."""

        def factor(step: int) -> float:
            warm = min(1.0, (step + 1) / max(1, self.num_steps // 10))
            return warm * (1 + math.cos(math.pi * step / self.num_steps)) / 2

        schedule = LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class BYOL(SelfSupervised):
    """BYOL (Grill et al., 2020) with torchvision's ResNet-18."""

    def __init__(self, num_steps: int) -> None:
        backbone = resnet18()
        # The usual stem of small images, with a stride of 2 so that two cores can train it.
        backbone.conv1 = nn.Conv2d(3, 64, 3, stride=2, padding=1, bias=False)
        backbone.fc = nn.Identity()
        encoder = OrderedDict(backbone=backbone, projector=BYOLProjectionHead(512, 1024, 256))
        super().__init__(encoder, BYOLPredictionHead(256, 1024, 256), num_steps)

    @override
    def distance(self, query: Tensor, key: Tensor) -> Tensor:
        return 1 - functional.cosine_similarity(query, key).mean()

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        return self.with_cosine(
            SGD(self.student.parameters(), lr=0.06, momentum=0.9, weight_decay=5e-4)
        )


class MoCoV3(SelfSupervised):
    """MoCo-v3 (Chen et al., 2021) with a small ViT; negatives come from the batch."""

    def __init__(self, num_steps: int) -> None:
        width = 192
        backbone = VisionTransformer(
            image_size=IMAGE_SIZE, patch_size=8, num_layers=6, num_heads=3,
            hidden_dim=width, mlp_dim=4 * width, num_classes=1,
        )  # fmt: skip
        backbone.heads = nn.Identity()
        projector = MoCoProjectionHead(width, 1024, 256, num_layers=3, batch_norm=True)
        predictor = MoCoProjectionHead(256, 1024, 256, num_layers=2, batch_norm=True)
        super().__init__(OrderedDict(backbone=backbone, projector=projector), predictor, num_steps)

    @override
    def distance(self, query: Tensor, key: Tensor) -> Tensor:
        temperature = 0.2
        logits = functional.normalize(query) @ functional.normalize(key).T / temperature
        rows = torch.arange(len(query), device=query.device)
        return 2 * temperature * functional.cross_entropy(logits, rows)

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        return self.with_cosine(AdamW(self.student.parameters(), lr=5e-4, weight_decay=0.1))


class Positions(nn.Module):
    """Adds a learned vector to each place of ``(batch, length, width)``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(0.02 * torch.randn(SENTENCE_LENGTH, width))

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.table


class Mean(nn.Module):
    """The mean over the places: ``(batch, length, width)`` to ``(batch, width)``."""

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.mean(dim=1)


def sentence_classifier(width: int, num_layers: int) -> nn.Sequential:
    """A Transformer encoder over word numbers ``(batch, length)``; two classes."""
    layers = [
        nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        for _ in range(num_layers)
    ]
    return nn.Sequential(
        nn.Embedding(VOCABULARY, width), Positions(width), *layers, Mean(), nn.Linear(width, 2)
    )


class Classification(LightningModule):
    """Trains the teacher of the distillation on labels."""

    def __init__(self) -> None:
        super().__init__()
        self.network = sentence_classifier(128, 4)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        tokens, labels = batch
        return functional.cross_entropy(self.network(tokens), labels)

    @override
    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), lr=5e-4, weight_decay=0.01)


class Distillation(LightningModule):
    """Soft targets (Hinton et al., 2015) of a frozen Transformer for a smaller one.

    Args:
        teacher: Trained already.
    """

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.teacher = teacher.requires_grad_(requires_grad=False).eval()
        self.student = sentence_classifier(64, 2)

    @override
    def on_train_epoch_start(self) -> None:
        self.teacher.eval()  # the Trainer puts everything in train mode

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        tokens, labels = batch
        with torch.no_grad():
            soft = functional.softmax(self.teacher(tokens) / 2, dim=1)
        logits = self.student(tokens)
        kl = functional.kl_div(functional.log_softmax(logits / 2, 1), soft, reduction="batchmean")
        loss = 0.5 * functional.cross_entropy(logits, labels) + 0.5 * 4 * kl
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(tokens))
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        tokens, labels = batch
        right = (self.student(tokens).argmax(dim=1) == labels).float().mean()
        self.log("val_accuracy", right, batch_size=len(tokens))

    @override
    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.student.parameters(), lr=5e-4, weight_decay=0.01)


@dataclass(frozen=True, slots=True)
class Task:
    """One training.

    Attributes:
        metric: What is compared at the end.
        num_samples: Of the stated subset.
        epochs: Of the whole training.
        batch_size: Samples per update.
    """

    metric: str
    num_samples: int
    epochs: int
    batch_size: int

    @property
    def num_steps(self) -> int:
        """Updates of the whole training."""
        return self.epochs * (self.num_samples // self.batch_size)


TASKS = {
    "byol": Task("val_knn_top1", 2000, 15, 100),
    "mocov3": Task("val_knn_top1", 2000, 15, 100),
    "kd": Task("val_accuracy", 2000, 6, 50),
}
ARMS = ("vanilla", "tspipe", "late_gradients")
NETWORKS: dict[str, Callable[[int], SelfSupervised]] = {"byol": BYOL, "mocov3": MoCoV3}
