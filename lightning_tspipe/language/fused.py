"""The same loss by Liger's fused kernels (Hsu et al., *Liger Kernel*, 2024), on a GPU; an extra.

Each of its kernels makes its own logits. Where the loss has a divergence and a cross entropy, the
student's logits are made twice, so that this has more to multiply than a chunk that serves both.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.language.chunks import Head

_PACKAGE = "liger_kernel"
_BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}


class Loss(Protocol):
    """What a loss is, as of ``DistillationLoss``."""

    temperature: float
    alpha: float
    kind: str
    ignore_index: int


def check_installed() -> None:
    """Refuse what is not there.

    Raises:
        ConfigurationError: The package is not installed.
    """
    if find_spec(_PACKAGE) is None:
        raise ConfigurationError(
            'kernel="liger" needs the package liger-kernel: pip install "lightning-tspipe[liger]"'
        )


def serves(hidden: Tensor, labels: Tensor, ignore_index: int) -> bool:
    """Whether there is something to compute: not while a step is captured, or without labels."""
    return not isinstance(hidden, FakeTensor) and bool((labels != ignore_index).any())


def check(hidden: Tensor, head: nn.Linear, teacher_head: nn.Linear) -> None:
    """Refuse what the kernels cannot do.

    Raises:
        ConfigurationError: Heads have biases, numbers are of double precision, or there is no GPU.
    """
    biases: tuple[Tensor | None, ...] = head.bias, teacher_head.bias
    wrong = {
        "takes heads without bias": any(bias is not None for bias in biases),
        "computes in float32 at most": hidden.dtype == torch.float64,
        f"needs a GPU, but hidden states are on {hidden.device}": not hidden.is_cuda
        and os.environ.get("TRITON_INTERPRET") != "1",
    }
    for reason, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigurationError(f'kernel="liger" {reason}; use kernel="torch"')


def fused(
    loss: Loss, student: Head, teacher: Head, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, the divergence, and the cross entropies of both: as of the chunks.

    Args:
        loss: What it is.
        student: Its hidden states and its head, without a bias.
        teacher: The same, without gradients.
        labels: Shape (tokens,).
    """
    from liger_kernel.ops import (  # noqa: PLC0415 - an extra
        LigerFusedLinearCrossEntropyFunction,
        LigerFusedLinearJSDFunction,
    )

    def cross_entropy(of: Head) -> Tensor:
        made: tuple[Tensor, ...] = LigerFusedLinearCrossEntropyFunction.apply(
            of.hidden, of.weight, labels, None, None, loss.ignore_index
        )
        return made[0]

    divergence = LigerFusedLinearJSDFunction.apply(
        student.hidden, student.weight, teacher.hidden, teacher.weight.detach(), labels,
        _BETAS[loss.kind], loss.ignore_index, loss.temperature,
    )  # fmt: skip
    with torch.set_grad_enabled(loss.alpha < 1 and torch.is_grad_enabled()):
        own = cross_entropy(student)
    with torch.no_grad():
        guides = cross_entropy(teacher)
    whole = loss.alpha * loss.temperature**2 * divergence + (1 - loss.alpha) * own
    return whole, divergence.detach(), own.detach(), guides
