"""The models of the papers, on the meta device: only their shapes and costs are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from lightly.models.modules.heads import (
    BYOLPredictionHead,
    BYOLProjectionHead,
    MoCoProjectionHead,
)
from torch import nn
from torchvision import models

from benchmarks.emulated.rows import ROWS
from lightning_tspipe.networks.atoms import atomize
from lightning_tspipe.networks.flops import estimate_atoms
from lightning_tspipe.planning.profile import NetworkProfile
from lightning_tspipe.planning.step_profile import StepProfile

IMAGE_SIZE = 224
FLOPS_PER_SECOND = 60e12
"""What a V100 (the paper's) or a T4 would do is beside the point: a row's time is scaled, see
``main``; only the proportions of the atoms matter."""
_VIT = {
    "s": (12, 6, 384, 1536),
    "b": (12, 12, 768, 3072),
    "l": (24, 16, 1024, 4096),
    "h": (32, 16, 1280, 5120),
}
"""Layers, heads, width and width of the MLP; MoCo-v3 and the TSPipe paper use patches of 16."""


@dataclass(frozen=True, slots=True)
class Paper:
    """What is trained in one row.

    Attributes:
        student: Makes the student.
        teacher: Makes the teacher.
        num_views: Calls of each network per step.
        is_paired: Whether the teacher is the average of the student.
    """

    student: Callable[[], nn.Sequential]
    teacher: Callable[[], nn.Sequential]
    num_views: int
    is_paired: bool


def profile(name: str, batch_size: int) -> StepProfile:
    """Price a step of a row's model by its floating-point operations.

    Args:
        name: As in :data:`~.rows.ROWS`.
        batch_size: Samples of one call.
    """
    paper = PAPERS[name]
    with torch.device("meta"):
        student, teacher = paper.student(), paper.teacher()
        images = torch.empty(batch_size, 3, IMAGE_SIZE, IMAGE_SIZE)
    teacher.requires_grad_(requires_grad=False)
    networks = [
        NetworkProfile(
            tuple(
                estimate_atoms(
                    atomize(network).atoms, images, FLOPS_PER_SECOND, trainable=is_student
                )
            )
        )
        for network, is_student in ((student, True), (teacher, False))
    ]
    return StepProfile(
        student=networks[0],
        teacher=networks[1],
        num_calls=(paper.num_views, paper.num_views),
        batch_sizes=(batch_size,) * paper.num_views,
        paired=paper.is_paired,
        input_bytes_per_sample=images[0].nbytes,
    )


def _vit(size: str, num_classes: int | None = None) -> nn.Module:
    layers, heads, width, mlp = _VIT[size]
    network = models.VisionTransformer(
        image_size=IMAGE_SIZE,
        patch_size=16,
        num_layers=layers,
        num_heads=heads,
        hidden_dim=width,
        mlp_dim=mlp,
        num_classes=num_classes or 1,
    )
    if num_classes is None:
        network.heads = nn.Identity()
    return network  # type: ignore[no-any-return]


def _resnet(depth: int) -> tuple[nn.Module, int]:
    network = getattr(models, f"resnet{depth}")()
    width = network.fc.in_features
    network.fc = nn.Identity()
    return network, width


def _moco(size: str) -> Paper:
    def encoder() -> nn.Sequential:
        width = _VIT[size][2]
        return nn.Sequential(_vit(size), MoCoProjectionHead(width, 4096, 256, 3, batch_norm=True))

    def student() -> nn.Sequential:
        return encoder().append(MoCoProjectionHead(256, 4096, 256, 2, batch_norm=True))

    return Paper(student, encoder, num_views=2, is_paired=True)


def _byol(depth: int) -> Paper:
    def encoder() -> nn.Sequential:
        network, width = _resnet(depth)
        return nn.Sequential(network, BYOLProjectionHead(width, 4096, 256))

    def student() -> nn.Sequential:
        return encoder().append(BYOLPredictionHead(256, 4096, 256))

    return Paper(student, encoder, num_views=2, is_paired=True)


def _distillation(size: str, depth: int) -> Paper:
    def student() -> nn.Sequential:
        return nn.Sequential(getattr(models, f"resnet{depth}")(num_classes=1000))

    def teacher() -> nn.Sequential:
        return nn.Sequential(_vit(size, 1000))

    return Paper(student, teacher, num_views=1, is_paired=False)


_MAKERS: dict[str, Callable[..., Paper]] = {"moco": _moco, "byol": _byol, "kd": _distillation}
PAPERS = {row.name: _MAKERS[row.kind](*row.arguments) for row in ROWS}
