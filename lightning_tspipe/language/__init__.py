"""Language models as teachers and students: their loss, and their weights."""

from __future__ import annotations

from lightning_tspipe.language.distillation import DistillationLoss, DistillationOutput
from lightning_tspipe.language.pretrained import load_pretrained, pretrained

__all__ = ["DistillationLoss", "DistillationOutput", "load_pretrained", "pretrained"]
