"""What an optimizer keeps on each rank of 2 x 2 replicas, divided among them or not.

A real training on four processes: ResNet-18 as a student of a frozen teacher, with AdamW.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18
from typing_extensions import override

from lightning_tspipe import TSPipeStrategy

_RANKS, _REPLICAS = 4, 2


class Distillation(LightningModule):
    """A student that learns the outputs of a frozen teacher; notes the state of its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = resnet18(), resnet18().requires_grad_(requires_grad=False)
        self.seen: list[list[int]] = []

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.student(batch[0]), self.teacher(batch[0]))

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.student.parameters())

    @override
    def on_train_end(self) -> None:
        kept = self.optimizers(use_pl_optimizer=False).state.values()  # type: ignore[union-attr]
        values = (value for state in kept for value in state.values())
        own = sum(value.nbytes for value in values if isinstance(value, Tensor))
        parameters = sum(p.nbytes for p in self.student.parameters() if not p.is_meta)
        numbers = torch.tensor([own, parameters])
        found = [torch.zeros_like(numbers) for _ in range(_RANKS)]
        torch.distributed.all_gather(found, numbers)
        self.seen = [each.tolist() for each in found]


def measure(zero_stage: Literal[0, 1]) -> list[list[int]]:
    """Bytes of optimizer state and of the student's parameters, on each rank."""
    torch.manual_seed(0)
    module = Distillation()
    stages = _RANKS // _REPLICAS
    strategy = TSPipeStrategy(num_stages=stages, zero_stage=zero_stage, costs="flops")
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=_RANKS, max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(32, 3, 64, 64)), batch_size=4))
    return module.seen if trainer.is_global_zero else []


def main() -> None:
    """Measure both, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--zero-stage", type=int, choices=(0, 1), required=True)
    parser.add_argument("--json", type=Path, help="add the result to this file")
    options = parser.parse_args()
    found = measure(options.zero_stage)
    if not found:
        return
    path = options.json
    result = json.loads(path.read_text()) if path and path.exists() else {}
    result[f"zero_stage_{options.zero_stage}"] = [
        {"optimizer_state_bytes": own, "student_bytes": whole} for own, whole in found
    ]
    if len(result) > 1:
        ones, others = (
            [rank["optimizer_state_bytes"] for rank in result[f"zero_stage_{stage}"]]
            for stage in (1, 0)
        )
        result["replica_state"] = max(one / other for one, other in zip(ones, others, strict=True))
    print(json.dumps(result, indent=1))
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
