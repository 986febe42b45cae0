"""Mean teacher (Tarvainen and Valpola, 2017): most pictures of a batch have no label.

``python examples/mean_teacher.py --fast`` trains for some steps over two CPU processes, ``python
examples/mean_teacher.py fit --config examples/configs/mean_teacher.yaml`` on CIFAR-10 with 4000
labels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from pictures import LabelledLoaders, Transform, augmented
from running import run
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import Dataset
from torchvision import models

NO_LABEL = -1


class MeanTeacher(LightningModule):
    """The student agrees with the average of its past, on pictures with labels and without.

    Args:
        network: Name of torchvision's network.
        num_classes: Its classes.
        momentum: Of the teacher.
        consistency: Weight of the agreement, reached after ``ramp_up`` steps.
        ramp_up: Steps.
        lr: Of SGD.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the settings of the method
        self,
        network: str = "resnet18",
        num_classes: int = 10,
        momentum: float = 0.99,
        consistency: float = 10.0,
        ramp_up: int = 1000,
        lr: float = 0.05,
    ) -> None:
        super().__init__()
        self.momentum, self.consistency, self.ramp_up, self.lr = momentum, consistency, ramp_up, lr
        self.student = models.get_model(network, num_classes=num_classes)
        self.teacher = models.get_model(network, num_classes=num_classes)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(requires_grad=False)

    @torch.no_grad()
    def average(self) -> None:
        """Move the teacher towards the student; on each rank, what lies there."""
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.lerp_(fast, 1 - self.momentum)

    def training_step(self, batch: tuple[tuple[Tensor, Tensor], Tensor]) -> Tensor:
        """Two views of each picture, each ``(batch, 3, size, size)``, and a label or none."""
        self.average()
        (view0, view1), labels = batch
        logits = self.student(view0)
        with torch.no_grad():
            targets = self.teacher(view1).softmax(dim=1)
        supervised = cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum")
        agreement = mse_loss(logits.softmax(dim=1), targets)
        share = min(1.0, self.global_step / self.ramp_up)
        weight = self.consistency * math.exp(-5 * (1 - share) ** 2)
        loss = supervised / len(labels) + weight * agreement
        self.log_dict({"loss": loss, "agreement": agreement}, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """The teacher's accuracy, which is the better one."""
        pictures, labels = batch
        right = self.teacher(pictures).argmax(dim=1) == labels
        self.log("val_accuracy", right.float().mean(), prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with Nesterov's momentum."""
        return torch.optim.SGD(
            self.student.parameters(), lr=self.lr, momentum=0.9, nesterov=True, weight_decay=5e-4
        )


class FewLabels(Dataset[tuple[Any, int]]):
    """Hides the labels of most samples, always of the same ones.

    Args:
        samples: With labels.
        num_labels: How many keep theirs.
    """

    def __init__(self, samples: Any, num_labels: int) -> None:  # noqa: ANN401 - a dataset with a length
        self.samples = samples
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
        self.labelled = set(order[:num_labels].tolist())

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        picture, label = self.samples[index]
        return picture, label if index in self.labelled else NO_LABEL


class SemiSupervised(LabelledLoaders):
    """Two views of each picture, and few labels.

    Args:
        dataset: As in ``Loaders``.
        root: As in ``Loaders``.
        size: Height and width of the pictures.
        batch_size: Pictures per step.
        num_workers: Processes that load them.
        num_labels: Pictures that have one.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - those of the loaders, and one more
        self,
        dataset: str = "CIFAR10",
        root: str = "data",
        size: int = 32,
        batch_size: int = 256,
        num_workers: int = 0,
        num_labels: int = 4000,
    ) -> None:
        super().__init__(dataset, root, size, batch_size, num_workers)
        self.num_labels = num_labels

    def transform(self) -> Transform:
        """Two views."""
        view = augmented(self.size, noise=0.1)
        return lambda picture: (view(picture), view(picture))

    def pictures(self, *, train: bool) -> Dataset[Any]:
        """As before, without most labels where it is trained."""
        pictures = super().pictures(train=train)
        return FewLabels(pictures, self.num_labels) if train else pictures


def module_and_data() -> tuple[MeanTeacher, SemiSupervised]:
    """For ``tspipe plan`` and ``tspipe check``: ResNet-18, bundled pictures of 64 pixels."""
    return MeanTeacher(), SemiSupervised("digits", size=64, batch_size=16, num_labels=200)


if __name__ == "__main__":
    run(MeanTeacher, SemiSupervised)
