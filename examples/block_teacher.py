"""A teacher for ``compression.py`` or ``architecture_search.py``: it learns labels, and is written.

``python examples/block_teacher.py --fast`` trains for some steps over two CPU processes;
``python examples/block_teacher.py fit --config examples/configs/block_teacher.yaml`` a VGG-16 on
CIFAR-10; ``--model.network mobilenet_v2 --model.file data/mobilenet_v2-cifar10.pt --data.size 64``
behind it the other teacher.
"""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from pictures import LabelledLoaders
from running import run
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchvision import models


class Teacher(LightningModule):
    """One of torchvision's networks.

    Args:
        network: Its name there.
        num_classes: Classes.
        lr: Of SGD.
        file: Where its state dict goes after the training.
    """

    def __init__(
        self,
        network: str = "vgg16_bn",
        num_classes: int = 10,
        lr: float = 0.05,
        file: str = "data/vgg16-cifar10.pt",
    ) -> None:
        super().__init__()
        self.student = models.get_model(network, num_classes=num_classes)
        self.lr, self.file = lr, Path(file)

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
        return torch.optim.SGD(self.parameters(), self.lr, 0.9, weight_decay=5e-4)

    def teardown(self, stage: str) -> None:
        """Rank 0, which has all of it again, writes it."""
        if stage == "fit" and self.trainer.is_global_zero and not self.trainer.interrupted:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(self.student.state_dict(), self.file)


if __name__ == "__main__":
    run(Teacher, LabelledLoaders)
