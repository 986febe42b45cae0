"""Images and sentences in memory; what a sample looks like depends on its seed alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from typing_extensions import override

IMAGE_SIZE = 32
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
VOCABULARY = 8192
SENTENCE_LENGTH = 32
PADDING, UNKNOWN = 0, 1

Views = tuple[Tensor, Tensor]


class TwoViews(Dataset[Views]):
    """Two random crops of each image.

    The same in every run with this seed, whichever process reads and whatever else it draws: each
    reading of a sample has a random stream of its own.

    Args:
        images: ``(number, 3, 32, 32)``, uint8.
        seed: Of the crops and colours.
    """

    def __init__(self, images: Tensor, seed: int) -> None:
        self._images = images
        self._seed = seed
        self._num_reads = [0] * len(images)
        self._transform = v2.Compose(
            [
                v2.RandomResizedCrop(IMAGE_SIZE, scale=(0.2, 1.0), antialias=True),
                v2.RandomHorizontalFlip(),
                v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
                v2.RandomGrayscale(0.2),
                *_to_float(),
            ]
        )

    def __len__(self) -> int:
        return len(self._images)

    @override
    def __getitem__(self, index: int) -> Views:
        read = self._num_reads[index]
        self._num_reads[index] += 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(hash((self._seed, index, read)))
            return self._transform(self._images[index]), self._transform(self._images[index])


def images(folder: Path, num: int) -> tuple[Tensor, Tensor]:
    """The first images of each class, as many of each.

    Args:
        folder: With a folder of image files for each class.
        num: Images in all.

    Returns:
        Images ``(num, 3, 32, 32)``, uint8, and classes ``(num,)``.
    """
    dataset = ImageFolder(str(folder), v2.PILToTensor())
    by_class: Callable[[int], list[int]] = lambda label: [  # noqa: E731
        index for index, (_, other) in enumerate(dataset.samples) if other == label
    ]
    share = num // len(dataset.classes)
    chosen = [index for label in range(len(dataset.classes)) for index in by_class(label)[:share]]
    return (
        torch.stack([dataset[index][0] for index in chosen]),
        torch.tensor([dataset.samples[index][1] for index in chosen]),
    )


def plain(pictures: Tensor, labels: Tensor) -> TensorDataset:
    """The images as they are, normalised, with their classes."""
    return TensorDataset(v2.Compose(_to_float())(pictures), labels)


def sentences(folder: Path, num: int | None) -> tuple[TensorDataset, TensorDataset]:
    """Labelled sentences as word numbers ``(length,)``, to train on and to test with.

    Args:
        folder: With ``train.tsv`` and ``dev.tsv``, a sentence and its label in each line.
        num: At most this many to train on.
    """
    train = list(islice(_lines(folder / "train.tsv"), num))
    counts = Counter(word for words, _ in train for word in words)
    known = [word for word, _ in counts.most_common(VOCABULARY - 2)]
    numbers = {word: number for number, word in enumerate(known, start=2)}
    test = list(_lines(folder / "dev.tsv"))
    return _numbered(train, numbers), _numbered(test, numbers)


def _to_float() -> list[v2.Transform]:
    return [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, DEVIATION)]


def _lines(file: Path) -> list[tuple[list[str], int]]:
    rows = (line.rsplit("\t", 1) for line in file.read_text(encoding="utf-8").splitlines())
    return [(sentence.split(), int(label)) for sentence, label in rows if label.isdigit()]


def _numbered(rows: list[tuple[list[str], int]], numbers: dict[str, int]) -> TensorDataset:
    tokens = torch.full((len(rows), SENTENCE_LENGTH), PADDING)
    for row, (words, _) in enumerate(rows):
        own = [numbers.get(word, UNKNOWN) for word in words[:SENTENCE_LENGTH]]
        tokens[row, : len(own)] = torch.tensor(own)
    return TensorDataset(tokens, torch.tensor([label for _, label in rows]))
