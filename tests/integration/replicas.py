"""Trainings in several replicas of a pipeline, as functions that run on every rank of a job."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from lightning.pytorch import Callback
from pytorch_lightning import Callback as OtherCallback
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchmetrics.classification import MulticlassAccuracy

from lightning_tspipe import (
    DelayedTeacherUpdate,
    KNNEvaluator,
    PipelineThroughputMonitor,
    PipelineTimeline,
)
from tests.exactness.modules import MOMENTUM, NUM_CLASSES, images, labels, make_epochs
from tests.integration.trainings import (
    Epochs,
    Session,
    Trained,
    Training,
    Unsized,
)


@dataclass
class TrainedShare(Trained):
    """What a rank knows at the end of a training in replicas.

    Attributes:
        optimizer: State of the optimizer; {} except on rank 0.
        world_size: Of the Trainer.
        notes: What a test wants to know besides.
    """

    optimizer: dict[str, Any] = field(default_factory=dict)
    world_size: int = 0
    notes: dict[str, Any] = field(default_factory=dict)


class OptimizerAtEnd(Callback, OtherCallback):
    """Collects the optimizer's state while the stages are still in place."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.state = trainer.strategy.optimizer_state(trainer.optimizers[0])


class Look(Callback, OtherCallback):
    """What the module has seen in the end, and which part of the data it was given."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        sampler = getattr(trainer.train_dataloader, "sampler", None)
        is_part = isinstance(sampler, DistributedSampler)
        part = is_part and (sampler.rank, sampler.num_replicas)
        self.notes = {"seen": pl_module.seen, "part": part}


UNREDUCED = ".*sync_dist=True.*"
"""Advice of Lightning's that is right and not wanted here."""


def place(training: Training) -> tuple[int, int]:
    """This rank's replica, and the number of replicas."""
    size = training.options.get("num_stages", training.num_ranks)
    return int(os.environ.get("LOCAL_RANK", "0")) // size, training.num_ranks // size


def share_of(batch: Any, index: int, number: int) -> Any:
    """One replica's samples of a batch."""

    def part(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.ndim == 0:
            return leaf
        assert len(leaf) % number == 0
        size = len(leaf) // number
        return leaf[index * size : (index + 1) * size]

    return pytree.tree_map(part, batch)


def fit(
    training: Training,
    data: Callable[[Any], Any],
    *callbacks: Any,
    validation: Any = None,
    change: Callable[[Any], None] | None = None,
) -> TrainedShare:
    """Train, and tell what this rank has then.

    Args:
        training: What is trained.
        data: Makes this replica's loader, from the module.
        callbacks: Beside those of the training.
        validation: A loader.
        change: Changes the module.
    """
    optimizer = OptimizerAtEnd()
    it = Session(training, optimizer, *callbacks, change=change, ignored=[UNREDUCED])
    it.fit(data(it.module), validation)
    return TrainedShare(
        **vars(it.trained), optimizer=optimizer.state, world_size=it.trainer.world_size
    )


def shares_of(training: Training) -> Callable[[Any], Epochs]:
    """Makes the loader of this replica's samples of each batch."""
    index, number = place(training)

    def share(module: Any) -> Epochs:
        epochs = make_epochs(module, training.sizes)
        return Epochs([[share_of(batch, index, number) for batch in epoch] for epoch in epochs])

    return share


def train_share(training: Training) -> TrainedShare:
    """Every replica trains on its share of each batch."""
    return fit(training, shares_of(training))


def train_unequal(training: Training) -> TrainedShare:
    """The second replica has a batch less."""
    index, _ = place(training)
    return fit(
        training, lambda m: Epochs([epoch[index:] for epoch in make_epochs(m, training.sizes)])
    )


def train_unequal_unsized(training: Training) -> TrainedShare:
    """The same, and nobody knows in advance."""
    index, _ = place(training)
    return fit(training, lambda m: Unsized([make_epochs(m, training.sizes)[0][index:]]))


def tap_delayed() -> list[Any]:
    return [DelayedTeacherUpdate(teacher=["backbone_momentum", "head_momentum"])]


# Losses over all replicas


def with_gathering(module: Any) -> None:
    """SimCLR whose negatives come from all replicas."""
    from lightly.loss import NTXentLoss  # noqa: PLC0415 - a machine with GPUs may lack it

    criterion = NTXentLoss(gather_distributed=True)

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = criterion(*(module.net(view) for view in batch))
        module.log("train_loss", loss.detach(), batch_size=1, sync_dist=True)
        return loss

    module.training_step = training_step


def with_all_gather(module: Any) -> None:
    """The same with Lightning's own way to gather, one loss over everything."""

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        views = torch.stack([F.normalize(module.net(view)) for view in batch])
        everywhere = module.all_gather(views, sync_grads=True)
        if everywhere.ndim > views.ndim:
            everywhere = torch.cat(tuple(everywhere), dim=1)
        first, second = everywhere
        return F.cross_entropy(first @ second.T / 0.5, torch.arange(len(first)))

    module.training_step = training_step


def with_dino_loss(module: Any) -> None:
    """lightly's loss, whose centre is averaged over all processes."""
    from lightly.loss import DINOLoss  # noqa: PLC0415 - as above
    from lightly.models.utils import update_momentum  # noqa: PLC0415

    module.criterion = DINOLoss(output_dim=6)

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        update_momentum(module.student, module.teacher, m=MOMENTUM)
        teachers = [module.teacher(view) for view in batch[:2]]
        students = [module.student(view) for view in batch]
        loss: Tensor = module.criterion(teachers, students, epoch=1)
        return loss

    module.training_step = training_step


# Loaders of torch, validation, metrics


def add_validation(module: Any) -> None:
    """Averages of each kind, and a hook that gathers."""
    module.accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
    module.seen = []

    def validation_step(batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = module.net(x)
        module.accuracy(logits, y)
        module.log("val_accuracy", module.accuracy, batch_size=len(y))
        module.log("val_loss", F.cross_entropy(logits, y), sync_dist=True, batch_size=len(y))
        module.log("val_samples", float(len(y)), sync_dist=True, reduce_fx="sum")

    def on_validation_epoch_end() -> None:
        gathered = module.all_gather(torch.tensor(float(module.trainer.global_rank)))
        module.seen.append(gathered.tolist())

    module.validation_step = validation_step
    module.on_validation_epoch_end = on_validation_epoch_end


def dataset(size: int, seed: int) -> TensorDataset:
    return TensorDataset(images(size, seed), labels(size, seed))


def of_both_replicas(data: TensorDataset, batch_size: int, num_epochs: int) -> Epochs:
    """What two replicas read together, in the order of Lightning's sampler."""
    samplers: list[Any] = [DistributedSampler(data, 2, replica) for replica in range(2)]
    epochs = []
    for epoch in range(num_epochs):
        orders = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
        starts = range(0, len(orders[0]), batch_size)
        epochs.append([data[[n for o in orders for n in o[i : i + batch_size]]] for i in starts])
    return Epochs(epochs)


def train_on_loaders(training: Training) -> TrainedShare:
    """With ordinary loaders, which Lightning splits."""
    _, number = place(training)
    data, num_epochs = dataset(16, 1), training.trainer["max_epochs"]
    train = of_both_replicas(data, 2, num_epochs) if number == 1 else DataLoader(data, 2)
    validation = DataLoader(dataset(12, 2), 4 // number)
    knn = KNNEvaluator(dataset(12, 3), dataset(10, 4), features="net", k=3, batch_size=5)
    look = Look()
    trained = fit(
        training, lambda _: train, knn, look, validation=validation, change=add_validation
    )
    trained.notes = look.notes
    return trained


def validate(training: Training) -> Any:
    """Without a fit; every replica starts with other weights."""
    it = Session(training, ignored=[UNREDUCED, "Using `DistributedSampler` with the dataloaders"])
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        for parameter in it.module.parameters():
            torch.nn.init.zeros_(parameter)
    add_validation(it.module)
    _, number = place(training)
    return it.validate(DataLoader(dataset(12, 2), 4 // number))


def train_observed(training: Training) -> TrainedShare:
    """With the callbacks that measure."""
    monitor = PipelineThroughputMonitor(window=2, length_fn=lambda batch: int(batch[1].sum()))
    timeline = PipelineTimeline(1, 3, path=".")
    trained = fit(training, shares_of(training), monitor, timeline)
    trained.notes = monitor.summary()
    return trained


class Untouched(nn.Module):
    """Parameters that only some batches reach."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Parameter(torch.ones(2))
        self.never = nn.Parameter(torch.ones(3))


def with_rare_parameters(module: Any) -> None:
    """The loss reads a parameter in batches of one replica only, and another one never."""
    module.rare = Untouched()
    step = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = step(batch, batch_idx)
        if int(os.environ.get("LOCAL_RANK", "0")) != 0:
            loss = loss + module.rare.sometimes.square().sum()
        return loss

    module.training_step = training_step
