"""The architecture that ``architecture_search.py`` has found, trained on labels from the beginning.

``python examples/found_architecture.py --fast`` trains one for some steps over two CPU processes;
``python examples/found_architecture.py fit --config examples/configs/found_architecture.yaml
--model.architecture runs/architecture_search/version_0/architecture.json`` what was found.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from architecture_search import CELLS, OPERATIONS, inverted_residual, student_blocks
from lightning.pytorch import LightningModule
from pictures import LabelledLoaders
from running import run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Found(LightningModule):
    """A network of the operations that a search has chosen.

    Args:
        architecture: The file that the search wrote; None: the first operation in each cell.
        num_classes: Classes.
        lr: Of SGD.
    """

    def __init__(
        self, architecture: str | None = None, num_classes: int = 10, lr: float = 0.05
    ) -> None:
        super().__init__()
        chosen = [[0] * len(cells) for cells in CELLS]
        if architecture is not None:
            chosen = json.loads(Path(architecture).read_text(encoding="utf-8"))["operations"]
        operations = (OPERATIONS[number] for block in chosen for number in block)
        blocks = student_blocks(Cells(operations))
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, num_classes)]
        self.student = nn.Sequential(*blocks, *head)
        self.lr = lr

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Labels."""
        pictures, labels = batch
        loss = cross_entropy(self.student(pictures), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Its accuracy."""
        pictures, labels = batch
        right = self.student(pictures).argmax(dim=1) == labels
        self.log("val_accuracy", right.float().mean(), prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), self.lr, 0.9, weight_decay=4e-5)


class Cells:
    """Makes cells of one operation each.

    Args:
        operations: Kernel and expansion of each cell, in their order.
    """

    def __init__(self, operations: Iterator[tuple[int, int]]) -> None:
        self._operations = operations

    def __call__(self, before: int, after: int, stride: int) -> nn.Module:
        """The next cell."""
        operation = inverted_residual(before, after, stride, *next(self._operations))
        return Shortcut(operation) if (before, stride) == (after, 1) else operation


class Shortcut(nn.Module):
    """An operation, and its input.

    Args:
        operation: What changes the input.
    """

    def __init__(self, operation: nn.Module) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        """Their sum."""
        changed: Tensor = self.operation(x)
        return x + changed


if __name__ == "__main__":
    run(Found, LabelledLoaders)
