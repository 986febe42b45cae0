"""Mean teacher on Ray Train: each worker of a ``TorchTrainer`` has some stages of the networks.

``python examples/ray_train.py --fast`` trains for some steps in two CPU workers of a local Ray
cluster. On a cluster of GPUs, ``ray job submit --working-dir examples -- python ray_train.py
--workers 4 --use-gpu --storage s3://bucket/runs`` trains on CIFAR-10 with 4000 labels. A worker
that fails, or a node that goes, costs what came after the last epoch.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ray
import ray.train
from lightning.pytorch import Trainer, seed_everything
from mean_teacher import MeanTeacher, SemiSupervised
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback
from ray.train.torch import TorchTrainer

from lightning_tspipe.integrations.ray import RayTSPipeStrategy, prepare_trainer

FAST = {
    "model": {"ramp_up": 4},
    "data": {"dataset": "digits", "size": 32, "num_labels": 200, "batch_size": 16},
    "trainer": {"max_epochs": 2, "limit_train_batches": 2, "limit_val_batches": 1},
}
FULL: dict[str, Any] = {
    "model": {},
    "data": {"num_workers": 4},
    "trainer": {"max_epochs": 200, "precision": "bf16-mixed"},
}


def train(config: dict[str, Any]) -> None:
    """Train, in each worker; after a failure from the last checkpoint that was reported.

    Args:
        config: Arguments of the module, the data, the strategy and the Trainer.
    """
    seed_everything(0)
    trainer = Trainer(
        strategy=RayTSPipeStrategy(**config["strategy"]),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        accelerator="auto",  # Ray's
        logger=False,
        enable_checkpointing=False,  # the callback saves, and Ray keeps what it saves
        enable_progress_bar=False,
        **config["trainer"],
    )
    trainer = prepare_trainer(trainer)
    module, data = MeanTeacher(**config["model"]), SemiSupervised(**config["data"])
    checkpoint = ray.train.get_checkpoint()
    with checkpoint.as_directory() if checkpoint else nullcontext() as folder:
        path = str(Path(folder, RayTrainReportCallback.CHECKPOINT_NAME)) if folder else None
        trainer.fit(module, data, ckpt_path=path)


def main() -> None:
    """Start the workers, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="some steps, in a local cluster")
    parser.add_argument("--workers", type=int, default=2, help="ranks")
    parser.add_argument("--stages", type=int, help="ranks of a pipeline; all of them")
    parser.add_argument("--use-gpu", action="store_true", help="one for each worker")
    parser.add_argument("--storage", default="runs", help="a folder or URL for checkpoints")
    given = parser.parse_args()
    if given.fast:
        ray.init(num_cpus=given.workers, include_dashboard=False)
    else:
        ray.init()  # the cluster that this job belongs to
    storage = given.storage if "://" in given.storage else str(Path(given.storage).resolve())
    result = TorchTrainer(
        train,
        train_loop_config={
            **(FAST if given.fast else FULL),
            "strategy": {"num_stages": given.stages},
        },
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=given.use_gpu),
        run_config=RunConfig(
            name="ray_train",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=2),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    print(f"metrics: {result.metrics}")
    print(f"checkpoint: {result.checkpoint}")
    ray.shutdown()


if __name__ == "__main__":
    main()
