"""Validation, test and prediction through the pipeline, within a fit and on their own."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_tspipe import DelayedTeacherUpdate
from tests.exactness.modules import images, labels
from tests.integration.comparing import both, labelled
from tests.integration.jobs import run, run_job
from tests.integration.trainings import (
    CLOSE,
    Session,
    Training,
    delayed,
    metrics_of,
)

CLASSIFIER = Training("Classifier-batch", "instance", {"num_microbatches": 1})


class Where(Callback):
    """Notes whether this rank holds all parameters while it evaluates."""

    def __init__(self) -> None:
        self.was_whole: list[bool] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.was_whole.append(not any(x.is_meta for x in module.state_dict().values()))

    def on_test_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.on_validation_batch_end(trainer, module)

    def on_predict_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.on_validation_batch_end(trainer, module)


def classify(module: Any) -> None:
    def step(batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x, y = batch
        logits = module.net(x)
        module.log("loss", F.cross_entropy(logits, y), prog_bar=True)
        module.log_dict({f"batch_{dataloader_idx}": float(batch_idx)}, add_dataloader_idx=False)
        module.log("most", y.max().double(), reduce_fx="max", on_step=True, on_epoch=True)
        return {"loss": F.cross_entropy(logits, y)}

    module.validation_step = module.test_step = step
    module.predict_step = lambda batch, batch_idx, dataloader_idx=0: (
        module.net(batch[0]),
        batch[1],
    )


def evaluate(training: Training) -> Any:
    """Everything without a fit, on two loaders, by one Trainer."""
    where = Where()
    it = Session(training, where, change=classify)

    def loaders() -> list[Any]:
        return [labelled(50), labelled(80, 4)]

    validated = it.validate(loaders())
    metrics = metrics_of(it.trainer)
    tested, predicted = it.test(loaders()), it.predict(loaders())
    assert it.trainer.predict(it.module, loaders(), return_predictions=False) is None
    return validated, tested, metrics, predicted, it.module.state_dict(), where.was_whole


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_without_a_fit(num_ranks: int, tmp_path: Path) -> None:
    expected, results = both(evaluate, CLASSIFIER, tmp_path, num_ranks)
    assert len(expected[0][1]) == 3
    for validated, tested, metrics, predicted, weights, was_whole in results:
        for ours, theirs in zip((*validated, *tested), (*expected[0], *expected[1]), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9)
        assert metrics == pytest.approx(expected[2], rel=1e-9)
        torch.testing.assert_close(predicted, expected[3], **CLOSE)
        torch.testing.assert_close(weights, expected[4], rtol=0, atol=0)
        assert len(was_whole) == 28
        assert set(was_whole) == {num_ranks == 1}


def predict_with(training: Training, step: Callable[[Any, Any], Any]) -> Any:
    where = Where()
    it = Session(training, where)
    it.module.predict_step = lambda batch, batch_idx: step(it.module, batch)
    return it.predict(it.loader), where.was_whole


def features(module: Any, batch: Any) -> Tensor:
    return module.backbone(batch[0][0]).flatten(1)


def similarity(module: Any, batch: Any) -> Tensor:
    query = module.head(module.backbone(batch[0][0]).flatten(1))
    key = module.head_momentum(module.backbone_momentum(batch[0][1]).flatten(1))
    return F.cosine_similarity(query, key)


def keys(module: Any, batch: Any) -> Tensor:
    return module.head_momentum(module.backbone_momentum(batch[0][1]).flatten(1))


def by_sign(module: Any, batch: Any) -> Tensor:
    """Can't be captured: what is called depends on an output."""
    first = module.backbone(batch[0][0]).flatten(1)
    return module.head(first) if first.sum() > 0 else module.head(-first)


class _Predict:
    """A picklable function of a training."""

    def __init__(self, step: Callable[[Any, Any], Any]) -> None:
        self._step = step

    def __call__(self, training: Training) -> Any:
        return predict_with(training, self._step)


def inner(module: Any, batch: Any) -> Tensor:
    """A part of a declared block, piece by piece."""
    features: Tensor = module.backbone[:5](batch[0][0])
    return features


MOCO = replace(CLASSIFIER, case="Moco-batch")


@pytest.mark.parametrize("step", [features, similarity, keys, inner])
def test_steps_that_call_some_of_the_networks(step: Any, tmp_path: Path) -> None:
    expected, results = both(_Predict(step), MOCO, tmp_path, 3)
    for predicted, was_whole in results:
        torch.testing.assert_close(predicted, expected[0], **CLOSE)
        assert not any(was_whole)


def test_a_step_that_cannot_be_captured_runs_on_one_rank(tmp_path: Path) -> None:
    expected, results = both(_Predict(by_sign), MOCO, tmp_path)
    for predicted, _ in results:
        torch.testing.assert_close(predicted, expected[0], **CLOSE)
    output = (tmp_path / "together/output-0.txt").read_text()
    assert "rank 0 evaluates alone, without a pipeline" in output
    assert "test_evaluation.py" in output  # where the step decides


def validate_parts(module: Any) -> None:
    """Like an evaluator of features: only the student's encoder, and a part of the teacher."""

    def step(batch: Any, batch_idx: int) -> None:
        view = batch["views"][0]
        module.log("student", module.student[0](view).square().mean(), batch_size=len(view))
        module.log("teacher", module.teacher[:3](view).square().mean(), batch_size=len(view))

    module.validation_step = step


def fit_and_validate_parts(training: Training) -> Any:
    where = Where()
    it = Session(training, where, change=validate_parts)
    it.fit(validation=it.loader)
    return metrics_of(it.trainer), where.was_whole


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_fit_evaluates_parts_of_its_networks(num_ranks: int, tmp_path: Path) -> None:
    training = Training(callbacks=delayed)
    expected, results = both(fit_and_validate_parts, training, tmp_path, num_ranks)
    for metrics, was_whole in results:
        assert metrics == pytest.approx(expected[0], rel=1e-9)
        assert not any(was_whole)


def predict_two_ways(training: Training) -> Any:
    """The second loader's batches go on where the first one's stop."""
    it = Session(training)

    def predict_step(batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        found = features(it.module, batch)
        return found if dataloader_idx == 0 else it.module.head(found)

    it.module.predict_step = predict_step
    predicted = it.predict([it.loader, it.loader])
    return predicted, not any(parameter.is_meta for parameter in it.module.parameters())


def test_loaders_whose_steps_differ(tmp_path: Path) -> None:
    expected, results = both(predict_two_ways, MOCO, tmp_path)
    for predicted, whole in results:
        torch.testing.assert_close(predicted, expected[0], **CLOSE)
        assert whole
    output = (tmp_path / "together/output-0.txt").read_text()
    assert (
        "a different path through the student than the step that the stages were cut for" in output
    )


def decide_late(module: Any) -> None:
    def step(batch: Any, batch_idx: int) -> None:
        if module.net(batch[0]).sum() > 0:
            module.net(batch[0])

    module.validation_step = step


def fit_badly(training: Training) -> None:
    Session(training, change=decide_late).fit(validation=labelled(50))


def test_the_sanity_check_finds_a_step_that_cannot_be_captured(tmp_path: Path) -> None:
    training = replace(CLASSIFIER, trainer={"num_sanity_val_steps": 1})
    job = run_job(fit_badly, training, folder=tmp_path, seconds=60)
    assert [rank.exit_code for rank in job.ranks] == [1, 1]
    assert "CaptureError" in job.output
    assert "evaluates alone" not in job.output


def fit_between_evaluations(training: Training) -> Any:
    """One Trainer: validate, fit with two validation loaders, test, fit on, predict."""
    it = Session(training, change=classify)
    validated = it.validate(labelled(50))
    metrics = it.fit(validation=[labelled(50), labelled(80)]).trained.metrics
    tested = it.test(labelled(80))
    it.trainer.fit_loop.max_epochs = 3
    it.fit(validation=[labelled(50), labelled(80)])
    predicted = it.predict(labelled(50))
    return validated, metrics, tested, predicted, it.recorder.losses, it.module.state_dict()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_evaluations_around_fits(num_ranks: int, tmp_path: Path) -> None:
    training = replace(CLASSIFIER, trainer={"num_sanity_val_steps": 1})
    expected, results = both(fit_between_evaluations, training, tmp_path, num_ranks)
    assert "loss/dataloader_idx_1" in expected[1]
    for validated, metrics, tested, predicted, _, _ in results:
        assert validated[0] == pytest.approx(expected[0][0], rel=1e-9)
        assert metrics == pytest.approx(expected[1], rel=1e-9)
        assert tested[0] == pytest.approx(expected[2][0], rel=1e-9)
        torch.testing.assert_close(predicted, expected[3], **CLOSE)
    torch.testing.assert_close(results[0][4], expected[4], **CLOSE)
    torch.testing.assert_close(results[0][5], expected[5], **CLOSE)


class Drawn(Callback):
    """Keeps the largest and the least number that the batches of each validation drew."""

    def __init__(self) -> None:
        self.numbers: list[float] = []

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.numbers += [float(trainer.callback_metrics[name]) for name in ("most", "least")]


def draw(training: Training) -> list[float]:
    drawn = Drawn()
    it = Session(training, drawn)

    def step(batch: Any, batch_idx: int) -> None:
        number = torch.rand(()) + 0 * it.module.net(batch[0]).sum()
        it.module.log("most", number, reduce_fx="max")
        it.module.log("least", number, reduce_fx="min")

    it.module.validation_step = step
    it.fit(validation=labelled(50))
    return drawn.numbers


@pytest.mark.slow
def test_each_batch_of_a_validation_draws_numbers_of_its_own(tmp_path: Path) -> None:
    for numbers in run(draw, CLASSIFIER, num_ranks=2, folder=tmp_path):
        assert len(set(numbers)) == len(numbers) > 2


class Writer(BasePredictionWriter):
    """Keeps what it is given."""

    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.batches: list[Any] = []
        self.epoch: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, *_: Any
    ) -> None:
        self.batches.append((prediction, indices))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.epoch.append((list(predictions), indices))


def predict_and_write(training: Training) -> Any:
    writer = Writer("batch_and_epoch")
    it = Session(training, writer, change=classify)
    loader = DataLoader(TensorDataset(images(11, 0), labels(11, 0)), batch_size=4)
    it.trainer.predict(it.module, loader, return_predictions=False)
    return writer.batches, writer.epoch


def test_prediction_writers(tmp_path: Path) -> None:
    expected, results = both(predict_and_write, CLASSIFIER, tmp_path)
    assert expected[1][0][1] == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]]
    torch.testing.assert_close(results[0][0], expected[0], **CLOSE)
    for _, epoch in results:
        torch.testing.assert_close(epoch, expected[1], **CLOSE)
    assert [indices for _, indices in results[1][0]] == [indices for _, indices in expected[0]]
    assert all(prediction is None for prediction, _ in results[1][0])


def predict_with_few_files(training: Training) -> Any:
    resource.setrlimit(resource.RLIMIT_NOFILE, (700, 700))
    return Session(training, change=classify).predict(labelled(0, 800, 3))


@pytest.mark.slow
def test_predictions_of_a_long_loader_are_kept(tmp_path: Path) -> None:
    expected, results = both(predict_with_few_files, CLASSIFIER, tmp_path)
    torch.testing.assert_close(results[0], expected, **CLOSE)


class Stream(IterableDataset[Any]):
    """Batches of unknown number."""

    def __init__(self, first: int) -> None:
        self._loader = labelled(first)

    def __iter__(self) -> Any:
        return iter(self._loader)


def evaluate_streams(training: Training) -> Any:
    it = Session(training, change=classify)

    def streams() -> list[Any]:
        return [DataLoader(Stream(first), batch_size=None) for first in (50, 80)]

    return it.test(streams()), it.predict(streams())


def test_streams_of_unknown_length(tmp_path: Path) -> None:
    training = replace(CLASSIFIER, trainer={"limit_test_batches": 2})
    expected, results = both(evaluate_streams, training, tmp_path)
    for tested, predicted in results:
        for ours, theirs in zip(tested, expected[0], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9)
        torch.testing.assert_close(predicted, expected[1], **CLOSE)


def evaluate_teacher(training: Training) -> Any:
    """A teacher built differently, and one that is averaged: both in one evaluation."""
    it = Session(training, DelayedTeacherUpdate())

    def step(batch: Any, batch_idx: int) -> None:
        x, y = batch
        student, teacher = it.module.student(x), it.module.teacher(x)
        it.module.log("agree", (student.argmax(1) == teacher.argmax(1)).double().mean())
        it.module.log("loss", F.cross_entropy(student, y))

    it.module.validation_step = step
    before = it.validate(labelled(50))
    return before, it.fit(validation=labelled(50)).trained.metrics


def test_both_networks(tmp_path: Path) -> None:
    training = replace(CLASSIFIER, case="Distillation-batch")
    expected, results = both(evaluate_teacher, training, tmp_path, 3)
    for before, metrics in results:
        assert before[0] == pytest.approx(expected[0][0], rel=1e-9)
        assert metrics == pytest.approx(expected[1], rel=1e-9)
