"""Hints (FitNets, Romero et al., 2015): the student also imitates a layer inside the teacher.

Both networks return a feature and the logits, and gradients reach the student through both.
``python examples/feature_kd.py --fast`` trains for some steps over two CPU processes, ``python
examples/feature_kd.py fit --config examples/configs/feature_kd.yaml`` on CIFAR-100.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from pictures import LabelledLoaders
from running import run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, mse_loss, softmax
from torchvision import models
from torchvision.models.feature_extraction import create_feature_extractor


class HintDistillation(LightningModule):
    """Hints from the middle of one ResNet for the middle of another.

    Args:
        teacher: Name of torchvision's ResNet that teaches.
        student: Name of the one that learns.
        weights: File of the teacher's state dict; None: it has learned nothing.
        layer: Whose output is the hint.
        num_classes: Classes of both.
        hint_weight: Of the hints in the loss.
        lr: Of SGD.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the settings of the method
        self,
        teacher: str = "resnet34",
        student: str = "resnet18",
        weights: str | None = None,
        layer: str = "layer2",
        num_classes: int = 10,
        hint_weight: float = 0.1,
        lr: float = 0.05,
    ) -> None:
        super().__init__()
        self.hint_weight, self.lr = hint_weight, lr
        large = models.get_model(teacher, num_classes=num_classes)
        small = models.get_model(student, num_classes=num_classes)
        if weights is not None:
            large.load_state_dict(torch.load(weights, weights_only=True))
        returned = {layer: "hint", "fc": "logits"}
        self.teacher = create_feature_extractor(large, returned).requires_grad_(requires_grad=False)
        self.student = create_feature_extractor(small, returned)
        # Lives with the loss: it maps the student's feature to the shape of the teacher's.
        self.regressor = nn.Conv2d(num_channels(small, layer), num_channels(large, layer), 1)

    def on_train_start(self) -> None:
        """The Trainer puts everything in train mode."""
        self.teacher.eval()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Labels, the teacher's logits, and its hints."""
        pictures, labels = batch
        student = self.student(pictures)
        with torch.no_grad():
            teacher = self.teacher(pictures)
        soft = kl_div(
            log_softmax(student["logits"] / 4, dim=1),
            softmax(teacher["logits"] / 4, dim=1),
            reduction="batchmean",
        )
        hint = mse_loss(self.regressor(student["hint"]), teacher["hint"])
        loss = cross_entropy(student["logits"], labels) + 16 * soft + self.hint_weight * hint
        self.log_dict({"loss": loss, "hint_loss": hint}, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """The student's accuracy."""
        pictures, labels = batch
        right = self.student(pictures)["logits"].argmax(dim=1) == labels
        self.log("val_accuracy", right.float().mean(), prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum, for the regressor too."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr, momentum=0.9, weight_decay=5e-4)


def num_channels(resnet: nn.Module, layer: str) -> int:
    """Of what a layer of a ResNet returns."""
    return [m for m in resnet.get_submodule(layer).modules() if isinstance(m, nn.BatchNorm2d)][
        -1
    ].num_features


def module_and_data() -> tuple[HintDistillation, LabelledLoaders]:
    """For ``tspipe plan`` and ``tspipe check``: ResNet-34 and -18, bundled pictures."""
    return HintDistillation(), LabelledLoaders("digits", size=64, batch_size=16)


if __name__ == "__main__":
    run(HintDistillation, LabelledLoaders)
