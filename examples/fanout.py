"""Three tasks on one frozen trunk (transfer learning), each with a head of its own.

A picture's class, whether it shows an animal, and how far it was turned: the trunk sees each
picture once, and every device trains its heads. ``python examples/fanout.py --fast`` trains for
some steps over two CPU processes, ``python examples/fanout.py fit --config
examples/configs/fanout.yaml`` on CIFAR-10 with torchvision's weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from pictures import LabelledLoaders, Pictures
from running import run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from torchvision import models

from lightning_tspipe import FanoutTraining, StudentFanout

TASKS = {"kind": 10, "animal": 2, "rotation": 4}
"""Outputs of each head; a batch's labels are in this order."""

ANIMALS = frozenset({2, 3, 4, 5, 6, 7})
"""Classes of CIFAR-10; of digits, those that do for the example."""


class Tasks(FanoutTraining, LightningModule):
    """Heads on a ResNet that is trained no more; ``training_step`` is written as for one of them.

    Args:
        trunk: Name of a torchvision ResNet.
        weights: Its weights: a name of torchvision's, such as ``DEFAULT``, which are downloaded, or
            the file of a state dict; None: random ones, which have learned nothing.
        width: Hidden features of the head that tells rotations, the hardest task.
        lr: Of the heads; the one that tells rotations has half of it.
    """

    def __init__(
        self,
        trunk: str = "resnet18",
        weights: str | None = None,
        width: int = 512,
        lr: float = 1e-3,
    ) -> None:
        super().__init__()
        self.lr = lr
        network: Any = pretrained(trunk, weights)
        features = network.fc.in_features
        network.fc = nn.Identity()
        self.teacher = network.requires_grad_(requires_grad=False).eval()
        deep = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 4))
        heads = {name: nn.Linear(features, outputs) for name, outputs in TASKS.items()}
        self.student = StudentFanout(heads | {"rotation": deep})

    def step(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Loss and accuracy of the head whose turn it is."""
        pictures, labels = batch
        outputs = self.student(self.teacher(pictures))
        own = labels[:, list(TASKS).index(self.head)]
        return cross_entropy(outputs, own), (outputs.argmax(dim=1) == own).float().mean()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Logged as ``kind/loss``, ``animal/loss``, ``rotation/loss``."""
        loss, _ = self.step(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Logged under the names of the heads too."""
        loss, accuracy = self.step(batch)
        self.log_dict({"val_loss": loss, "val_accuracy": accuracy}, batch_size=len(batch[1]))

    def head_optimizer(self, name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """AdamW for one head."""
        return torch.optim.AdamW(parameters, lr=self.lr / 2 if name == "rotation" else self.lr)


def pretrained(name: str, weights: str | None) -> models.ResNet:
    """A network of torchvision.

    Args:
        name: The network.
        weights: As in ``Tasks``.

    Raises:
        SystemExit: The weights can't be had.
    """
    try:
        is_file = weights is not None and bool(Path(weights).suffix)
        network: Any = models.get_model(name, weights=None if is_file else weights)
        if is_file:
            network.load_state_dict(torch.load(str(weights), weights_only=True))
    except OSError as error:  # of the network, or of the disk
        raise SystemExit(
            f"no weights {weights!r} of {name}: {error}. Download the file elsewhere and give its "
            "path (--model.weights resnet50.pth), or do without (--model.weights null): random "
            "weights, whose features are worth little"
        ) from error
    return network


class Turned(Dataset[tuple[Tensor, Tensor]]):
    """Pictures, turned by a quarter as often as their number says, with the labels of all tasks.

    Args:
        pictures: Labelled pictures, each a tensor ``(3, size, size)``.
    """

    def __init__(self, pictures: Pictures) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture, kind = self.pictures[index]
        quarters = index % 4
        labels = torch.tensor([kind, int(kind in ANIMALS), quarters])
        return torch.rot90(picture, quarters, dims=(1, 2)), labels


class TurnedLoaders(LabelledLoaders):
    """Loaders of turned pictures."""

    def pictures(self, *, train: bool) -> Dataset[Any]:
        """What is trained on, or validated with."""
        transform = self.transform() if train else None
        return Turned(
            Pictures(self.dataset, self.root, train=train, size=self.size, transform=transform)
        )


def module_and_data() -> tuple[Tasks, TurnedLoaders]:
    """For ``tspipe check``: a ResNet-18 and bundled pictures."""
    return Tasks(), TurnedLoaders("digits", size=32, batch_size=16)


if __name__ == "__main__":
    run(Tasks, TurnedLoaders)
