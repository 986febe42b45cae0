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
from torch import Tensor, nn
from torch.nn import functional
from torchvision import models
from typing_extensions import override

from benchmarks.emulated.rows import ROWS
from lightning_tspipe.networks.arguments import Arguments
from lightning_tspipe.networks.program import Program
from lightning_tspipe.planning.profile import NetworkProfile
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.profiling.atoms import profile_atoms

IMAGE_SIZE = 224
PATCH_SIZE = 16
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
                profile_atoms(
                    Program(network, name, Arguments.of((images,), {})),
                    (images,),
                    trainable=is_student,
                    flops_per_second=FLOPS_PER_SECOND,
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


class _Block(nn.Module):
    """A transformer block as the paper's ViTs have it: one product for queries, keys and values."""

    def __init__(self, num_heads: int, width: int, mlp: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, mlp), nn.Linear(mlp, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, tokens, width)."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        y: Tensor = x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))
        return y


class _Tokens(nn.Module):
    """Patches and a class token, with positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH_SIZE, PATCH_SIZE)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        num_tokens = (IMAGE_SIZE // PATCH_SIZE) ** 2 + 1
        self.positions = nn.Parameter(torch.zeros(1, num_tokens, width))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Images to shape (batch, tokens, width)."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        # The token of each sample, as something that is computed from it.
        token = self.token + torch.zeros_like(patches[:, :1])
        return torch.cat([token, patches], dim=1) + self.positions


class _ClassToken(nn.Module):
    """What the head gets."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, tokens, width) to (batch, width)."""
        return x[:, 0]


def _vit(size: str, num_classes: int | None = None) -> nn.Sequential:
    num_layers, num_heads, width, mlp = _VIT[size]
    blocks = (_Block(num_heads, width, mlp) for _ in range(num_layers))
    network = nn.Sequential(_Tokens(width), *blocks, nn.LayerNorm(width), _ClassToken())
    return network if num_classes is None else network.append(nn.Linear(width, num_classes))


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
