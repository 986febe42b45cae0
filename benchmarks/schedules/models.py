"""What is emulated, on the meta device: only shapes and costs are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchvision
import transformers
from torch import nn

from benchmarks.emulated.world import emulated
from lightning_tspipe.networks.arguments import Arguments, tensors_in
from lightning_tspipe.networks.program import Program
from lightning_tspipe.planning.profile import NetworkProfile
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.profiling.atoms import profile_atoms

SAMPLES = 8
FLOPS_PER_SECOND = 60e12
"""Any: times are scaled, and only the proportions of atoms count."""
FRACTION = 1 / 256
"""Of the real bytes that travel: two cores copy for all devices."""

Call = tuple[tuple[Any, ...], dict[str, Any]]


def _vit_l() -> tuple[nn.Module, Call]:
    return torchvision.models.vit_l_16(), ((torch.empty(SAMPLES, 3, 224, 224),), {})


def _llama_32() -> tuple[nn.Module, Call]:
    config = transformers.LlamaConfig(
        num_hidden_layers=32, hidden_size=2048, intermediate_size=5632, vocab_size=8192
    )
    ids = torch.zeros(SAMPLES, 512, dtype=torch.long)
    return transformers.LlamaForCausalLM(config), ((ids,), {"use_cache": False})


MODELS: dict[str, Callable[[], tuple[nn.Module, Call]]] = {"vit_l": _vit_l, "llama_32": _llama_32}


def step(name: str, seconds: float, *, teacher: bool = False) -> StepProfile:
    """A step of a model by its floating-point operations, without a teacher or with an equal one.

    Args:
        name: One of :data:`MODELS`.
        seconds: What a batch takes on one device.
        teacher: Whether a frozen network of the same size runs beside.
    """
    with torch.device("meta"):
        network, (args, kwargs) = MODELS[name]()
    program = Program(network, name, Arguments.of(args, kwargs))
    inputs = tuple(tensors_in((args, kwargs)))
    student, frozen = (
        NetworkProfile(
            tuple(
                profile_atoms(
                    program, inputs, trainable=trainable, flops_per_second=FLOPS_PER_SECOND
                )
            )
        )
        for trainable in (True, False)
    )
    whole = StepProfile(
        student=student,
        teacher=frozen if teacher else None,
        num_calls=(1, int(teacher)),
        batch_sizes=(SAMPLES,) * (1 + teacher),
        paired=False,
        input_bytes_per_sample=4,
    )
    return emulated(whole, seconds, FRACTION)
