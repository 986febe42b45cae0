"""The Trainer's loops and schedules: each argument does what it does on one device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, Timer
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset

from lightning_tspipe import DelayedTeacherUpdate
from tests.exactness.modules import make_epochs
from tests.integration.comparing import alone, both, labelled
from tests.integration.jobs import run, run_job
from tests.integration.trainings import (
    CLOSE,
    Epochs,
    Session,
    Trained,
    Training,
    build_module,
    delayed,
    trainer_of,
)


class Journal(Callback):
    """When what happened, and with which learning rate."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    def _note(self, name: str, trainer: Any) -> None:
        self.entries.append((name, trainer.current_epoch, trainer.global_step))

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._note("epoch", trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self._note(f"batch {rates}", trainer)

    def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self._note("validation batch", trainer)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._note("validation", trainer)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._note("end", trainer)


@dataclass
class Run:
    """What a rank knows after a fit."""

    trained: Trained
    entries: list[Any]


def validate_views(module: Any) -> None:
    def step(batch: Any, batch_idx: int) -> None:
        module.log("val_loss", module.student(batch[0]).square().mean())

    module.validation_step = step


def fit_one(training: Training, **loaders: Any) -> Run:
    journal = Journal()
    it = Session(
        training, journal, change=validate_views,
        # Advice about what these tests ask for.
        ignored=["Anomaly Detection has been enabled",
                 ".*self.log\\(\\).* is disabled|.*logging is not conf"],
    )  # fmt: skip
    loaders = loaders or {"train_dataloaders": it.loader, "val_dataloaders": labelled(50)}
    if training.trainer.get("reload_dataloaders_every_n_epochs"):
        epochs = make_epochs(it.module, training.sizes)
        it.module.train_dataloader = lambda: Epochs(epochs[it.trainer.current_epoch :])
        it.module.val_dataloader = lambda: labelled(50 + it.trainer.current_epoch)
        loaders = {}
    it.trainer.fit(it.module, **loaders)
    return Run(it.trained, journal.entries)


def fit_each(trainings: list[Training]) -> list[Run]:
    return [fit_one(training) for training in trainings]


def assert_same(theirs: Run, ours: list[Run], name: str) -> None:
    torch.testing.assert_close(ours[0].trained.losses, theirs.trained.losses, **CLOSE, msg=name)
    torch.testing.assert_close(ours[0].trained.weights, theirs.trained.weights, **CLOSE, msg=name)
    for rank in ours:
        assert rank.entries == theirs.entries, name
        assert rank.trained.metrics == pytest.approx(theirs.trained.metrics, rel=1e-9), name
        assert rank.trained.global_step == theirs.trained.global_step, name


def stops_early() -> list[Any]:
    return [DelayedTeacherUpdate(), EarlyStopping("val_loss", patience=1, min_delta=10.0)]


def accumulates_later() -> list[Any]:
    return [DelayedTeacherUpdate(), GradientAccumulationScheduler({0: 1, 1: 2})]


BYOL = Training(
    "Byol-group-2-by hand", "instance", {"num_microbatches": 1}, callbacks=delayed,
    optimizer="adamw", sizes=((4, 4, 3, 2), (4, 4, 3, 2)),
)  # fmt: skip

INTERVALS: dict[str, dict[str, Any]] = {
    "limits": {"limit_train_batches": 3, "limit_val_batches": 1, "num_sanity_val_steps": 2},
    "fractions": {"limit_train_batches": 0.5, "limit_val_batches": 0.7, "max_epochs": 3},
    "sanity": {"num_sanity_val_steps": -1, "max_epochs": 1},
    "every second batch": {"val_check_interval": 2},
    "twice an epoch": {"val_check_interval": 0.5},
    "every second epoch": {"check_val_every_n_epoch": 2, "max_epochs": 4},
    "across epochs": {"val_check_interval": 3, "check_val_every_n_epoch": None},
    "steps": {"max_steps": 5, "max_epochs": -1},
    "no validation": {"limit_val_batches": 0},
}
MODES: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05},
    "clipped": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "overfit": {"overfit_batches": 2},
    "dry run": {"fast_dev_run": 2},
    "anomalies": {"detect_anomaly": True, "max_epochs": 1},
    "no inference mode": {"inference_mode": False},
    "no sampler": {"use_distributed_sampler": False},
    "profiler": {"profiler": "simple", "max_epochs": 1},
    "deterministic": {"deterministic": True, "max_epochs": 1},
    "benchmark": {"benchmark": True, "min_steps": 6, "max_epochs": 1, "min_epochs": None},
    "bare": {"barebones": True, "log_every_n_steps": None},
    "reloaded": {"reload_dataloaders_every_n_epochs": 1, "num_sanity_val_steps": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "group",
    [INTERVALS, MODES],
    ids=["intervals", "modes"],
)
def test_arguments_of_the_trainer(group: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    trainings = {name: replace(BYOL, trainer=arguments) for name, arguments in group.items()}
    if group is INTERVALS:
        trainings["early"] = replace(
            BYOL, callbacks=stops_early, trainer={"min_epochs": 3, "max_epochs": 6}
        )
    else:
        trainings["accumulated later"] = replace(BYOL, callbacks=accumulates_later)
    singles = [alone(training) for training in trainings.values()]
    expected = run(fit_each, singles, num_ranks=1, folder=tmp_path)[0]
    results = run(fit_each, list(trainings.values()), num_ranks=2, folder=tmp_path)
    for index, name in enumerate(trainings):
        assert_same(expected[index], [rank[index] for rank in results], name)
    stopped = {name: run.trained.global_step for name, run in zip(trainings, expected, strict=True)}
    if group is INTERVALS:
        assert stopped["early"] == 12
        assert stopped["steps"] == 5


def schedule(kind: str) -> Any:
    return _Schedule(kind)


class _Schedule:
    """Gives a module an optimizer with a scheduler."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, module: Any) -> None:
        def configure() -> Any:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            return {"optimizer": optimizer, "lr_scheduler": self._config(module, optimizer)}

        module.configure_optimizers = configure

    def _config(self, module: Any, optimizer: Any) -> dict[str, Any]:
        steps = module.trainer.estimated_stepping_batches
        plateau = {"factor": 0.5, "patience": 0, "threshold": 10.0}
        made: dict[str, dict[str, Any]] = {
            "step": {"scheduler": lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"},
            "epoch": {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.5)},
            "whole": {
                "scheduler": lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=int(steps)),
                "interval": "step",
            },
            "second epoch": {"scheduler": lr_scheduler.StepLR(optimizer, 1, 0.1), "frequency": 2},
        }
        if self._kind in made:
            return made[self._kind]
        monitor, interval = self._kind.split()
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, **plateau)  # type: ignore[arg-type]
        return {"scheduler": scheduler, "monitor": monitor, "interval": interval}


KINDS = ("step", "epoch", "whole", "second epoch", "val_loss epoch", "train_loss epoch",
         "train_loss step")  # fmt: skip


@pytest.mark.slow
def test_learning_rate_schedules(tmp_path: Path) -> None:
    trainings = [replace(BYOL, change=schedule(kind)) for kind in KINDS]
    expected = run(fit_each, [alone(t) for t in trainings], num_ranks=1, folder=tmp_path)[0]
    results = run(fit_each, trainings, num_ranks=2, folder=tmp_path)
    for index, kind in enumerate(KINDS):
        assert_same(expected[index], [rank[index] for rank in results], kind)
        rates = {name for name, _, _ in expected[index].entries if name.startswith("batch")}
        assert len(rates) > 1, kind


class Stream(IterableDataset[Any]):
    """Batches of unknown number."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return iter(self._batches)


def fit_streams(training: Training) -> Run:
    batches = make_epochs(build_module(training), training.sizes)[0]
    return fit_one(
        training,
        train_dataloaders=DataLoader(Stream(batches), batch_size=None),
        val_dataloaders=DataLoader(Stream([labelled(50)._epochs[0][0]]), batch_size=None),
    )


@pytest.mark.parametrize("arguments", [{"val_check_interval": 2, "limit_train_batches": 3}, {}])
def test_streams_of_unknown_length(arguments: dict[str, Any], tmp_path: Path) -> None:
    expected, results = both(fit_streams, replace(BYOL, trainer=arguments), tmp_path)
    assert_same(expected, results, "stream")


def fit_shuffled(training: Training) -> Run:
    batches = make_epochs(build_module(training), training.sizes)[0]
    order = torch.Generator().manual_seed(3)
    loader: DataLoader[Any] = DataLoader(batches, batch_size=None, shuffle=True, generator=order)
    return fit_one(training, train_dataloaders=loader, val_dataloaders=labelled(50))


def test_epochs_are_shuffled_as_on_one_device(tmp_path: Path) -> None:
    # A sampler that is asked for more than the epoch's batches draws from the loader's generator.
    training = replace(BYOL, trainer={"max_epochs": 3})
    expected, results = both(fit_shuffled, training, tmp_path)
    assert_same(expected, results, "shuffled")


class Data(LightningDataModule):
    """A data module with everything that one may have."""

    def __init__(self, module: Any, sizes: Any) -> None:
        super().__init__()
        self._batches = make_epochs(module, sizes)
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self) -> Any:
        return Epochs(self._batches)

    def val_dataloader(self) -> Any:
        return labelled(50)

    def predict_dataloader(self) -> Any:
        return labelled(50)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("before")
        if isinstance(batch, dict):
            batch = {**batch, "views": [view * 2 for view in batch["views"]]}
        return batch

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.calls.append("transfer")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("after")
        if isinstance(batch, dict):
            return {**batch, "views": [view + 0.1 for view in batch["views"]]}
        return [batch[0] + 0.1, batch[1]]


def fit_data_module(training: Training) -> tuple[Run, list[str], Any]:
    journal = Journal()
    it = Session(training, journal, change=validate_views)
    it.module.predict_step = lambda batch, batch_idx: it.module.teacher(batch[0])
    data = Data(it.module, training.sizes)
    it.fit(datamodule=data)
    predicted = it.trainer.predict(it.module, datamodule=data)
    return Run(it.trained, journal.entries), data.calls, predicted


def test_a_data_module_and_its_transfer_hooks(tmp_path: Path) -> None:
    expected, results = both(fit_data_module, BYOL, tmp_path)
    assert_same(expected[0], [run for run, _, _ in results], "data module")
    torch.testing.assert_close(results[0][2], expected[2], **CLOSE)
    loss, data = (calls for _, calls, _ in results)
    # The data rank transfers each batch once, also those that it holds in advance.
    assert sorted(data) == sorted(call for call in expected[1] if call != "prepare")
    assert [call for call in loss if call in {"before", "transfer", "after"}] == []
    assert [call for call in loss if call != "prepare"] == [
        call for call in data if call not in {"before", "transfer", "after"}
    ]


class Clock(Callback):
    def __init__(self) -> None:
        self.left: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        timer = next(c for c in trainer.callbacks if isinstance(c, Timer))
        self.left.append(timer.time_remaining() or 0.0)


def fit_for_a_second(training: Training) -> tuple[int, float]:
    clock = Clock()
    return Session(training, clock).fit().trainer.global_step, clock.left[-1]


def test_a_time_limit(tmp_path: Path) -> None:
    arguments = {"max_time": {"seconds": 1}, "max_epochs": -1}
    steps, left = zip(
        *run(fit_for_a_second, replace(BYOL, trainer=arguments), folder=tmp_path), strict=True
    )
    assert len(set(steps)) == 1
    assert min(left) <= 0


def find_rate(training: Training) -> Any:
    it = Session(training)
    it.module.lr = 1e-3

    def configure() -> Any:
        return torch.optim.SGD(it.module.parameters(), lr=it.module.lr)

    it.module.configure_optimizers = configure
    finder = Tuner(it.trainer).lr_find(
        it.module, it.loader, min_lr=1e-4, max_lr=1.0, num_training=16, early_stop_threshold=None
    )
    assert finder is not None
    it.fit()
    return finder.results, it.module.lr, it.recorder.losses, it.module.state_dict()


def test_the_learning_rate_finder(tmp_path: Path) -> None:
    training = replace(BYOL, case="Classifier-group", callbacks=list, sizes=((4,) * 6,) * 3)
    expected, results = both(find_rate, training, tmp_path)
    assert expected[1] != 1e-3
    for found, rate, _, _ in results:
        assert found["lr"] == pytest.approx(expected[0]["lr"])
        assert found["loss"] == pytest.approx(expected[0]["loss"], rel=1e-9)
        assert rate == expected[1]
    torch.testing.assert_close(results[0][2], expected[2], **CLOSE)
    torch.testing.assert_close(results[0][3], expected[3], **CLOSE)


def scale_batch(training: Training) -> None:
    _scale_batch(training)


def scale_batch_of_validation(training: Training) -> None:
    _scale_batch(training, method="validate")


def _scale_batch(training: Training, **arguments: Any) -> None:
    module = build_module(training)
    module.validation_step = module.training_step
    module.val_dataloader = lambda: labelled(0)
    module.batch_size = 2
    module.train_dataloader = lambda: labelled(0)
    trainer = trainer_of(training, module)
    Tuner(trainer).scale_batch_size(module, **arguments)


def validate_by_the_clock(training: Training) -> None:
    fit_one(replace(training, trainer={"val_check_interval": "00:00:00:01"}))


def synchronise_norms(training: Training) -> None:
    fit_one(replace(training, trainer={"sync_batchnorm": True}))


def stop_in_the_step(training: Training) -> None:
    it = Session(training)
    step = it.module.training_step

    def stopping(batch: Any, batch_idx: int) -> Tensor:
        loss = step(batch, batch_idx)
        if batch_idx == 2:
            it.trainer.should_stop = True
        return loss

    it.module.training_step = stopping
    it.fit()


def write_into_the_optimizer(training: Training) -> None:
    it = Session(training)
    step = it.module.training_step

    def changing(batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            it.module.optimizers().param_groups[0]["lr"] *= 0.5
        return step(batch, batch_idx)

    it.module.training_step = changing
    it.fit()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (scale_batch, "it tries batch sizes until one rank runs out of memory"),
        (scale_batch_of_validation, "BatchSizeFinder does not work under a pipeline"),
        (validate_by_the_clock, "each rank would look at its own clock"),
        (synchronise_norms, "sync_batchnorm=True has nothing to synchronise"),
        (stop_in_the_step, "training_step set trainer.should_stop"),
        (write_into_the_optimizer, "training_step changed the learning rate"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refused(function: Any, words: str, tmp_path: Path) -> None:
    job = run_job(function, BYOL, folder=tmp_path, seconds=60)
    assert all(rank.exit_code == 1 for rank in job.ranks), job.output
    assert words in job.output
