"""DINO (Caron et al., 2021): self-distillation over large and small crops, without labels.

``python examples/dino.py --fast`` trains it for some steps over two CPU processes,
``python examples/dino.py fit --config examples/configs/dino.yaml`` on CIFAR-10.
"""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy

import torch
from lightly.loss import DINOLoss
from lightly.models.modules.heads import DINOProjectionHead
from lightly.models.utils import update_momentum
from lightly.transforms.dino_transform import DINOTransform
from lightly.utils.scheduler import cosine_schedule
from lightning.pytorch import LightningModule
from pictures import Loaders, Transform
from running import run
from torch import Tensor, nn
from torchvision import models

NUM_LARGE = 2
"""Crops that the teacher sees."""


class DINO(LightningModule):
    """DINO with a ResNet of torchvision, which takes crops of any size.

    Args:
        backbone: Name of the ResNet.
        num_hidden: Width of the head.
        num_outputs: Dimensions of the distributions that are compared.
        momentum: Of the teacher at the start; it grows to 1 on a cosine.
        lr: Of SGD.
    """

    def __init__(
        self,
        backbone: str = "resnet18",
        num_hidden: int = 512,
        num_outputs: int = 2048,
        momentum: float = 0.99,
        lr: float = 0.03,
    ) -> None:
        super().__init__()
        self.momentum, self.lr = momentum, lr
        resnet = models.get_model(backbone, weights=None)
        num_features = resnet.fc.in_features
        resnet.fc = nn.Identity()
        head = DINOProjectionHead(num_features, num_hidden, 64, num_outputs)
        self.student = nn.Sequential(OrderedDict(backbone=resnet, head=head))
        teacher = OrderedDict(
            backbone=deepcopy(resnet),
            head=DINOProjectionHead(num_features, num_hidden, 64, num_outputs),
        )
        self.teacher = nn.Sequential(teacher).requires_grad_(requires_grad=False)
        self.teacher.load_state_dict(self.student.state_dict())
        self.criterion = DINOLoss(num_outputs)  # with the centre of the teacher's outputs

    def training_step(self, batch: tuple[list[Tensor], Tensor]) -> Tensor:
        """Each small crop and each large one against each other large one."""
        num_steps = int(self.trainer.estimated_stepping_batches)
        momentum = cosine_schedule(self.global_step, num_steps, self.momentum, 1.0)
        update_momentum(self.student, self.teacher, m=momentum)
        crops, _ = batch
        students = [self.student(crop) for crop in crops]
        with torch.no_grad():
            teachers = [self.teacher(crop) for crop in crops[:NUM_LARGE]]
        loss: Tensor = self.criterion(teachers, students)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        trained = [p for p in self.student.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr, momentum=0.9, weight_decay=1e-4)


class Crops(Loaders):
    """Two large crops and some small ones of each picture.

    Args:
        dataset: As in ``Loaders``.
        root: As in ``Loaders``.
        size: Height and width of a large crop; a small one has half of it.
        batch_size: Pictures per step.
        num_workers: Processes that load them.
        num_small: Small crops of each picture.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - those of the loaders, and one more
        self,
        dataset: str = "CIFAR10",
        root: str = "data",
        size: int = 32,
        batch_size: int = 256,
        num_workers: int = 0,
        num_small: int = 4,
    ) -> None:
        super().__init__(dataset, root, size, batch_size, num_workers)
        self.num_small = num_small

    def transform(self) -> Transform:
        """DINO's, without blur, which small pictures do not survive."""
        return DINOTransform(
            global_crop_size=self.size,
            local_crop_size=self.size // 2,
            n_local_views=self.num_small,
            gaussian_blur=(0.0, 0.0, 0.0),
        )


def module_and_data() -> tuple[DINO, Crops]:
    """For ``tspipe plan`` and ``tspipe check``: ResNet-18, bundled pictures of 64 pixels."""
    return DINO(), Crops("digits", size=64, batch_size=16, num_small=2)


if __name__ == "__main__":
    run(DINO, Crops)
