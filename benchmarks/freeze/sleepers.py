"""A ViT-B whose atoms sleep for as long as their floating-point operations would take."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.autograd import Function
from torch.optim import SGD, Optimizer
from torchvision import models
from typing_extensions import override

from lightning_tspipe.networks.atoms import atomize
from lightning_tspipe.networks.flops import estimate_atoms
from lightning_tspipe.planning.profile import AtomProfile, NetworkProfile
from lightning_tspipe.planning.step_profile import StepProfile

_FLOPS_PER_SECOND = 60e12
_FLOAT_BYTES = 4
SIZES = (1, 256)


class _Sleep(Function):
    """Sleeps forth and back; passes on numbers that are all zero."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: Tensor, width: int, seconds: Any) -> Tensor:
        ctx.shapes, ctx.seconds = (x.shape, weight.shape), seconds[1]
        if type(x) is Tensor:  # whoever asks for shapes gets them at once
            time.sleep(seconds[0] * len(x))
        return x.new_zeros(1, 1).expand(len(x), width)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.shapes
        time.sleep(ctx.seconds * x[0])
        zero = gradients[0].new_zeros(())
        return zero.expand(x), zero.expand(weight), None, None


class Sleeper(nn.Module):
    """One atom.

    Args:
        atom: Its costs: seconds of one sample, and bytes that it passes on.
    """

    def __init__(self, atom: AtomProfile) -> None:
        super().__init__()
        self._seconds = atom.forward[1], atom.backward[1]
        self._width = max(1, round(atom.output_bytes_per_sample / _FLOAT_BYTES))
        self.weight = nn.Parameter(torch.zeros(1))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Sleep; shape (samples, any width) to (samples, own width)."""
        return _Sleep.apply(x, self.weight, self._width, self._seconds)  # type: ignore[no-any-return]


class Sleeping(LightningModule):
    """A classifier that sleeps.

    Args:
        profile: Its costs.
    """

    def __init__(self, profile: StepProfile) -> None:
        super().__init__()
        self.student = nn.Sequential(*map(Sleeper, profile.student.atoms))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.student(batch[0]).mean()  # type: ignore[no-any-return]

    @override
    def configure_optimizers(self) -> Optimizer:
        return SGD(self.student.parameters(), lr=0.01)


def vit_b(batch_size: int, step_seconds: float, fraction: float) -> StepProfile:
    """ViT-B/16 for ImageNet: an atom for each block, as PipeTransformer partitions it.

    Args:
        batch_size: Samples of a global batch.
        step_seconds: Of a step without freezing on one device.
        fraction: Of the bytes that travel between stages.
    """
    with torch.device("meta"):
        network = models.vit_b_16()
        images = torch.empty(batch_size, 3, 224, 224)
    parts = estimate_atoms(atomize(network).atoms, images, _FLOPS_PER_SECOND, trainable=True)
    blocks = _blocks(parts, batch_size)
    total = batch_size * sum(block.forward[1] + block.backward[1] for block in blocks)
    factor = step_seconds / total

    def scaled(block: AtomProfile) -> AtomProfile:
        def both(seconds: float) -> dict[int, float]:
            return {size: factor * size * seconds for size in SIZES}

        return replace(
            block,
            forward=both(block.forward[1]),
            backward=both(block.backward[1]),
            output_bytes_per_sample=round(fraction * block.output_bytes_per_sample),
            result_bytes_per_sample=0,
        )

    return StepProfile(
        student=NetworkProfile(tuple(map(scaled, blocks))), teacher=None, num_calls=(1, 0),
        batch_sizes=(batch_size,), paired=False, input_bytes_per_sample=_FLOAT_BYTES,
    )  # fmt: skip


def _blocks(atoms: list[AtomProfile], batch_size: int) -> list[AtomProfile]:
    """Atoms of one block joined; what comes before the first one and after the last one too."""
    groups: dict[str, list[AtomProfile]] = {}
    for atom in atoms:
        name = next((p for p in atom.name.split(".") if p.startswith("encoder_layer_")), "")
        last = list(groups)[-1] if groups else "stem"
        groups.setdefault(name or (last if last == "stem" else "head"), []).append(atom)
    return [
        AtomProfile(
            name=name,
            forward={1: sum(a.forward[batch_size] for a in group) / batch_size},
            backward={1: sum(a.backward[batch_size] for a in group) / batch_size},
            output_bytes_per_sample=group[-1].output_bytes_per_sample,
            activation_bytes_per_sample=sum(a.activation_bytes_per_sample for a in group),
            parameter_bytes=sum(a.parameter_bytes for a in group),
            trainable_bytes=sum(a.trainable_bytes for a in group),
        )
        for name, group in groups.items()
    ]
