"""What blocks cost: measured on this device, for each share of a batch that may come to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from lightning_tspipe.planning.relay import BlockProfile
from lightning_tspipe.runtime.modes.relay.blocks import (
    BlockLoss,
    BlockPair,
    BlockShapes,
    tensors_of,
)

_WARM_UP = 2
_LONGEST = 2.0
"""Seconds after which a block has been measured often enough, once it has a few times."""
_FEWEST = 5


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

    def seconds(run: Callable[[], Any]) -> float:
        if flops_per_second is not None:
            return _num_flops(run) / flops_per_second
        return _seconds(run, device, steps)

    teacher: dict[int, float] = {}
    student: dict[int, float] = {}
    activations = 0
    trained = [p for p in pair.student.parameters() if p.requires_grad]
    with _unchanged((pair.teacher, pair.student)):
        for samples in sizes:
            spec = shapes.input_spec(pair.index, samples)
            x = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
            if spec.dtype.is_floating_point:
                x.normal_()
            part = first_samples(batch, samples)

            def forward(x: Tensor = x) -> Tensor:
                with torch.no_grad(), context():
                    target: Tensor = pair.teacher(x)
                return target

            target = forward()

            def train(x: Tensor = x, target: Tensor = target, part: Any = part) -> None:
                with context():
                    loss = block_loss(pair.student(x), target, pair.index, part)
                if loss.requires_grad:
                    loss.backward()

            teacher[samples] = seconds(forward)
            student[samples] = seconds(train)
            with _counted() as counter:
                train()
            activations = max(activations, -(-counter[0] // samples))
        update = seconds(lambda: _touch(trained))
    first = shapes.input_spec(pair.index, 1)
    gradients = sum(p.nbytes for p in trained)
    held = sum(t.nbytes for t in tensors_of((pair.teacher, pair.student)))
    return BlockProfile(
        pair.name,
        teacher,
        student,
        update,
        first.num_bytes,
        gradients,
        held + (2 + moments) * gradients,
        activations,
    )


def first_samples(batch: Any, samples: int) -> Any:
    """The beginning of a batch: of all its tensors that are at least as long."""

    def cut(leaf: Tensor) -> Tensor:
        return leaf[:samples] if leaf.dim() and len(leaf) >= samples else leaf

    return pytree.tree_map_only(Tensor, cut, batch)


def _seconds(run: Callable[[], Any], device: torch.device, steps: int) -> float:
    for _ in range(min(_WARM_UP, steps)):
        run()
    found: list[float] = []
    started = time.perf_counter()
    while len(found) < steps:
        _synchronize(device)
        before = time.perf_counter()
        run()
        _synchronize(device)
        found.append(time.perf_counter() - before)
        if len(found) >= _FEWEST and time.perf_counter() - started > _LONGEST:
            break
    return median(found)


def _num_flops(run: Callable[[], Any]) -> int:
    """Floating-point operations of a run, in products of matrices and convolutions."""
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def _touch(parameters: Sequence[nn.Parameter]) -> None:
    """About what an optimizer reads and writes, without a change."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    own: list[Tensor] = [p for p in parameters if p.grad is not None]
    if own:
        torch._foreach_add_(own, gradients, alpha=0.0)


@contextmanager
def _unchanged(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Afterwards parameters, gradients and buffers are as before."""
    tensors = list(tensors_of(blocks))
    before = [tensor.detach().clone() for tensor in tensors]
    gradients = [p.grad for b in blocks for p in b.parameters()]
    for block in blocks:
        block.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
        for parameter, gradient in zip(
            (p for b in blocks for p in b.parameters()), gradients, strict=True
        ):
            parameter.grad = gradient


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Adds up the bytes that forwards keep."""
    total = [0]
    seen: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage().data_ptr()
        if not isinstance(tensor, nn.Parameter) and key not in seen:
            seen.add(key)
            total[0] += tensor.nbytes
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total
