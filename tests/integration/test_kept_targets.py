"""A pipelined teacher's targets are kept; students learn by them without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_tspipe import (
    ConfigurationError,
    KeptTargets,
    TargetWriter,
    TSPipeStrategy,
    WithTargets,
    pretrained,
)
from tests.integration.jobs import run, run_job
from tests.integration.test_language import LENGTH, WORDS, Distils, of, transformers
from tests.integration.trainings import RESUMING, Session, Trained, Training, quiet_trainer, strict
from tests.integration.windows import SLOW, same

NUMBER = 11


class Texts(Dataset[Any]):
    """Packed sequences of two documents each."""

    def __init__(self, seed: int = 7) -> None:
        made = torch.Generator().manual_seed(seed)
        self._tokens = torch.randint(WORDS, (NUMBER, LENGTH), generator=made)

    def __len__(self) -> int:
        return NUMBER

    def __getitem__(self, index: int) -> Any:
        tokens = self._tokens[index]
        labels = tokens.roll(-1)
        labels[[3, -1]] = -100
        return tokens, (labels, torch.cat([torch.arange(4), torch.arange(LENGTH - 4)]))


class Keeps(Distils):
    """Says what its teacher finds."""

    def __init__(self, k: int | None, fails_at: int = -1) -> None:
        super().__init__()
        self.k, self.fails_at = k, fails_at

    def predict_step(self, batch: Any, index: int) -> Any:
        if index == self.fails_at:
            raise ValueError(index)
        tokens, (_, positions) = batch
        hidden = self.teacher.model(tokens, position_ids=positions, use_cache=False)[0]
        return self.distillation.targets(tokens, hidden, self.teacher.lm_head, self.k)


class Learns(Distils):
    """Has no teacher."""

    def __init__(self, kept: KeptTargets) -> None:
        self.kept = kept
        super().__init__()

    def build(self) -> None:
        super().build()
        self.teacher = self.kept.head() if self.kept.kind == "hidden" else None

    def loss(self, x: Tensor, y: Tensor, targets: Any = None) -> Tensor:
        labels, positions = y
        hidden = self.student.model(x, position_ids=positions, use_cache=False).last_hidden_state
        if self.teacher is None:
            found = self.distillation.kept(hidden, self.student.lm_head, targets, labels)
        else:
            heads = self.student.lm_head, self.teacher
            found = self.distillation(hidden, heads[0], targets, heads[1], labels)
        self.log("divergence", found.divergence, on_epoch=True, on_step=False, batch_size=len(x))
        return found.loss  # type: ignore[no-any-return]


def keep(strategy: Any, devices: int, target: str, module: Any, **options: Any) -> Any:
    strict()
    writer = TargetWriter(target, shard_bytes=2000, **options)
    if strategy == "replicas":
        strategy = TSPipeStrategy(num_stages=2)
    trainer = quiet_trainer(devices=devices, strategy=strategy, callbacks=[writer])
    return trainer.predict(module, DataLoader(Texts(), 2))


def keep_from(strategy: Any, devices: int, target: str, k: int | None, models: str = "") -> Any:
    Distils.folder = models
    given = f"{models}/teacher" if models else None
    return keep(strategy, devices, target, Keeps(k), teacher=given)


def fail(target: str) -> None:
    keep("tspipe_1f1b", 2, target, Keeps(4, fails_at=5))


def train(training: Training, target: str, models: str = "") -> Trained:
    """With kept targets, or with the teacher."""
    Distils.folder = models
    kept = KeptTargets(target) if target else None
    data: Any = Texts() if kept is None else WithTargets(Texts(), kept)
    module = Distils() if kept is None else Learns(kept)
    session = Session(training, module=module, ignored=[RESUMING, ".*no `val_dataloader`"])
    trained = session.fit(DataLoader(data, 3)).trained
    students = {k: v for k, v in trained.weights.items() if not k.startswith("teacher")}
    return replace(trained, weights=students)


def read(folder: Path) -> list[Any]:
    kept, texts = KeptTargets(folder), Texts()
    return [kept.read(place, texts[place][0]) for place in range(NUMBER)]


def logs_of(targets: Any) -> Tensor:
    """Of kept bits."""
    (bits,) = (value for name, value in targets.items() if name != "words")
    return bits.view(torch.float64)  # type: ignore[no-any-return]


WAYS: Sequence[Any] = [
    ("tspipe_1f1b", 2),
    pytest.param("tspipe", 2, marks=SLOW),
    pytest.param("replicas", 4, marks=SLOW),
    pytest.param("ddp", 2, marks=SLOW),
]


@pytest.mark.parametrize(("strategy", "devices"), WAYS)
def test_what_is_kept_is_that_of_one_device(strategy: str, devices: int, tmp_path: Path) -> None:
    one, more = tmp_path / "one", tmp_path / "more"
    assert run(keep_from, "auto", 1, str(one), 5, num_ranks=1, folder=tmp_path) == [None]
    run(keep_from, strategy, devices, str(more), 5, num_ranks=devices, folder=tmp_path)
    for a, b in zip(read(one), read(more), strict=True):
        assert torch.equal(a["words"], b["words"])
        torch.testing.assert_close(logs_of(a), logs_of(b), rtol=1e-12, atol=1e-12)
    writers = {file.name[8:13] for file in more.glob("targets-*")}
    assert len(writers) == (2 if strategy in {"replicas", "ddp"} else 1)
    assert not [file for file in more.iterdir() if "part" in file.name]


@pytest.mark.parametrize(
    ("k", "strategy"),
    [
        pytest.param(WORDS, "tspipe_1f1b", marks=SLOW),
        pytest.param(None, "tspipe_1f1b", marks=SLOW),
        pytest.param(None, "tspipe_zbv", marks=SLOW),
        pytest.param(WORDS, "tspipe", marks=SLOW),
    ],
)
def test_a_student_without_a_teacher_is_that_of_the_run_with_it(
    k: int | None, strategy: str, tmp_path: Path
) -> None:
    target = str(tmp_path / "kept")
    run(keep_from, strategy, 2, target, k, num_ranks=2, folder=tmp_path)
    training = of(strategy, 3, 3, 3, 2)
    one = replace(training, strategy="auto", num_ranks=1)
    (expected,) = run(train, one, "", num_ranks=1, folder=tmp_path)
    same(expected, run(train, training, target, folder=tmp_path))


@SLOW
def test_few_words_train_what_they_train_on_one_device(tmp_path: Path) -> None:
    target = str(tmp_path / "kept")
    run(keep_from, "auto", 1, target, 4, num_ranks=1, folder=tmp_path)
    training = of("tspipe_1f1b", 3, 3, 3, 2)
    one = replace(training, strategy="auto", num_ranks=1)
    (expected,) = run(train, one, target, num_ranks=1, folder=tmp_path)
    same(expected, run(train, training, target, folder=tmp_path))


@SLOW
def test_hidden_states_of_a_pretrained_teacher_take_its_place(tmp_path: Path) -> None:
    source = Distils()
    for role in ("teacher", "student"):
        getattr(source, role).save_pretrained(tmp_path / role, max_shard_size="3KB")
    target, models = tmp_path / "kept", str(tmp_path)
    run(keep_from, "tspipe_1f1b", 2, str(target), None, models, folder=tmp_path)
    kept = KeptTargets(target, teacher=tmp_path / "teacher")
    automatic = transformers.AutoModelForCausalLM
    whole = pretrained(automatic, tmp_path / "teacher")
    assert torch.equal(kept.head().weight, whole.lm_head.weight)
    with pytest.raises(ConfigurationError, match=r"of the teacher .* whose files are others"):
        KeptTargets(target, teacher=tmp_path / "student")
    training = of("tspipe_1f1b", 3, 3, 3, 2)
    one = replace(training, strategy="auto", num_ranks=1)
    (expected,) = run(train, one, "", models, num_ranks=1, folder=tmp_path)
    ranks = run(train, training, str(target), models, folder=tmp_path)
    assert all(rank.meta for rank in ranks)
    same(expected, ranks)


@pytest.mark.slow
def test_an_interrupted_pass_is_no_targets(tmp_path: Path) -> None:
    target = tmp_path / "kept"
    job = run_job(fail, str(target), folder=tmp_path)
    assert all(rank.exit_code for rank in job.ranks)
    with pytest.raises(ConfigurationError, match="interrupted"):
        KeptTargets(target)
    run(keep_from, "auto", 1, str(target), 4, num_ranks=1, folder=tmp_path)
    assert KeptTargets(target).num_samples == NUMBER
    job = run_job(keep_from, "tspipe_1f1b", 2, str(target), 4, folder=tmp_path)
    assert "has targets already" in job.output
    assert all(rank.exit_code for rank in job.ranks)


class Empty(LightningModule):
    """Returns something else."""

    def predict_step(self, batch: Any, _: int, dataloader_idx: int = 0) -> Any:
        return batch[0]


def refusals(target: str) -> list[str]:
    strict()
    found = []
    for loaders in (DataLoader(Texts(), 2), [DataLoader(Texts(), 2)] * 2):
        trainer = quiet_trainer(devices=1, callbacks=[TargetWriter(target)])
        with pytest.raises(ConfigurationError) as error:
            trainer.predict(Empty(), loaders)
        found.append(str(error.value))
    return found


def test_what_is_refused(tmp_path: Path) -> None:
    (found,) = run(refusals, str(tmp_path / "kept"), num_ranks=1, folder=tmp_path)
    assert "has to return what DistillationLoss.targets makes" in found[0]
    assert "keep targets of one at a time" in found[1]


def keep_in_the_other_world(target: str) -> None:
    from pytorch_lightning import LightningModule as Other  # noqa: PLC0415 - the other copy

    class Module(Other):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.it = Keeps(4)

        def predict_step(self, batch: Any, index: int) -> Any:
            return self.it.predict_step(batch, index)

    strict()
    callbacks = [TargetWriter(target, dtype="float32")]
    trainer = quiet_trainer("pytorch_lightning", devices=1, callbacks=callbacks)
    trainer.predict(Module(), DataLoader(Texts(), 2))


def test_the_other_copy_of_lightning(tmp_path: Path) -> None:
    run(keep_in_the_other_world, str(tmp_path / "kept"), num_ranks=1, folder=tmp_path)
    assert KeptTargets(tmp_path / "kept").num_samples == NUMBER
