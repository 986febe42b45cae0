"""What blocks cost: measured on this device, for each share of a batch that may come to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from lightning_tspipe.networks import swap
from lightning_tspipe.networks.profiler import seconds_of
from lightning_tspipe.planning.relay import BlockProfile
from lightning_tspipe.runtime.modes.relay.blocks import BlockLoss, BlockPair, BlockShapes


def measure_block(  # noqa: PLR0913, PLR0917 -- what a block needs to run
    pair: BlockPair,
    block_loss: BlockLoss,
    shapes: BlockShapes,
    sizes: Sequence[int],
    batch: Any,
    device: torch.device,
    *,
    steps: int,
    moments: int,
    context: Callable[[], AbstractContextManager[None]],
    flops_per_second: float | None = None,
) -> BlockProfile:
    """Run a block as a training would, for each number of samples; nothing of it changes.

    Args:
        pair: The block; with its values on the device.
        block_loss: Its loss.
        shapes: What it gets.
        sizes: Numbers of samples.
        batch: A batch, for the loss.
        device: Where to run.
        steps: Times to run, of which the median counts; fewer where they take long.
        moments: Tensors that the optimizer keeps for each parameter.
        context: The precision plugin's forward context.
        flops_per_second: If given, operations are counted, and priced by it.
    """
    blocks = (pair.teacher, pair.student)
    trained = [parameter for parameter in pair.student.parameters() if parameter.requires_grad]
    modules = [module for block in blocks for module in block.modules()]
    teacher: dict[int, float] = {}
    student: dict[int, float] = {}
    activations = 0

    def forward(x: Tensor) -> Tensor:
        with torch.no_grad(), context():
            target: Tensor = pair.teacher(x)
        return target

    def train(x: Tensor, target: Tensor, part: Any) -> None:
        with context():
            loss = block_loss(pair.student(x), target, pair.index, part)
        if loss.requires_grad:
            loss.backward()

    seconds = partial(seconds_of, device=device, steps=steps, rate=flops_per_second)
    with swap.attributes_restored(modules, tensors=True):
        for samples in sizes:
            spec = shapes.input_spec(pair.index, samples)
            x = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
            if spec.dtype.is_floating_point:
                x.normal_()
            cut = partial(_first, samples=samples)
            work = partial(train, x, forward(x), pytree.tree_map_only(Tensor, cut, batch))
            teacher[samples] = seconds(partial(forward, x))
            student[samples] = seconds(work)
            activations = max(activations, math.ceil(_bytes_kept(work) / samples))
        update = seconds(partial(_touch, trained))
    for parameter in trained:
        parameter.grad = None
    gradients = sum(p.nbytes for p in trained)
    held = sum(t.nbytes for block in blocks for t in (*block.parameters(), *block.buffers()))
    return BlockProfile(
        pair.name,
        teacher,
        student,
        update,
        shapes.input_spec(pair.index, 1).num_bytes,
        gradients,
        held + (2 + moments) * gradients,
        activations,
    )


def _first(leaf: Tensor, samples: int) -> Tensor:
    """The beginning of a tensor of the batch, if it is as long."""
    return leaf[:samples] if leaf.dim() and len(leaf) >= samples else leaf


@torch.no_grad()
def _touch(parameters: Sequence[nn.Parameter]) -> None:
    """About what an optimizer reads and writes, without a change."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.add_(parameter.grad, alpha=0.0)


def _bytes_kept(run: Callable[[], Any]) -> int:
    """Bytes that the forwards of a run keep for their backwards, beside parameters."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.nbytes)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(kept.values())
