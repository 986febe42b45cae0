"""One rank of a real run: a small ViT is fine-tuned on images of 32 pixels.

Started by ``main.py``, once; Lightning starts the other rank of two. Rank 0 writes the result. In
one process the same is trained, without a pipeline: enough where only the accuracy is asked for.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import VisionTransformer
from typing_extensions import override

from lightning_tspipe import AutoCache, FreezeAndRepack, GradientNormFreeze, TSPipeStrategy
from lightning_tspipe.caching import WithIds

METHODS = ("baseline", "freeze", "repack", "cache")
BATCH_SIZE = 64
NUM_CLASSES = 10
ALPHA = 1 / 3
START_EPOCH = 1
"""The earliest; from epoch 3 on too little time is left to be saved."""
LR = 1e-4
"""The best for the baseline, as ``main.py --parts tuning`` found."""
NUM_ACTIVE = 3
"""The last block, norm and head are always trained."""


def vit() -> VisionTransformer:
    """Patches of 4 pixels, eight blocks of width 64; without dropout."""
    return VisionTransformer(
        image_size=32, patch_size=4, num_layers=8, num_heads=4, hidden_dim=64, mlp_dim=256,
        num_classes=NUM_CLASSES,
    )  # fmt: skip


class FineTuned(LightningModule):
    """A classifier.

    Args:
        weights: Of the pretrained network.
        num_steps: Of the whole training.
        lr: At the beginning.
    """

    def __init__(self, weights: dict[str, Tensor], num_steps: int, lr: float) -> None:
        super().__init__()
        self.student = vit()
        self.student.load_state_dict(weights)
        self._num_steps, self._lr = num_steps, lr

    @override
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.student(batch[0]), batch[1], label_smoothing=0.1)

    @override
    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        hits = (self.student(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", hits, batch_size=len(batch[1]), sync_dist=True)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self._lr, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self._num_steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Times(Callback):
    """Seconds from the end of the first step, which sets up, to the end of the last one."""

    def __init__(self) -> None:
        self.start = self.end = 0.0

    @override
    def on_train_batch_end(self, *_: object) -> None:
        self.end = time.perf_counter()
        self.start = self.start or self.end


def main() -> None:
    """Train, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--devices", type=int, default=2, help="1: no pipeline")
    parser.add_argument("--lr", type=float, default=LR)
    parser.add_argument("--test-on", choices=("test", "held"), default="test")
    parser.add_argument("--data", type=Path, required=True, help="what main.py prepared")
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    data = torch.load(options.data)
    times, freezing = Times(), None
    callbacks: list[Any] = [times]
    if options.method != "baseline":
        freezing = FreezeAndRepack(
            GradientNormFreeze(ALPHA, START_EPOCH),
            num_active=NUM_ACTIVE,
            repack=options.method != "freeze",
            cache=AutoCache(memory="1GB") if options.method == "cache" else None,
        )
        callbacks.insert(0, freezing)
    trainer = Trainer(
        accelerator="cpu", devices=options.devices, max_epochs=options.epochs,
        strategy=TSPipeStrategy() if options.devices > 1 else "auto",
        callbacks=callbacks, logger=False, enable_checkpointing=False, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False,
        check_val_every_n_epoch=options.epochs,
    )  # fmt: skip
    train: Any = TensorDataset(*data["train"])
    num_steps = options.epochs * -(-len(train) // BATCH_SIZE)
    trainer.fit(
        FineTuned(data["weights"], num_steps, options.lr),
        DataLoader(WithIds(train), BATCH_SIZE, shuffle=True),
        DataLoader(TensorDataset(*data[options.test_on]), 250),
    )
    if trainer.is_global_zero:
        found = {
            "seconds": times.end - times.start,
            "accuracy": float(trainer.callback_metrics["accuracy"]),
            "history": [] if freezing is None else freezing.history,
        }
        options.result.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
