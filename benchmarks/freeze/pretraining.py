"""What fine-tuning begins with: images of 32 pixels, and a ViT that has seen others of them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor

from benchmarks.freeze.finetune import NUM_CLASSES, vit

_BATCH_SIZE = 64

Part = tuple[Tensor, Tensor]


def prepare(images: Path, sizes: tuple[int, int, int, int], epochs: int, path: Path) -> None:
    """Write the pretrained network, and images to train on, to tune with and to test on, to a file.

    Args:
        images: With ``train/`` and ``test/``, a folder per class.
        sizes: Images to pretrain on, to train on, to tune the learning rate with, which are held
            out of ``train/``, and to test on.
        epochs: Of the pretraining.
        path: The file.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    before, train, held, test = sizes
    seen = _read(images / "train", 0, before)
    parts = {
        "train": _read(images / "train", before, train),
        "held": _read(images / "train", before + train, held),
        "test": _read(images / "test", 0, test),
    }
    torch.save({"weights": _pretrained(seen, epochs), **parts}, path)


def _read(folder: Path, start: int, number: int) -> Part:
    """Equally many images of each class, normalised."""
    found = ImageFolder(str(folder))
    of_class: list[list[int]] = [[] for _ in range(NUM_CLASSES)]
    for index, label in enumerate(found.targets):
        of_class[label].append(index)
    share = slice(start // NUM_CLASSES, (start + number) // NUM_CLASSES)
    chosen = [index for indices in of_class for index in indices[share]]
    pixels = torch.stack([pil_to_tensor(found[index][0]) for index in chosen])
    labels = torch.tensor([found.targets[index] for index in chosen])
    return (pixels.float() / 255 - 0.47) / 0.25, labels


def _pretrained(part: Part, epochs: int) -> dict[str, Tensor]:
    """Weights after some epochs, with flipped images."""
    network = vit()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.05)
    pixels, labels = part
    num_steps = epochs * len(labels) // _BATCH_SIZE
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=num_steps + epochs)
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels)).split(_BATCH_SIZE):
            x = pixels[chosen]
            x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x, x.flip(3))
            loss = F.cross_entropy(network(x), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    weights: dict[str, Tensor] = network.state_dict()
    return weights
