"""What is trained: ordinary LightningModules, and batches that cost nothing to load."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from lightly.models.modules.heads import (
    BYOLPredictionHead,
    BYOLProjectionHead,
    MoCoProjectionHead,
)
from lightly.models.utils import update_momentum
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torchvision.models import VisionTransformer, resnet18
from typing_extensions import override

from lightning_tspipe import DelayedTeacherUpdate, MomentumEMA, TSPipeStrategy

IMAGE_SIZE = 64
NUM_CLASSES = 100
NUM_BATCHES = 4
"""Different batches that a loader yields, over and over."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One training problem.

    Attributes:
        name: As in the figures.
        module: Makes the module; the same weights under the same seed.
        num_views: Images of one batch that each network sees one after the other.
        labelled: Whether a batch is ``(images, labels)`` instead of a tuple of views.
        window: Batches whose gradients are accumulated for an update.
    """

    name: str
    module: Callable[[], LightningModule]
    num_views: int
    labelled: bool
    window: int = 1

    def batches(self, batch_size: int, seed: int) -> list[tuple[Tensor, ...]]:
        """Random batches of ``batch_size`` images, float32 ``(batch, 3, 64, 64)`` each."""
        generator = torch.Generator().manual_seed(seed)
        return [self._batch(batch_size, generator) for _ in range(NUM_BATCHES)]

    def _batch(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        shape = (batch_size, 3, IMAGE_SIZE, IMAGE_SIZE)
        views = tuple(torch.randn(shape, generator=generator) for _ in range(self.num_views))
        if not self.labelled:
            return views
        return (*views, torch.randint(NUM_CLASSES, (batch_size,), generator=generator))


def vision_transformer(
    patch_size: int, num_layers: int, width: int, num_classes: int | None = None
) -> VisionTransformer:
    """A ViT with 6 heads.

    Args:
        patch_size: Pixels on each side of a patch.
        num_layers: Encoder layers.
        width: Features of a token.
        num_classes: Without it the network returns the class token's features.
    """
    network = VisionTransformer(
        image_size=IMAGE_SIZE,
        patch_size=patch_size,
        num_layers=num_layers,
        num_heads=6,
        hidden_dim=width,
        mlp_dim=4 * width,
        num_classes=num_classes or 1,
    )
    if num_classes is None:
        network.heads = nn.Identity()
    return network


class BYOL(LightningModule):
    """BYOL (Grill et al., 2020) with ResNet-18, written as in lightly's examples."""

    def __init__(self) -> None:
        super().__init__()
        backbone = resnet18()
        backbone.fc = nn.Identity()
        encoder = OrderedDict(backbone=backbone, projector=BYOLProjectionHead(512, 1024, 256))
        self.teacher = nn.Sequential(copy.deepcopy(encoder)).requires_grad_(requires_grad=False)
        self.student = nn.Sequential(encoder)
        self.student.add_module("predictor", BYOLPredictionHead(256, 1024, 256))

    def average(self) -> None:
        """Average the teacher, in each step."""
        update_momentum(self.student.backbone, self.teacher.backbone, m=0.99)
        update_momentum(self.student.projector, self.teacher.projector, m=0.99)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.average()
        view0, view1 = batch
        prediction0, prediction1 = self.student(view0), self.student(view1)
        with torch.no_grad():
            target0, target1 = self.teacher(view0), self.teacher(view1)
        loss = (byol_loss(prediction0, target1) + byol_loss(prediction1, target0)) / 2
        self.log("loss", loss)
        return loss

    @override
    def configure_optimizers(self) -> Optimizer:
        return SGD(self.student.parameters(), lr=0.06, momentum=0.9, weight_decay=5e-4)


class BYOLInWindows(BYOL):
    """The same, averaged behind each update; in a pipeline the teacher is one update late."""

    @override
    def average(self) -> None:
        pass

    @override
    def configure_callbacks(self) -> list[Callback]:
        averages = MomentumEMA(
            student=["student.backbone", "student.projector"],
            teacher=["teacher.backbone", "teacher.projector"],
            momentum=0.99,
        )
        is_pipelined = isinstance(self.trainer.strategy, TSPipeStrategy)
        # Others would copy the teacher for it.
        return [averages, *([DelayedTeacherUpdate(windows=True)] if is_pipelined else [])]


class MoCo(LightningModule):
    """MoCo-v3 (Chen et al., 2021) with ViT-S/16; negatives come from the batch."""

    def __init__(self) -> None:
        super().__init__()
        projector = MoCoProjectionHead(384, 1024, 256, num_layers=3, batch_norm=True)
        encoder = OrderedDict(backbone=vision_transformer(16, 12, 384), projector=projector)
        self.teacher = nn.Sequential(copy.deepcopy(encoder)).requires_grad_(requires_grad=False)
        self.student = nn.Sequential(encoder)
        predictor = MoCoProjectionHead(256, 1024, 256, num_layers=2, batch_norm=True)
        self.student.add_module("predictor", predictor)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        update_momentum(self.student.backbone, self.teacher.backbone, m=0.99)
        update_momentum(self.student.projector, self.teacher.projector, m=0.99)
        view0, view1 = batch
        query0, query1 = self.student(view0), self.student(view1)
        with torch.no_grad():
            key0, key1 = self.teacher(view0), self.teacher(view1)
        rows = torch.arange(len(view0))
        loss = contrastive_loss(query0, key1, rows) + contrastive_loss(query1, key0, rows)
        self.log("loss", loss)
        return loss

    @override
    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.student.parameters(), lr=1e-4, weight_decay=0.1)


class Distillation(LightningModule):
    """Soft-target distillation (Hinton et al., 2015) of a frozen ViT into a ResNet-18."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = vision_transformer(8, 8, 192, NUM_CLASSES)
        self.teacher.requires_grad_(requires_grad=False).eval()
        self.student = resnet18(num_classes=NUM_CLASSES)

    @override
    def on_train_start(self) -> None:
        self.teacher.eval()  # the Trainer puts everything in train mode

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        with torch.no_grad():
            soft_targets = self.teacher(images)
        loss = distillation_loss(self.student(images), soft_targets, labels)
        self.log("loss", loss)
        return loss

    @override
    def configure_optimizers(self) -> Optimizer:
        return SGD(self.student.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)


def byol_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean squared distance of the normalised rows, both ``(batch, features)``."""
    return 2 - 2 * functional.cosine_similarity(prediction, target).mean()


def contrastive_loss(query: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
    """InfoNCE as in MoCo-v3's algorithm 1.

    Args:
        query: Predictions ``(rows, features)``.
        keys: Teacher outputs of the whole batch ``(batch, features)``.
        rows: For each query, the row of its positive key ``(rows,)``.
    """
    temperature = 0.2
    logits = functional.normalize(query) @ functional.normalize(keys).T / temperature
    return 2 * temperature * functional.cross_entropy(logits, rows)


def distillation_loss(logits: Tensor, soft_targets: Tensor, labels: Tensor) -> Tensor:
    """Equal parts of the labels' and of the soft targets' cross-entropy; logits all round."""
    temperature = 4.0
    soft = functional.kl_div(
        functional.log_softmax(logits / temperature, dim=1),
        functional.softmax(soft_targets / temperature, dim=1),
        reduction="batchmean",
    )
    return 0.5 * functional.cross_entropy(logits, labels) + 0.5 * temperature**2 * soft


WORKLOADS = {
    "byol": Workload("byol", BYOL, 2, labelled=False),
    "byol_windows": Workload("byol_windows", BYOLInWindows, 2, labelled=False, window=4),
    "moco": Workload("moco", MoCo, 2, labelled=False),
    "kd": Workload("kd", Distillation, 1, labelled=True),
}
