"""Blockwise distillation in a few plain lines, on one device: what every mode must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor, int, Any], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def train_blocks(
    teachers: Sequence[nn.Module],
    students: Sequence[nn.Module],
    loss: Loss,
    make_optimizer: MakeOptimizer,
    epochs: Sequence[Sequence[Any]],
) -> list[list[float]]:
    """Train each block by itself, on whole batches.

    Args:
        teachers: The teacher's blocks.
        students: The student's, which are changed.
        loss: A block's loss.
        make_optimizer: Makes one for each block.
        epochs: Batches, whose first part is the input.

    Returns:
        For each epoch each block's mean loss over the samples.
    """
    means = [[0.0] * len(students) for _ in epochs]
    for index, student in enumerate(students):
        student.train()
        optimizer = make_optimizer(student.parameters())
        for epoch, batches in enumerate(epochs):
            samples = sum(len(batch[0]) for batch in batches)
            for batch in batches:
                x = batch[0]
                with torch.no_grad():
                    for teacher in teachers[:index]:
                        x = teacher.eval()(x)
                    target = teachers[index].eval()(x)
                value = loss(student(x), target, index, batch)
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
                means[epoch][index] += float(value.detach()) * len(x) / samples
    return means
