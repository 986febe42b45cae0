"""Language models as teachers and students: their loss, kept targets, and their weights."""

from __future__ import annotations

from lightning_tspipe.language.distillation import DistillationLoss, DistillationOutput
from lightning_tspipe.language.kept import KeptTargets, WithTargets
from lightning_tspipe.language.perplexity import Perplexity
from lightning_tspipe.language.pretrained import load_pretrained, pretrained
from lightning_tspipe.language.targets import Targets

__all__ = [
    "DistillationLoss",
    "DistillationOutput",
    "KeptTargets",
    "Perplexity",
    "Targets",
    "WithTargets",
    "load_pretrained",
    "pretrained",
]
