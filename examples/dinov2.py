"""DINOv2 (Oquab et al., 2023): crops of two sizes, masked patches, and, if wanted, a Gram teacher.

``python examples/dinov2.py --fast`` trains it for some steps over two CPU processes,
``python examples/dinov2.py fit --config examples/configs/dinov2.yaml`` on CIFAR-10. With
``--model.gram 1.0`` a second teacher, which is frozen, keeps the similarities of patches as they
were (Gram anchoring of DINOv3, Simeoni et al., 2025).
"""

from __future__ import annotations

from copy import deepcopy

import torch
from dino import NUM_LARGE, Crops
from lightly.loss import DINOLoss, IBOTPatchLoss, KoLeoLoss
from lightly.models.modules import DINOv2ProjectionHead, MaskedVisionTransformerTorchvision
from lightly.models.utils import random_block_mask, update_momentum
from lightly.utils.scheduler import cosine_schedule
from lightning.pytorch import LightningModule
from running import run
from torch import Tensor
from torch.nn.functional import mse_loss, normalize
from torchvision.models import VisionTransformer


class DINOv2(LightningModule):
    """DINOv2 with lightly's masked ViT; the strategy finds out what is trained, and what is not.

    Args:
        size: Height and width of the large crops.
        patch_size: Of the ViT.
        width: Of the ViT.
        num_layers: Of the ViT.
        num_heads: Of its attention.
        num_hidden: Width of the heads.
        num_outputs: Dimensions of the distributions that are compared.
        momentum: Of the teacher at the start; it grows to 1 on a cosine.
        lr: Of AdamW.
        gram: Weight of the Gram loss; 0: without its teacher.
        weights: File of a checkpoint of an earlier training, to go on from; its teacher becomes the
            Gram teacher too.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - settings by keyword
        self,
        size: int = 32,
        patch_size: int = 4,
        width: int = 192,
        num_layers: int = 12,
        num_heads: int = 3,
        num_hidden: int = 512,
        num_outputs: int = 2048,
        momentum: float = 0.992,
        lr: float = 1e-3,
        gram: float = 0.0,
        weights: str = "",
    ) -> None:
        super().__init__()
        self.momentum, self.lr, self.gram = momentum, lr, gram
        vit = VisionTransformer(size, patch_size, num_layers, num_heads, width, 4 * width)
        self.grid = size // patch_size
        self.student_backbone = MaskedVisionTransformerTorchvision(vit)
        # One head for whole crops and for patches.
        self.student_head = DINOv2ProjectionHead(width, num_hidden, 64, num_outputs)
        self.teacher_backbone = deepcopy(self.student_backbone).requires_grad_(False)
        self.teacher_head = DINOv2ProjectionHead(width, num_hidden, 64, num_outputs)
        self.teacher_head.load_state_dict(self.student_head.state_dict())
        self.teacher_head.requires_grad_(requires_grad=False)
        self.dino, self.ibot = DINOLoss(num_outputs), IBOTPatchLoss(num_outputs)
        self.koleo = KoLeoLoss()
        if weights:
            state = torch.load(weights, map_location="cpu", weights_only=True)["state_dict"]
            self.load_state_dict(state, strict=False)  # it may have had no Gram teacher
        if gram:
            self.gram_teacher = deepcopy(self.teacher_backbone)

    def training_step(self, batch: tuple[list[Tensor], Tensor]) -> Tensor:
        """DINO's loss between crops, iBOT's between patches, KoLeo's between samples."""
        crops, _ = batch
        large, small = torch.cat(crops[:NUM_LARGE]), torch.cat(crops[NUM_LARGE:])
        patches = (len(large), self.grid, self.grid)
        blocks = random_block_mask(patches, min_num_masks_per_block=1, device=large.device)
        mask = torch.cat([blocks.new_zeros(len(large), 1), blocks.flatten(1)], dim=1)
        with torch.no_grad():
            expected = self.teacher_backbone.encode(large)
            teacher = self.teacher_head(expected[:, 0]).chunk(NUM_LARGE)
            teacher_patches = self.teacher_head(expected[mask])
        masked = self.student_backbone.encode(large, mask=mask)
        whole = self.student_backbone.encode(small)
        tokens = torch.cat([masked[:, 0], whole[:, 0]])
        loss: Tensor = self.dino(teacher, self.student_head(tokens).chunk(len(crops)))
        loss = loss + self.ibot(teacher_patches, self.student_head(masked[mask]), blocks)
        loss = loss + 0.1 * sum(self.koleo(view) for view in masked[:, 0].chunk(NUM_LARGE))
        if self.gram:
            with torch.no_grad():
                anchors = self.gram_teacher.encode(large)
            loss = loss + self.gram * mse_loss(similarities(masked), similarities(anchors))
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        """The teacher follows, on every rank; what draws masks runs only where the data is."""
        num_steps = int(self.trainer.estimated_stepping_batches)
        momentum = cosine_schedule(self.global_step, num_steps, self.momentum, 1.0)
        update_momentum(self.student_backbone, self.teacher_backbone, m=momentum)
        update_momentum(self.student_head, self.teacher_head, m=momentum)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.lr, weight_decay=0.04)


def similarities(tokens: Tensor) -> Tensor:
    """The cosines between all patches of a crop, ``(batch, patches, patches)``.

    Args:
        tokens: ``(batch, 1 + patches, width)``, the class token first.
    """
    patches = normalize(tokens[:, 1:], dim=-1)
    return patches @ patches.transpose(1, 2)


def module_and_data() -> tuple[DINOv2, Crops]:
    """For ``tspipe plan`` and ``tspipe check``: a small ViT, bundled pictures of 32 pixels."""
    return DINOv2(num_layers=4, gram=1.0), Crops("digits", batch_size=16, num_small=2)


if __name__ == "__main__":
    run(DINOv2, Crops)
