from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, TensorDataset

from lightning_tspipe.callbacks import KNNEvaluator
from lightning_tspipe.callbacks.quality import Neighbours
from lightning_tspipe.errors import ConfigurationError


def unit_vectors(num: int, dim: int = 6) -> Tensor:
    return normalize(torch.randn(num, dim, dtype=torch.float64), dim=1)


def knn_scores(  # noqa: PLR0913, PLR0917 - data, then settings
    queries: Tensor,
    bank: Tensor,
    labels: Tensor,
    k: int = 20,
    temperature: float = 0.07,
    chunk_size: int = 64,
) -> Tensor:
    neighbours = Neighbours(queries, k)
    for part in zip(bank.split(chunk_size), labels.split(chunk_size), strict=True):
        neighbours.add(*part)
    return neighbours.scores(4, temperature)


@pytest.mark.parametrize("chunk_size", [1, 7, 64])
@pytest.mark.parametrize("k", [1, 5, 40])
@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_ranks_like_lightlys(k: int, chunk_size: int, temperature: float) -> None:
    knn = pytest.importorskip("lightly.utils.benchmarking.knn")
    queries, bank, labels = unit_vectors(30), unit_vectors(40), torch.arange(40) % 4
    scores = knn_scores(queries, bank, labels, k, temperature, chunk_size)
    theirs = knn.knn_predict(queries, bank.T, labels, 4, knn_k=k, knn_t=temperature)
    # Classes without a vote tie at zero, and ties have no order to compare.
    voted = scores.sort(dim=1, descending=True).values > 0
    assert torch.equal(scores.argsort(dim=1, descending=True)[voted], theirs[voted])


def test_the_vote_is_the_papers() -> None:
    bank = torch.eye(3, dtype=torch.float64)
    query = normalize(torch.tensor([[3.0, 2.0, 1.0]], dtype=torch.float64), dim=1)
    scores = knn_scores(query, bank, torch.tensor([0, 1, 1]), k=3, temperature=0.5)
    weights = (query[0] / 0.5).exp()
    ratio = weights[0] / (weights[1] + weights[2])
    torch.testing.assert_close(scores[0, 0] / scores[0, 1], ratio)


def test_a_small_bank_and_a_small_temperature() -> None:
    queries = unit_vectors(4)
    scores = knn_scores(queries, queries, torch.arange(4), k=200, temperature=1e-4)
    assert torch.equal(scores.argmax(dim=1), torch.arange(4))
    assert torch.isfinite(scores).all()


class Classes(TensorDataset):
    """Points around class centres, with a label."""

    def __init__(self, num: int) -> None:
        generator = torch.Generator().manual_seed(5)
        labels = torch.arange(num) % 6
        noise = torch.randn(num, 4, dtype=torch.float64, generator=generator)
        centres = torch.randn(6, 4, dtype=torch.float64, generator=generator)
        super().__init__(3 * centres[labels] + noise, labels)


def expected_accuracy(features: Callable[[Tensor], Tensor], k: int) -> tuple[float, float]:
    """By lightly, in double precision."""
    lightly = pytest.importorskip("lightly.utils.benchmarking.knn")
    bank, queries = Classes(48), Classes(30)
    with torch.no_grad():
        vectors, of_bank = (normalize(features(data.tensors[0]), dim=1) for data in (queries, bank))
    found = lightly.knn_predict(vectors, of_bank.T, bank.tensors[1], 6, knn_k=k, knn_t=0.07)
    hits = found[:, :5] == queries.tensors[1][:, None]
    return hits[:, 0].double().mean().item(), hits.any(dim=1).double().mean().item()


def test_logs_the_accuracy_of_the_trained_features(lab: SimpleNamespace) -> None:
    module = lab.module(batch_norm=True)
    knn = KNNEvaluator(
        Classes(48), DataLoader(Classes(30), batch_size=7), "student", k=5, batch_size=10
    )
    trainer = lab.trainer(callbacks=[knn])
    trainer.fit(module, lab.loader(3))
    module.eval()
    top1, top5 = expected_accuracy(module.student, 5)
    assert 0 < top1 < top5 <= 1
    assert trainer.callback_metrics["val_knn_top1"] == pytest.approx(top1)
    assert trainer.callback_metrics["val_knn_top5"] == pytest.approx(top5)


def test_features_by_function_and_in_double_precision(lab: SimpleNamespace) -> None:
    def halfway(pl_module: LightningModule, images: Tensor) -> Tensor:
        features: Tensor = pl_module.get_submodule("student.0")(images)
        return features[:, :, None]

    knn = KNNEvaluator(Classes(48), Classes(30), halfway, k=5, limit=1, batch_size=48)
    trainer = lab.trainer(callbacks=[knn], precision="64-true")
    module = lab.module()
    trainer.fit(module, lab.loader(2))
    assert trainer.callback_metrics["val_knn_top1"] == pytest.approx(
        expected_accuracy(module.student[0], 5)[0]
    )


@pytest.mark.parametrize("part", [0, 1, 2])
def test_features_of_a_part_of_a_network(lab: SimpleNamespace, part: int) -> None:
    class Nested(lab.module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.networks = nn.ModuleDict({"student": self.student})  # has no forward

    module = Nested()
    knn = KNNEvaluator(Classes(48), Classes(30), f"networks.student.{part}", k=5)
    trainer = lab.trainer(callbacks=[knn])
    trainer.fit(module, lab.loader(2))
    expected = expected_accuracy(module.student[: part + 1], 5)
    assert trainer.callback_metrics["val_knn_top1"] == pytest.approx(expected[0])
    assert not module.student[part]._forward_hooks


def test_every_n_epochs_and_after_the_last(lab: SimpleNamespace) -> None:
    class Counting(KNNEvaluator):
        epochs: list[int]

        def evaluate(self, trainer: Any, pl_module: LightningModule) -> dict[str, float]:
            self.epochs.append(trainer.current_epoch)
            return super().evaluate(trainer, pl_module)

    knn = Counting(Classes(8), Classes(8), every_n_epochs=2)
    knn.epochs = []
    lab.trainer(callbacks=[knn], max_epochs=5).fit(lab.module(), lab.loader(1))
    assert knn.epochs == [1, 3, 4]


@pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode")  # as it should be
def test_training_goes_on_as_if_nothing_had_happened(lab: SimpleNamespace) -> None:
    class Noisy(lab.module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(batch_norm=True)
            self.student.append(nn.Dropout())
            self.student[1].eval()  # a module that the user froze stays so

        def training_step(self, batch: Tensor) -> Tensor:
            noise = torch.randn_like(batch) + random.random()  # noqa: S311
            loss: Tensor = super().training_step(batch + noise)
            return loss

    states = []
    for with_knn in (False, True):
        torch.manual_seed(3)
        random.seed(3)
        bank = DataLoader(Classes(20), batch_size=5, shuffle=True)
        callbacks = [KNNEvaluator(bank, Classes(8), k=3)] if with_knn else []
        module = Noisy()
        lab.trainer(callbacks=callbacks, max_epochs=3).fit(module, loader := lab.loader(2))
        assert len(loader) == 2
        assert module.student.training
        assert not module.student[1].training
        states.append(module.state_dict())
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


def test_a_checkpoint_can_follow_it(lab: SimpleNamespace) -> None:
    best = ModelCheckpoint(monitor="val_knn_top1", mode="max", filename="{val_knn_top1:.2f}")
    trainer = lab.trainer(
        callbacks=[KNNEvaluator(Classes(12), Classes(12)), best], enable_checkpointing=True
    )
    trainer.fit(lab.module(), lab.loader(1))
    assert "val_knn_top1=" in best.best_model_path


@pytest.mark.parametrize("is_loss_rank", [True, False])
def test_under_a_pipeline(lab: SimpleNamespace, is_loss_rank: bool) -> None:
    class FakePipeline:
        num_batches = 0
        replica, data_parallel_size = 0, 1

        def __init__(self) -> None:
            self.is_loss_rank = is_loss_rank

        def evaluate(
            self, fn: Callable[[Any], Any], loader: Iterable[Any], *, limit: int | None = None
        ) -> Iterator[Any]:
            for batch in islice(loader, limit):
                self.num_batches += 1
                result = fn(batch)
                yield result if is_loss_rank else None

    module = lab.module()
    trainer = lab.trainer(callbacks=[KNNEvaluator(Classes(48), Classes(30), k=5, batch_size=16)])
    trainer.strategy.pipelined = pipeline = FakePipeline()
    trainer.fit(module, lab.loader(1))
    assert pipeline.num_batches == 2 * (3 + 2)  # epochs * (bank + queries)
    if is_loss_rank:
        top1, _ = expected_accuracy(module.student, 5)
        assert trainer.callback_metrics["val_knn_top1"] == pytest.approx(top1)
    else:
        assert "val_knn_top1" not in trainer.callback_metrics


@pytest.fixture
def validated(lab: SimpleNamespace) -> LightningModule:
    """A module with validation, for which Lightning adds a bar of its own beside ours."""

    class Validated(lab.module):  # type: ignore[misc, name-defined]
        def validation_step(self, batch: Tensor) -> None:
            self.log("val", self.student(batch).mean())

    return Validated()


def test_shows_its_progress_with_rich(validated: LightningModule, lab: SimpleNamespace) -> None:
    callbacks = [KNNEvaluator(Classes(8), Classes(8), batch_size=4), bar := RichProgressBar()]
    trainer = lab.trainer(callbacks=callbacks, enable_progress_bar=True, num_sanity_val_steps=0)
    trainer.fit(validated, lab.loader(2), lab.loader(2))
    assert bar.progress is not None
    (task,) = (task for task in bar.progress.tasks if task.description == "k-NN")
    assert task.finished
    assert not task.visible


def test_shows_its_progress_with_tqdm(
    validated: LightningModule, lab: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    callbacks = [KNNEvaluator(Classes(8), Classes(8), batch_size=4), TQDMProgressBar()]
    trainer = lab.trainer(callbacks=callbacks, enable_progress_bar=True, num_sanity_val_steps=0)
    trainer.fit(validated, lab.loader(2), lab.loader(2))
    assert "k-NN:" in capsys.readouterr().out


@pytest.mark.parametrize("options", [{"k": 0}, {"temperature": 0}, {"every_n_epochs": 0}])
def test_arguments_out_of_range(options: dict[str, Any]) -> None:
    [(name, value)] = options.items()
    with pytest.raises(ConfigurationError, match=rf"{name}={value}\b.*above 0$"):
        KNNEvaluator(Classes(4), Classes(4), **options)


def test_bad_sources(lab: SimpleNamespace) -> None:
    with pytest.raises(ConfigurationError, match="no submodule 'backbone'"):
        lab.trainer(callbacks=[KNNEvaluator(Classes(4), Classes(4), "backbone")]).fit(
            lab.module(), lab.loader(1)
        )
    with pytest.raises(ConfigurationError, match="bank yields no batch"):
        lab.trainer(callbacks=[KNNEvaluator([], Classes(4))]).fit(lab.module(), lab.loader(1))
