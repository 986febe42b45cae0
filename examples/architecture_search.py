"""Architecture search beside a MobileNetV2 that teaches: each block finds its own cells.

Each cell of the student mixes six operations, inverted residuals with kernels of 3, 5 or 7 and
expansions of 3 or 6; weights learn from training pictures, and every few steps the mixture learns
from other ones (DNA, Li et al., CVPR 2020; DARTS, Liu et al., ICLR 2019). Blocks learn from their
own blocks of the teacher, all at once. At the end ``architecture.json`` names each cell's best
operation, which ``found_architecture.py`` trains. ``python examples/architecture_search.py --fast``
searches for some steps over two CPU processes, ``python examples/architecture_search.py fit
--config examples/configs/architecture_search.yaml`` on CIFAR-10.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from pictures import LabelledLoaders, Loaders
from running import run
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset, StackDataset, random_split
from torchvision import models

from lightning_tspipe import BlockwiseDistillation

OPERATIONS = tuple(product((3, 5, 7), (3, 6)))
"""Kernel and expansion of each."""
GROUPS = ((0, 4), (4, 7), (7, 11), (11, 14), (14, 17), (17, 19))
"""The layers of MobileNetV2 that are a block each: they begin where its resolution changes."""
CELLS = (
    ((32, 16, 1), (16, 24, 2), (24, 24, 1)),
    ((24, 32, 2), (32, 32, 1), (32, 32, 1)),
    ((32, 64, 2), (64, 64, 1), (64, 64, 1), (64, 64, 1)),
    ((64, 96, 1), (96, 96, 1), (96, 96, 1)),
    ((96, 160, 2), (160, 160, 1), (160, 160, 1)),
    ((160, 320, 1),),
)
"""The student's cells in each block: channels before and behind, and stride."""
Halves = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A batch: pictures with labels for the weights, and others for the mixture."""


class Search(BlockwiseDistillation, LightningModule):
    """A student of mixed cells.

    Args:
        weights: File of the teacher's state dict (torchvision's ``mobilenet_v2``); None: it has
            learned nothing.
        num_classes: Of the teacher.
        every: Steps from one round of the mixture to the next.
        lr: Of the weights.
        mixture_lr: Of the mixture.
    """

    def __init__(
        self,
        weights: str | None = None,
        num_classes: int = 10,
        every: int = 2,
        lr: float = 0.02,
        mixture_lr: float = 3e-3,
    ) -> None:
        super().__init__()
        mobilenet = models.mobilenet_v2(num_classes=num_classes)
        if weights is not None:
            mobilenet.load_state_dict(torch.load(weights, weights_only=True))
        layers = list(mobilenet.features)
        self.teacher = nn.Sequential(*(nn.Sequential(*layers[a:b]) for a, b in GROUPS))
        self.student = student_blocks(MixedCell)
        self.every, self.lr, self.mixture_lr = every, lr, mixture_lr
        self.automatic_optimization = False  # there are two optimizers

    def block_rounds(self, batch_idx: int) -> Sequence[str]:
        """The weights in each step, the mixture in some."""
        return ("weights", "mixture") if batch_idx % self.every == 0 else ("weights",)

    def block_input(self, batch: Halves, round_name: str = "weights") -> Tensor:
        """Pictures to train on, or those that tell how good a mixture is."""
        pictures, _ = batch[0 if round_name == "weights" else 1]
        return pictures

    def round_optimizers(self, round_name: str) -> Sequence[Any]:
        """One for each kind of round."""
        return [self.all_optimizers()[0 if round_name == "weights" else 1]]

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """How far the assembled student is from the teacher."""
        pictures, _ = batch
        distance = mse_loss(self.student(pictures), self.teacher(pictures))
        self.log("val_distance", distance, prog_bar=True, batch_size=len(pictures))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """One for the weights, one for the mixtures."""
        names = dict(self.student.named_parameters())
        mixtures = [p for name, p in names.items() if name.endswith("mixture")]
        weights = [p for name, p in names.items() if not name.endswith("mixture")]
        return [
            torch.optim.SGD(weights, self.lr, 0.9, weight_decay=4e-5),
            torch.optim.Adam(mixtures, self.mixture_lr, weight_decay=1e-3),
        ]

    def architecture(self) -> list[list[int]]:
        """For each cell of each block the operation with the largest weight."""
        cells = [[c for c in block if isinstance(c, MixedCell)] for block in self.student]
        return [[int(cell.mixture.argmax()) for cell in block] for block in cells]

    def teardown(self, stage: str) -> None:
        """Rank 0, which has all blocks again, writes what was found."""
        if stage != "fit" or self.trainer.interrupted:
            return
        folder = Path(self.trainer.log_dir or self.trainer.default_root_dir)  # all ranks agree
        if self.trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"operations": self.architecture()})
            (folder / "architecture.json").write_text(text, encoding="utf-8")


class MixedCell(nn.Module):
    """All operations, weighed by a softmax.

    Args:
        before: Channels.
        after: Channels.
        stride: Stride.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.operations = nn.ModuleList(
            inverted_residual(before, after, stride, *operation) for operation in OPERATIONS
        )
        self.mixture = nn.Parameter(1e-3 * torch.randn(len(OPERATIONS)))
        self.has_shortcut = before == after and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        """The weighted sum, and a shortcut where the shape stays."""
        weights = self.mixture.softmax(dim=0)
        outputs = [weights[i] * op(x) for i, op in enumerate(self.operations)]
        mixed = torch.stack(outputs).sum(dim=0)
        return mixed + x if self.has_shortcut else mixed


def student_blocks(cell: Callable[[int, int, int], nn.Module]) -> nn.Sequential:
    """The student: cells as CELLS says, with the first and the last layer of a MobileNetV2.

    Args:
        cell: Makes a cell of its channels and stride.
    """
    blocks = [[cell(*shape) for shape in shapes] for shapes in CELLS]
    blocks[0].insert(0, convolution(3, 32, 3, 2))
    blocks[-1].append(convolution(320, 1280, 1, 1))
    return nn.Sequential(*(nn.Sequential(*layers) for layers in blocks))


def inverted_residual(
    before: int, after: int, stride: int, kernel: int, expansion: int
) -> nn.Sequential:
    """Expand, convolve each channel, project (Sandler et al., CVPR 2018)."""
    inside = before * expansion
    return nn.Sequential(
        convolution(before, inside, 1, 1),
        convolution(inside, inside, kernel, stride, groups=inside),
        nn.Conv2d(inside, after, 1, bias=False),
        nn.BatchNorm2d(after),
    )


def convolution(before: int, after: int, kernel: int, stride: int, groups: int = 1) -> nn.Module:
    """With its norm and nonlinearity."""
    conv = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(after), nn.ReLU6())


class SearchLoaders(LabelledLoaders):
    """Batches in two halves: pictures for the weights, and others for the mixture."""

    def pictures(self, *, train: bool) -> Dataset[Any]:
        """The training pictures, dealt into two."""
        everything = Loaders.pictures(self, train=train)
        if not train:
            return everything
        half = len(everything) // 2  # type: ignore[arg-type] # pictures have a length
        parts = [half, half, len(everything) - 2 * half]  # type: ignore[arg-type]
        first, second, _ = random_split(everything, parts, torch.Generator().manual_seed(0))
        return StackDataset(first, second)


def module_and_data() -> tuple[Search, SearchLoaders]:
    """For ``tspipe plan``: bundled pictures."""
    return Search(), SearchLoaders("digits", size=64, batch_size=8)


if __name__ == "__main__":
    run(Search, SearchLoaders)
