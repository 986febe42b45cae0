"""What is trained for accuracy: a ResNet with SGD, a VGG with AdamW, an LSTM with Adam.

The networks are small, so that four policies and a baseline can be trained three times on two
cores. There are two settings: many small updates, and an eighth as many large ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import cos, pi
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from benchmarks.accuracy.data import VOCABULARY

NUM_CLASSES, NUM_STAGES = 10, 4
VGG_WIDTHS = (16, 32, 64, 64, 128, 128, 128, 128)
VGG_POOLED = {0, 1, 3, 5}
"""The convolutions behind which the image becomes smaller."""


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and a way around them (He et al., 2016, section 4.2)."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.around = nn.Identity() if width == out else nn.Conv2d(width, out, 1, stride)
        self.last = nn.ReLU()

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x) + self.around(x))  # type: ignore[no-any-return]


def resnet() -> list[nn.Sequential]:
    """ResNet-8 for images of 32 pixels, one stage for the stem and each block."""
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, NUM_CLASSES))
    return [
        stem,
        nn.Sequential(Residual(16, 16, 1)),
        nn.Sequential(Residual(16, 32, 2)),
        nn.Sequential(Residual(32, 64, 2), *head),
    ]


def vgg() -> list[nn.Sequential]:
    """VGG-11's convolutions with BatchNorm, at a quarter of their width, and one linear layer."""
    blocks, before = [], 3
    for place, width in enumerate(VGG_WIDTHS):
        layers = [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        blocks += [nn.Sequential(*layers, *[nn.MaxPool2d(2)] * (place in VGG_POOLED))]
        before = width
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, NUM_CLASSES))
    return [
        nn.Sequential(*blocks[:1]),
        nn.Sequential(*blocks[1:3]),
        nn.Sequential(*blocks[3:5]),
        nn.Sequential(*blocks[5:], *head),
    ]


class Recurrent(nn.Module):
    """One layer of an LSTM: ``(batch, length, width)`` to the same with another width."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(width, out, batch_first=True)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.cells(tokens)
        return outputs  # type: ignore[no-any-return]


class Mean(nn.Module):
    """The mean over the places: ``(batch, length, width)`` to ``(batch, width)``."""

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.mean(dim=1)


def lstm() -> list[nn.Sequential]:
    """Three layers of an LSTM over word numbers ``(batch, length)``; two classes."""
    return [
        nn.Sequential(nn.Embedding(VOCABULARY, 64)),
        nn.Sequential(Recurrent(64, 64)),
        nn.Sequential(Recurrent(64, 64)),
        nn.Sequential(Recurrent(64, 64), Mean(), nn.Linear(64, 2)),
    ]


class Rate(NamedTuple):
    """How large updates are: half a cosine, perhaps after a linear warm-up.

    Attributes:
        peak: The largest learning rate.
        warmup: Epochs up to it.
    """

    peak: float
    warmup: int = 0

    @override
    def __str__(self) -> str:
        return f"{self.peak:g}" + "w" * self.warmup

    @staticmethod
    def parse(text: str) -> Rate:
        """Of ``0.05``, or ``0.05w`` with one epoch of warm-up."""
        return Rate(float(text.rstrip("w")), text.count("w"))

    def schedule(self, optimizer: Optimizer, epoch: int, num_epochs: int) -> LambdaLR:
        """What changes the rate at each update.

        Args:
            optimizer: Made with the peak.
            epoch: Updates of one.
            num_epochs: Of the training.
        """
        first = self.warmup * epoch

        def factor(update: int) -> float:
            if update < first:
                return (update + 1) / (first + 1)
            return 0.5 + 0.5 * cos(pi * (update - first) / (num_epochs * epoch - first))

        return LambdaLR(optimizer, factor)


@dataclass(frozen=True, slots=True)
class Task:
    """One training.

    Attributes:
        network: Makes the stages of the network.
        optimizer: Makes the optimizer with a learning rate.
        data: ``images`` or ``sentences``.
        num_samples: Of the stated subset.
        epochs: Of the whole training.
        rate: At which the arms are compared.
        rates: Those that were tried, on the baseline alone.
        batch_size: Samples per update.
        num_tests: Images to test with; sentences are tested with all there are.
    """

    network: Callable[[], list[nn.Sequential]]
    optimizer: Callable[[Iterable[nn.Parameter], float], Optimizer]
    data: str
    num_samples: int
    epochs: int
    rate: Rate
    rates: tuple[Rate, ...] = ()
    batch_size: int = 8
    num_tests: int = 2_000


def _rates(text: str) -> tuple[Rate, ...]:
    return tuple(map(Rate.parse, text.split()))


TASKS = {
    "resnet": Task(
        resnet, lambda p, rate: SGD(p, lr=rate, momentum=0.9, weight_decay=5e-4),
        "images", 3_000, 6, Rate(0.005, 1), _rates("0.02w 0.01w 0.005w 0.002w"),
    ),
    "vgg": Task(
        vgg, lambda p, rate: AdamW(p, lr=rate, weight_decay=0.05),
        "images", 3_000, 6, Rate(2e-4, 1), _rates("0.001w 0.0005w 0.0002w 0.0001w"),
    ),
    "lstm": Task(
        lstm, lambda p, rate: Adam(p, lr=rate),
        "sentences", 7_000, 3, Rate(5e-3, 1), _rates("0.01w 0.005w 0.002w 0.001w"),
    ),
}  # fmt: skip

_LARGE_UPDATES = {
    "resnet": (Rate(0.05, 1), _rates("0.1 0.05 0.02 0.01 0.1w 0.05w 0.02w")),
    "vgg": (Rate(1e-3), _rates("0.002 0.001 0.0005 0.0002 0.001w 0.0005w")),
    "lstm": (Rate(2e-3), _rates("0.004 0.002 0.001 0.0005 0.0002 0.002w 0.001w")),
}
"""Rates of the arms, and those that were tried, with batches of 64."""


def tasks_of(batch_size: int) -> dict[str, Task]:
    """The tasks with batches of 8, as they are compared, or of another size.

    Raises:
        KeyError: Neither 8 nor 64: no learning rates were chosen for it.
    """
    if batch_size == TASKS["resnet"].batch_size:
        return TASKS
    chosen = {64: _LARGE_UPDATES}[batch_size]
    return {
        name: replace(task, rate=rate, rates=rates, batch_size=batch_size, num_tests=1_000)
        for name, task in TASKS.items()
        for rate, rates in (chosen[name],)
    }


class Classifier(nn.Module):
    """A network and its loss.

    Args:
        task: What is trained.
    """

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.student = nn.Sequential(*task.network())

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy."""
        inputs, labels = batch
        return functional.cross_entropy(self.student(inputs), labels)


def flipped(images: Tensor, generator: torch.Generator) -> Tensor:
    """Half of ``(batch, 3, side, side)`` images mirrored, and all moved by up to 2 pixels."""
    mirrored = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    images = torch.where(mirrored, images.flip(3), images)
    down, right = torch.randint(-2, 3, (2,), generator=generator).tolist()
    return images.roll((down, right), (2, 3))
