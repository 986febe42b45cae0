"""How good a backbone is in the end: k-NN over many more images than the curves ask about."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from benchmarks.accuracy.data import images, plain
from benchmarks.accuracy.tasks import NETWORKS
from lightning_tspipe.evaluation import knn_evaluation

NUM_IMAGES = 10_000
"""In the bank, and as many queries: the whole test set. Of the curves' 1,000 queries, a deviation
of 0.014 is chance."""


def final_knn(task: str, weights: Path, folder: Path) -> float:
    """Top-1 accuracy of a student's backbone.

    Args:
        task: Name of the task.
        weights: The student's, as a run left them.
        folder: Images, with ``train/`` and ``test/``.
    """
    module = NETWORKS[task](1)
    module.get_submodule("student").load_state_dict(torch.load(weights))
    bank, queries = _images(folder / "train"), _images(folder / "test")
    return knn_evaluation(module.eval(), bank, queries, "student.backbone")["knn_top1"]


@cache
def _images(folder: Path) -> TensorDataset:
    return plain(*images(folder, NUM_IMAGES))
