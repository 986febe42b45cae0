"""Several students of one teacher, whose forward they share: each one trains as if alone."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_tspipe import DistillationLoss, Perplexity, pretrained
from lightning_tspipe.cli.main import main
from tests.integration.jobs import run
from tests.integration.test_language import config, of, sentences
from tests.integration.trainings import CLOSE, RESUMING, Session, Trained, Training
from tests.integration.windows import SLOW, same

transformers = pytest.importorskip("transformers")

SIZES, HELD_OUT = (3, 3, 3, 3, 3, 2), (3, 2)
SHAPES = {"small": (3, 8), "tiny": (2, 4)}  # layers and width
NAMES = tuple(SHAPES)
IGNORED = [RESUMING, "The dirpath has changed"]


def made(layers: int, width: int, *, tied: bool) -> Any:
    model = config("llama", layers, width, tied=tied)
    return transformers.AutoModelForCausalLM.from_config(model)


class Students(LightningModule):
    """Students of different depth and width.

    Attributes:
        chosen: Those that are trained.
    """

    chosen = NAMES
    student_names = NAMES
    teacher_names = ("teacher",)
    folder = ""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.teacher: Any = None
        self.losses = nn.ModuleDict({
            name: DistillationLoss(2.0, 0.5, 7) for name in NAMES
        })  # fmt: skip
        self.perplexities = nn.ModuleDict({name: Perplexity() for name in NAMES})
        if not self.folder:
            self.build()

    def configure_model(self) -> None:
        if self.teacher is None:
            self.build()

    def model(self, role: str) -> Any:
        if self.folder:
            automatic = transformers.AutoModelForCausalLM
            return pretrained(automatic, f"{self.folder}/{role}")
        return made(*SHAPES.get(role, (3, 16)), tied=role == "small")

    def build(self) -> None:
        self.teacher = self.model("teacher").requires_grad_(requires_grad=False)
        self.place({name: self.model(name) for name in NAMES})

    def place(self, students: dict[str, Any]) -> None:
        self.small, self.tiny = (students[name] for name in NAMES)

    def student(self, name: str) -> Any:
        return getattr(self, name)

    def compare(self, batch: Any) -> dict[str, Any]:
        x, (labels, positions) = batch
        inside = {"position_ids": positions, "use_cache": False}
        with torch.no_grad():
            guide = self.teacher.model(x, **inside).last_hidden_state
        found = {}
        for name in self.chosen:
            student = self.student(name)
            hidden = student.model(x, **inside).last_hidden_state
            heads = student.lm_head, self.teacher.lm_head
            found[name] = self.losses[name](hidden, heads[0], guide, heads[1], labels)
        return found

    def training_step(self, batch: Any, _: int) -> Tensor:
        found = self.compare(batch)
        size = len(batch[0])
        self.log_dict({name: each.loss for name, each in found.items()}, batch_size=size)
        return torch.stack([each.loss for each in found.values()]).sum()

    def validation_step(self, batch: Any, _: int) -> None:
        for name, each in self.compare(batch).items():
            self.perplexities[name](each.cross_entropy, each.num_tokens)
            self.log(f"val_{name}", self.perplexities[name])

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": list(self.student(name).parameters()), "lr": 0.1 if name == "small" else 0.2}
            for name in self.chosen
        ]
        return torch.optim.SGD(groups, momentum=0.9)


class Listed(Students):
    """The same in a list."""

    student_names = ("students.0", "students.1")

    def place(self, students: dict[str, Any]) -> None:
        self.students = nn.ModuleList(students.values())

    def student(self, name: str) -> Any:
        return self.students[NAMES.index(name)]


class Teachers(Callback):
    """Counts the teacher's forwards: on one device as they happen, else those of a batch."""

    def __init__(self) -> None:
        self.calls = 0
        self.planned: dict[str, int] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        def count(*_: Any) -> None:
            self.calls += 1

        if not hasattr(trainer.strategy, "pipelined"):
            module.teacher.model.register_forward_hook(count)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if hasattr(trainer.strategy, "pipelined"):
            calls = trainer.strategy.pipelined._run.engine.captured.plan.calls
            for role in ("teacher", "student"):
                self.planned[role] = sum(call.network == role for call in calls)


def train(
    training: Training, kind: type[Students], chosen: tuple[str, ...] = NAMES, **options: Any
) -> tuple[Trained, int, dict[str, int]]:
    kind.chosen, teachers = chosen, Teachers()
    saving = ModelCheckpoint(".", "{step}", every_n_train_steps=1, save_top_k=-1)
    session = Session(
        training, teachers, saving, module=kind(), ignored=IGNORED, enable_checkpointing=True
    )
    session.fit(sentences(SIZES), validation=sentences(HELD_OUT), **options)
    session.trainer.save_checkpoint("end.ckpt")
    trained = session.trained
    if os.environ.get("LOCAL_RANK", "0") != "0":  # what lies beside the loss is trained on rank 0
        trained.weights = {k: v for k, v in trained.weights.items() if "lm_head" not in k}
    return trained, teachers.calls, teachers.planned


def train_alone(training: Training, kind: type[Students]) -> list[Any]:
    """All students, and each one."""
    return [train(training, kind, chosen) for chosen in (NAMES, *((name,) for name in NAMES))]


def train_read(training: Training, folder: str) -> tuple[Trained, int, dict[str, int]]:
    """The same from pretrained models."""
    Listed.folder = folder
    return train(training, Listed)


def alone(training: Training) -> Training:
    return replace(training, strategy="auto", num_ranks=1, options={})


@pytest.mark.parametrize(
    ("kind", "training"),
    [
        pytest.param(Students, of("tspipe_1f1b", *SIZES), marks=SLOW),
        *(
            pytest.param(kind, training, marks=pytest.mark.exhaustive)
            for kind, training in [
                (Listed, of("tspipe_1f1b", *SIZES, num_ranks=3)),
                (Listed, of("tspipe_interleaved", *SIZES)),
                (Students, of("tspipe_interleaved", *SIZES, num_ranks=3)),
            ]
        ),
    ],
)
def test_each_student_is_trained_as_if_alone(
    kind: type[Students], training: Training, tmp_path: Path
) -> None:
    together, *each = run(
        train_alone, alone(training), kind, num_ranks=1, folder=tmp_path / "one", seconds=120.0
    )[0]
    expected, calls, _ = together
    assert calls == 2 * (len(SIZES) + len(HELD_OUT))  # epochs; not once per student
    for name, prefix, (own, _, _) in zip(NAMES, kind.student_names, each, strict=True):
        for key, value in own.weights.items():
            if key.startswith(f"{prefix}."):
                torch.testing.assert_close(value, expected.weights[key], **CLOSE)
        assert own.metrics[f"val_{name}"] == pytest.approx(expected.metrics[f"val_{name}"])
    number = training.num_ranks
    ranks = run(train, training, kind, num_ranks=number, folder=tmp_path / "piped")
    same(expected, [trained for trained, _, _ in ranks])
    assert all(planned == {"teacher": 1, "student": 2} for _, _, planned in ranks)


def go_on(training: Training, kind: type[Students]) -> Trained:
    """From an update in the middle of the first epoch."""
    return train(training, kind, ckpt_path="../whole/step=1.ckpt")[0]


@SLOW
@pytest.mark.timeout(300)  # several runs, each of which imports transformers
def test_a_list_of_students_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    training = of("tspipe_1f1b", *SIZES)
    wholes = run(train, training, Listed, folder=tmp_path / "whole")
    ranks = run(go_on, training, Listed, folder=tmp_path / "again")
    for (whole, _, _), again in zip(wholes, ranks, strict=True):
        assert whole.global_step == again.global_step == 4
        torch.testing.assert_close(again.weights, whole.weights, **CLOSE)
        assert again.metrics == pytest.approx(whole.metrics, rel=1e-9)


@SLOW
@pytest.mark.timeout(300)  # several runs, each of which imports transformers
def test_each_of_a_list_is_exported(tmp_path: Path, capsys: Any) -> None:
    """And read by each rank for its own stages."""
    source = Listed()
    for role, model in zip(("teacher", *NAMES), (source.teacher, *source.students), strict=True):
        model.save_pretrained(tmp_path / role)
    training = of("tspipe_1f1b", *SIZES)
    ((expected, _, _),) = run(
        train_read, alone(training), str(tmp_path), num_ranks=1, folder=tmp_path / "alone"
    )
    ranks = run(train_read, training, str(tmp_path), folder=tmp_path / "together")
    assert all(trained.meta for trained, _, _ in ranks)
    same(expected, [trained for trained, _, _ in ranks])
    checkpoint = tmp_path / "together" / "end.ckpt"
    assert checkpoint.is_dir()
    for number, name in enumerate(NAMES):
        output = tmp_path / f"exported-{name}"
        main([
            "export", str(checkpoint), "--part", f"students.{number}",
            "--pretrained", str(tmp_path / name), "--output", str(output),
        ])  # fmt: skip
        found = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.float64)
        for key, value in found.state_dict().items():
            wanted = expected.weights[f"students.{number}.{key}"]
            torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-6)
    capsys.readouterr()
