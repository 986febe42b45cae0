"""The network that ``compression.py`` has made, trained on labels as an ordinary pipeline.

``python examples/compression_finetune.py --fast`` trains for some steps over two CPU processes;
``python examples/compression_finetune.py fit --config examples/configs/compression_finetune.yaml``
begins with the checkpoint of a compression.
"""

from __future__ import annotations

import torch
from compression import Compression
from lightning.pytorch import LightningModule
from pictures import LabelledLoaders
from running import run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class FineTuned(LightningModule):
    """The student of a compression, with the teacher's head.

    Args:
        checkpoint: Of the compression; None: it has learned nothing.
        num_classes: Classes.
        lr: Of SGD.
    """

    def __init__(
        self, checkpoint: str | None = None, num_classes: int = 10, lr: float = 0.01
    ) -> None:
        super().__init__()
        compression = Compression(num_classes=num_classes)
        if checkpoint is not None:
            state = torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]
            compression.load_state_dict(state)
        head = compression.head.requires_grad_(requires_grad=True)
        self.student = nn.Sequential(*compression.student, *head)
        self.lr = lr

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


if __name__ == "__main__":
    run(FineTuned, LabelledLoaders)
