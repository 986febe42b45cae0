"""Labelled pictures, from torchvision or bundled with scikit-learn, as datasets and loaders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from PIL import Image
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets
from torchvision.transforms import v2

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, which lightly uses too
Transform = Callable[[Image.Image], Any]


def plain(size: int) -> Transform:
    """One normalised tensor ``(3, size, size)``, the same every time."""
    steps = [
        v2.ToImage(),
        v2.Resize((size, size), antialias=True),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN, STD),
    ]
    chain: Transform = v2.Compose(steps)
    return chain


def augmented(size: int, *, noise: float = 0.0) -> Transform:
    """One randomly cropped and coloured tensor ``(3, size, size)``."""
    steps = [
        v2.ToImage(),
        v2.RandomResizedCrop(size, scale=(0.5, 1.0), antialias=True),
        v2.ColorJitter(0.3, 0.3, 0.3),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN, STD),
    ]
    if noise:
        steps.append(v2.GaussianNoise(sigma=noise, clip=False))
    chain: Transform = v2.Compose(steps)
    return chain


class Pictures(Dataset[tuple[Any, int]]):
    """Labelled pictures.

    Args:
        name: ``digits`` (1797 of scikit-learn, nothing is downloaded), the name of a torchvision
            dataset such as ``CIFAR10`` or ``CIFAR100``, or ``ImageFolder`` for the folders
            ``root/train`` and ``root/val`` with a subfolder for each class.
        root: Where the files are, or come to.
        train: The part to learn from, or the other one.
        size: Height and width of the plain pictures.
        transform: Of each picture, a PIL image; None: the plain picture.
        download: Whether files that are missing are downloaded.
    """

    def __init__(  # noqa: PLR0913 - settings by keyword
        self,
        name: str = "CIFAR10",
        root: str = "data",
        *,
        train: bool = True,
        size: int = 32,
        transform: Transform | None = None,
        download: bool = False,
    ) -> None:
        self.transform = transform or plain(size)
        if name == "digits":
            self.samples: Any = Digits(train=train)
        elif name == "ImageFolder":
            self.samples = datasets.ImageFolder(str(Path(root) / ("train" if train else "val")))
        else:
            self.samples = getattr(datasets, name)(root, train=train, download=download)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = self.samples[index]
        return self.transform(image), label


class Digits:
    """scikit-learn's handwritten digits: a fifth to ask about, the others to learn from."""

    def __init__(self, *, train: bool) -> None:
        data = load_digits()
        ours = [i for i in range(len(data.target)) if (i % 5 > 0) == train]
        self.images = (data.images[ours] * (255 / 16)).astype("uint8")
        self.labels = data.target[ours]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]).convert("RGB"), int(self.labels[index])


class Loaders(LightningDataModule):
    """Loaders of labelled pictures; an example says what its networks see of them.

    Args:
        dataset: As in ``Pictures``.
        root: Where its files are, or come to.
        size: Height and width of what the networks see.
        batch_size: Pictures per step.
        num_workers: Processes that load them.
    """

    def __init__(
        self,
        dataset: str = "CIFAR10",
        root: str = "data",
        size: int = 32,
        batch_size: int = 256,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.dataset, self.root, self.size = dataset, root, size
        self.batch_size, self.num_workers = batch_size, num_workers

    def transform(self) -> Transform:
        """What a picture becomes in training."""
        return augmented(self.size)

    def prepare_data(self) -> None:
        """Download, once per machine."""
        for train in (True, False):
            Pictures(self.dataset, self.root, train=train, download=True)

    def pictures(self, *, train: bool) -> Dataset[Any]:
        """What is trained on, or validated with."""
        transform = self.transform() if train else None
        return Pictures(self.dataset, self.root, train=train, size=self.size, transform=transform)

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled batches of one size."""
        return DataLoader(
            self.pictures(train=True),
            self.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=self.num_workers,
        )


class LabelledLoaders(Loaders):
    """The same with batches to validate and test with, which are plain pictures and labels."""

    def val_dataloader(self) -> DataLoader[Any]:
        """Everything once, in order."""
        return DataLoader(self.pictures(train=False), self.batch_size, num_workers=self.num_workers)

    def test_dataloader(self) -> DataLoader[Any]:
        """The same."""
        return self.val_dataloader()
