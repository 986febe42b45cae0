"""Fine-tuning of a vision transformer whose layers freeze one after the other (PipeTransformer).

The first layers need no more training than a few epochs: ``FreezeAndRepack`` freezes them, and
``AutoCache`` keeps what they return, so that neither they nor the decoding of pictures are paid for
again. Both are callbacks, in the configuration; this is an ordinary classifier.
``python examples/finetune_vit.py --fast`` trains on bundled pictures, ``python
examples/finetune_vit.py fit --config examples/configs/finetune_vit.yaml`` fine-tunes torchvision's
ViT-B/16 on CIFAR-100.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from pictures import LabelledLoaders, Transform, plain
from running import run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from torchvision import models
from torchvision.models import VisionTransformer

from lightning_tspipe.caching import WithIds


class FineTuning(LightningModule):
    """A classifier of pictures.

    Args:
        weights: Name of a torchvision network with its ImageNet weights, such as ``vit_b_16``, to
            start from; None: a small one that has learned nothing.
        size: Height and width of the pictures.
        num_layers: Of the small network.
        width: Of the small network.
        num_classes: Classes.
        lr: Of AdamW.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the settings of the method
        self,
        weights: str | None = None,
        size: int = 32,
        num_layers: int = 6,
        width: int = 96,
        num_classes: int = 10,
        lr: float = 1e-3,
    ) -> None:
        super().__init__()
        self.lr = lr
        if weights is None:
            self.student = VisionTransformer(
                size, size // 4, num_layers, 3, width, 4 * width, num_classes=num_classes
            )
        else:
            self.student = models.get_model(weights, weights="DEFAULT")
            self.student.heads = nn.Sequential(nn.Linear(self.student.hidden_dim, num_classes))

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Cross-entropy; the samples' ids are for the cache."""
        pictures, labels, _ = batch
        loss = cross_entropy(self.student(pictures), labels)
        self.log("loss", loss, prog_bar=True, batch_size=len(labels))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """The accuracy."""
        pictures, labels = batch
        right = self.student(pictures).argmax(dim=1) == labels
        self.log("val_accuracy", right.float().mean(), prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.student.parameters(), lr=self.lr)


class FixedPictures(LabelledLoaders):
    """Pictures that are the same in every epoch, with ids: what frozen layers return is too."""

    def transform(self) -> Transform:
        """No random augmentation, which a cache refuses."""
        return plain(self.size)

    def pictures(self, *, train: bool) -> Dataset[Any]:
        """Only the frozen layers read the pictures: they are decoded while there is no cache."""
        pictures = super().pictures(train=train)
        return WithIds(pictures, inputs=0) if train else pictures


def module_and_data() -> tuple[FineTuning, FixedPictures]:
    """For ``tspipe plan`` and ``tspipe check``: a small ViT, bundled pictures."""
    return FineTuning(), FixedPictures("digits", batch_size=16)


if __name__ == "__main__":
    run(FineTuning, FixedPictures)
