"""What the atoms of a ViT-B cost, by their floating-point operations."""

from __future__ import annotations

from dataclasses import replace

import torch
from torchvision import models

from lightning_tspipe.networks.arguments import Arguments
from lightning_tspipe.networks.program import Program
from lightning_tspipe.planning.profile import AtomProfile, NetworkProfile
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.profiling.atoms import profile_atoms

_FLOPS_PER_SECOND = 60e12
_FLOAT_BYTES = 4
SIZES = (1, 256)


def vit_b(batch_size: int, step_seconds: float, fraction: float, *, fine: bool) -> StepProfile:
    """ViT-B/16 for ImageNet.

    Args:
        batch_size: Samples of a global batch.
        step_seconds: Of a step without freezing on one device.
        fraction: Of the bytes that travel between stages.
        fine: Whether stages may be cut within blocks; else each is an atom, as PipeTransformer
            has it.
    """
    with torch.device("meta"):
        network = models.vit_b_16()
        images = torch.empty(batch_size, 3, 224, 224)
    program = Program(network, "ViT-B/16", Arguments.of((images,), {}))
    parts = profile_atoms(program, (images,), trainable=True, flops_per_second=_FLOPS_PER_SECOND)
    blocks = _joined([[atom] for atom in parts] if fine else _blocks(parts), batch_size)
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


def _blocks(atoms: list[AtomProfile]) -> list[list[AtomProfile]]:
    """The atoms of each block; what comes before the first one and after the last one too."""
    groups: dict[str, list[AtomProfile]] = {}
    for atom in atoms:
        name = next((p for p in atom.name.split(".") if p.startswith("encoder_layer_")), "")
        last = list(groups)[-1] if groups else "stem"
        groups.setdefault(name or (last if last == "stem" else "head"), []).append(atom)
    return list(groups.values())


def _joined(groups: list[list[AtomProfile]], batch_size: int) -> list[AtomProfile]:
    """One atom for each group, with seconds of one sample."""
    return [
        AtomProfile(
            name=group[0].name,
            forward={1: sum(a.forward[batch_size] for a in group) / batch_size},
            backward={1: sum(a.backward[batch_size] for a in group) / batch_size},
            output_bytes_per_sample=group[-1].output_bytes_per_sample,
            activation_bytes_per_sample=sum(a.activation_bytes_per_sample for a in group),
            parameter_bytes=sum(a.parameter_bytes for a in group),
            trainable_bytes=sum(a.trainable_bytes for a in group),
        )
        for group in groups
    ]
