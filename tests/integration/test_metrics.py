"""Logging, metrics and the callbacks that decide by them."""

from __future__ import annotations

import csv
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    RichProgressBar,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboardX.proto.event_pb2 import Event
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from tests.exactness.modules import images
from tests.integration.comparing import both, labelled
from tests.integration.jobs import run
from tests.integration.trainings import (
    Session,
    Training,
)

CLASSIFIER = Training(
    "Classifier-group", "instance", {"num_microbatches": 1}, sizes=((5, 5, 3), (5, 5, 3))
)


def log_everything(module: Any) -> None:
    """``self.log`` in all its forms, in steps and hooks."""

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        logits = module.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        module.log("default", loss)
        module.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        module.log("epoch", loss, on_step=False, on_epoch=True, logger=False)
        module.log("largest", loss, on_epoch=True, reduce_fx="max")
        module.log("sum", loss, on_epoch=True, reduce_fx=torch.sum, sync_dist=True)
        module.log("weighted", loss, on_epoch=True, batch_size=batch_idx + 1)
        module.log("rank zero", loss, rank_zero_only=True)
        module.log("number", batch_idx * 0.5, prog_bar=True)
        module.log("field", batch[1].double().mean(), on_epoch=True)
        module.log_dict({"first": loss, "second": 2 * loss}, on_epoch=True, on_step=False)
        return loss

    def validation_step(batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = F.cross_entropy(module.net(batch[0]), batch[1])
        module.log("val", loss, on_step=True, on_epoch=True, sync_dist=True)
        module.log(f"plain_{dataloader_idx}", loss, add_dataloader_idx=False)

    module.training_step = training_step
    module.validation_step = validation_step
    module.on_train_epoch_end = lambda: module.log("epochs", float(module.current_epoch))
    module.on_validation_epoch_end = lambda: module.log("seen", float(module.global_step))
    module.on_train_batch_start = lambda batch, batch_idx: module.log("start", float(batch_idx))
    module.on_before_zero_grad = lambda optimizer: module.log("zeroed", 1.0, on_epoch=True)


class Bars(Callback):
    """What the progress bar would show."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.shown.append({k: float(v) for k, v in trainer.progress_bar_metrics.items()})


def fit_logging(training: Training) -> Any:
    bars = Bars()
    logger = CSVLogger(".", name="", version="log")
    it = Session(training, bars, change=log_everything, logger=logger)
    it.fit(validation=[labelled(50), labelled(60)])
    logged = {name: float(value) for name, value in it.trainer.logged_metrics.items()}
    return it.trained.metrics, logged, bars.shown


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_every_form_of_log(tmp_path: Path) -> None:
    expected, results = both(fit_logging, CLASSIFIER, tmp_path)
    assert expected[0].keys() >= {"both_step", "both_epoch", "weighted", "val/dataloader_idx_1"}
    for metrics, _, _ in results:
        assert metrics == pytest.approx(expected[0], rel=1e-9)
    assert results[0][1] == pytest.approx(expected[1], rel=1e-9)
    for ours, theirs in zip(results[0][2], expected[2], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)
    theirs, ours = (rows_of(tmp_path / name / "log/metrics.csv") for name in ("alone", "together"))
    assert len(theirs) == len(ours) > 6
    for expected_row, row in zip(theirs, ours, strict=True):
        assert row.keys() == expected_row.keys()
        numbers = {key: float(value) for key, value in expected_row.items() if value}
        assert {k: float(v) for k, v in row.items() if v} == pytest.approx(numbers, rel=1e-6)


def count_with_metrics(module: Any) -> None:
    """Objects of torchmetrics, and lists that steps fill for the hook at the end of the epoch."""
    module.train_acc = MulticlassAccuracy(4)
    module.val = MetricCollection(
        {
            "acc": MulticlassAccuracy(4, average="micro"),
            "top2": MulticlassAccuracy(4, average="micro", top_k=2),
            "recall": MulticlassAccuracy(4),
        }
    )
    module.confusion, module.mean = MulticlassConfusionMatrix(4), MeanMetric()
    module.losses, module.outputs, module.labels, module.best = [], [], [], 0.0

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        logits = module.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        module.train_acc(logits, batch[1])
        module.log("train_acc", module.train_acc, on_step=True, on_epoch=True)
        module.mean.update(loss.detach())
        module.losses.append(loss.detach())
        return loss

    def on_train_epoch_end() -> None:
        module.log("train_mean", module.mean.compute())
        module.log("train_stack", torch.stack(module.losses).mean())
        module.mean.reset()
        module.losses.clear()

    def validation_step(batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        logits = module.net(x)
        module.val.update(logits, y)
        module.log_dict(module.val)
        module.confusion.update(logits, y)
        module.outputs.append({"logits": logits})
        module.labels.append(y)  # not read otherwise
        module.best = max(module.best, float(logits.max()))
        return {"logits": logits}

    def on_validation_epoch_end() -> None:
        logits = torch.cat([output["logits"] for output in module.outputs])
        labels = torch.cat(module.labels)
        module.log("hook_acc", (logits.argmax(1) == labels).double().mean())
        module.log("diagonal", module.confusion.compute().diagonal().sum().double())
        module.log("best", module.best)
        module.confusion.reset()
        module.outputs.clear()
        module.labels.clear()

    module.training_step, module.on_train_epoch_end = training_step, on_train_epoch_end
    module.validation_step = module.test_step = validation_step
    module.on_validation_epoch_end = module.on_test_epoch_end = on_validation_epoch_end


def decides() -> list[Any]:
    return [EarlyStopping("diagonal", mode="max", patience=1, min_delta=100.0),
            EarlyStopping("train_mean", patience=9, check_on_train_epoch_end=True)]  # fmt: skip


def fit_counting(training: Training) -> Any:
    it = Session(training, change=count_with_metrics).fit(validation=labelled(50))
    metrics, epoch = it.trained.metrics, it.trainer.current_epoch
    tested = it.test(labelled(60))
    functions = {m.distributed_available_fn.__name__ for m in it.module.val.values()}
    return metrics, epoch, tested, functions


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_torchmetrics_and_collected_outputs(num_ranks: int, tmp_path: Path) -> None:
    training = replace(
        CLASSIFIER, callbacks=decides, trainer={"num_sanity_val_steps": 1, "max_epochs": 6}
    )
    expected, results = both(fit_counting, training, tmp_path, num_ranks)
    assert expected[1] == 2  # of 6
    for metrics, epoch, tested, functions in results:
        assert metrics == pytest.approx(expected[0], rel=1e-9)
        assert epoch == expected[1]
        assert tested[0] == pytest.approx(expected[2][0], rel=1e-9)
        assert functions == {"jit_distributed_available"}  # as before


class Messages(Callback):
    """Counts what this rank says and asks in each step."""

    def __init__(self) -> None:
        self.counts: list[Counter[str]] = []
        self._now: Counter[str] = Counter()

    def _counting(self, owner: Any, name: str, label: str) -> None:
        function = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._now[label] += 1
            return function(*args, **kwargs)

        setattr(owner, name, counted)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        transport = trainer.strategy.transport
        for name in ("send_object", "receive_object", "send"):
            self._counting(transport, name, name)
        for name in (
            "broadcast", "broadcast_object_list", "all_reduce", "barrier", "monitored_barrier",
            "all_gather", "all_gather_object", "gather_object", "scatter_object_list",
        ):  # fmt: skip
            self._counting(dist, name, "collective")
        self._counting(trainer.strategy, "barrier", "barrier")

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        # All of the batch before, what comes after its hooks too; an epoch's first one is traced.
        if batch_idx > 1:
            self.counts.append(Counter(self._now))
        self._now.clear()


def quiet(module: Any) -> None:
    module.log = module.log_dict = lambda *_, **__: None


def fit_counting_messages(training: Training) -> list[Counter[str]]:
    messages = Messages()
    it = Session(
        replace(training, change=None), messages, LearningRateMonitor("step"),
        change=log_everything, logger=CSVLogger(".", name="", version="log"),
    )  # fmt: skip
    if training.change is not None:
        training.change(it.module)
    it.fit(validation=[labelled(50), labelled(60)])
    return messages.counts


def test_logging_sends_nothing(tmp_path: Path) -> None:
    logging = run(fit_counting_messages, CLASSIFIER, folder=tmp_path)
    silent = run(fit_counting_messages, replace(CLASSIFIER, change=quiet), folder=tmp_path)
    assert logging == silent
    loss, data = logging
    assert len(loss) == len(data) == len(CLASSIFIER.sizes)
    assert all(count["collective"] == 0 for count in (*loss, *data))
    assert all(count["send_object"] == 1 for count in data)  # the header of the step
    assert all(count["send_object"] == 0 for count in loss)


def shows() -> list[Any]:
    return [RichProgressBar(), ModelSummary(max_depth=2), LearningRateMonitor("step"),
            Timer(interval="epoch")]  # fmt: skip


def give_example(module: Any) -> None:
    module.example_input_array = images(2, 0)
    type(module).forward = lambda self, x: self.net(x)


def fit_showing(training: Training) -> None:
    logger = TensorBoardLogger(".", name="", version="log", log_graph=False)
    Session(
        training, change=log_everything, logger=logger, enable_progress_bar=True,
        enable_model_summary=True,
    ).fit(validation=[labelled(50), labelled(60)])  # fmt: skip


def events_of(folder: Path) -> list[tuple[int, str, float]]:
    """The scalars of a TensorBoard file: records of length, checksum, event, checksum."""
    (path,) = folder.glob("events.*")
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack_from("<Q", data)
        event = Event.FromString(data[12 : 12 + length])
        found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
        data = data[16 + length :]
    return sorted(found)


def test_tensorboard_and_rich(tmp_path: Path) -> None:
    training = replace(CLASSIFIER, callbacks=shows, change=give_example)
    both(fit_showing, training, tmp_path)
    theirs, ours = (events_of(tmp_path / name / "log") for name in ("alone", "together"))
    assert len(theirs) > 20
    assert [entry[:2] for entry in ours] == [entry[:2] for entry in theirs]
    assert [entry[2] for entry in ours] == pytest.approx([entry[2] for entry in theirs], rel=1e-6)
    loss, data = ((tmp_path / f"together/output-{rank}.txt").read_text() for rank in (0, 1))
    for words in ("Epoch 1/1", "Total params", "Sequential"):
        assert words in loss
        assert words not in data
