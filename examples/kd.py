"""Distillation with soft targets (Hinton et al., 2015): a vision transformer teaches a ResNet.

The teacher never changes, so the pipeline's delay is none: the losses are those of one device.
``python examples/kd.py --fast`` trains for some steps over two CPU processes, ``python
examples/kd.py fit --config examples/configs/kd.yaml`` on ImageNet with torchvision's weights.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from pictures import LabelledLoaders
from running import run
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax
from torchvision import models
from torchvision.models import VisionTransformer


class Distillation(LightningModule):
    """Soft targets of a frozen ViT, and the labels, for a ResNet.

    Args:
        teacher: Name of a torchvision network with its ImageNet weights, such as ``vit_b_16``;
            None: a small one for pictures of ``size`` pixels, which has learned nothing.
        student: Name of the network that learns.
        size: Height and width of the pictures.
        num_classes: Classes of both.
        temperature: Softens the targets.
        lr: Of SGD.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the settings of the method
        self,
        teacher: str | None = None,
        student: str = "resnet18",
        size: int = 64,
        num_classes: int = 10,
        temperature: float = 4.0,
        lr: float = 0.05,
    ) -> None:
        super().__init__()
        self.temperature, self.lr = temperature, lr
        if teacher is None:
            self.teacher = VisionTransformer(size, 8, 6, 3, 192, 768, num_classes=num_classes)
        else:
            self.teacher = models.get_model(teacher, weights="DEFAULT")
        self.teacher.requires_grad_(requires_grad=False)
        self.student = models.get_model(student, num_classes=num_classes)

    def on_train_start(self) -> None:
        """The Trainer puts everything in train mode."""
        self.teacher.eval()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Half of the loss comes from the labels, half from the teacher."""
        pictures, labels = batch
        logits = self.student(pictures)
        with torch.no_grad():
            targets = softmax(self.teacher(pictures) / self.temperature, dim=1)
        soft = kl_div(log_softmax(logits / self.temperature, dim=1), targets, reduction="batchmean")
        loss = 0.5 * cross_entropy(logits, labels) + 0.5 * self.temperature**2 * soft
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """The student's accuracy."""
        pictures, labels = batch
        right = self.student(pictures).argmax(dim=1) == labels
        self.log("val_accuracy", right.float().mean(), prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(
            self.student.parameters(), lr=self.lr, momentum=0.9, weight_decay=5e-4
        )


def module_and_data() -> tuple[Distillation, LabelledLoaders]:
    """For ``tspipe plan`` and ``tspipe check``: a small ViT, ResNet-18, bundled pictures."""
    return Distillation(), LabelledLoaders("digits", size=64, batch_size=16)


if __name__ == "__main__":
    run(Distillation, LabelledLoaders)
