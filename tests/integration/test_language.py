"""Language models whose heads are part of the loss: in a pipeline as on one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_tspipe import DistillationLoss, MomentumEMA, pretrained
from tests.integration.jobs import run, run_job
from tests.integration.trainings import RESUMING, Epochs, Session, Trained, Training
from tests.integration.windows import SLOW, WINDOWS, Classifier, loader, same

transformers = pytest.importorskip("transformers")

WORDS, LENGTH = 23, 10
CONFIGS = {
    "llama": "LlamaConfig",
    "qwen3": "Qwen3Config",
    "gemma3": "Gemma3TextConfig",
    "smollm3": "SmolLM3Config",
}


def config(family: str, layers: int, width: int, *, tied: bool) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": WORDS, "hidden_size": width, "intermediate_size": 2 * width,
        "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": LENGTH, "tie_word_embeddings": tied, "pad_token_id": None,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if family in {"qwen3", "gemma3"}:
        sizes["head_dim"] = width // 2
    return getattr(transformers, CONFIGS[family])(**sizes)


class Distils(Classifier):
    """A student whose embedding is its head, and a larger teacher, of packed sequences."""

    family = "llama"
    folder = ""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.distillation = DistillationLoss(2.0, 0.5, 7)
        self.teacher: Any = None
        self.student: Any = None
        if not self.folder:
            self.build()

    def configure_model(self) -> None:
        if self.student is None:
            self.build()

    def build(self) -> None:
        def made(role: str, *size: int, tied: bool) -> Any:
            automatic = transformers.AutoModelForCausalLM
            if self.folder:
                return pretrained(automatic, f"{self.folder}/{role}")
            return automatic.from_config(config(self.family, *size, tied=tied))

        self.teacher = made("teacher", 3, 16, tied=False).requires_grad_(requires_grad=False)
        self.student = made("student", 3, 8, tied=True)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        inside = {"position_ids": y[1], "use_cache": False}
        hidden = self.student.model(x, **inside).last_hidden_state
        with torch.no_grad():
            guide = self.teacher.model(x, **inside).last_hidden_state
        heads = self.student.lm_head, self.teacher.lm_head
        found = self.distillation(hidden, heads[0], guide, heads[1], y[0])
        self.log("divergence", found.divergence, on_epoch=True, on_step=False, batch_size=len(x))
        return found.loss  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val", self.loss(*batch), batch_size=len(batch[0]))


class Averages(Distils):
    """Its teacher is an average of its student."""

    def build(self) -> None:
        super().build()
        automatic = transformers.AutoModelForCausalLM
        self.teacher = automatic.from_config(self.student.config).requires_grad_(
            requires_grad=False
        )

    def configure_callbacks(self) -> Any:
        return MomentumEMA()


class ChangesInSecret(Distils):
    """Its teacher's head changes in a way that leaves no trace but values."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.teacher.lm_head.weight.data.mul_(0.9)


def sentences(sizes: tuple[int, ...], epochs: int = 2) -> Epochs:
    made = torch.Generator().manual_seed(7)
    positions = torch.cat([torch.arange(4), torch.arange(LENGTH - 4)])

    def batch(size: int) -> Any:
        tokens = torch.randint(WORDS, (size, LENGTH), generator=made)
        labels = tokens.roll(-1, 1)
        labels[:, [3, -1]] = -100
        return tokens, (labels, positions.repeat(size, 1))

    return Epochs([[batch(size) for size in sizes] for _ in range(epochs)])


def train(training: Training, kind: type[Distils], folder: str = "", **options: Any) -> Trained:
    kind.folder = folder
    (sizes,) = set(training.sizes)
    session = Session(training, module=kind(), ignored=[RESUMING, ".*no `val_dataloader`"])
    return session.fit(sentences(sizes), **options).trained


def both(training: Training, kind: type[Distils], folder: Path, **options: Any) -> None:
    one = replace(training, strategy="auto", num_ranks=1)
    (expected,) = run(train, one, kind, num_ranks=1, folder=folder / "alone", **options)
    number = training.num_ranks
    same(expected, run(train, training, kind, num_ranks=number, folder=folder / "two", **options))


def of(strategy: str, *sizes: int, num_ranks: int = 2, **trainer: Any) -> Training:
    arguments = {"accumulate_grad_batches": 3, **trainer}
    return replace(
        WINDOWS, strategy=strategy, num_ranks=num_ranks, sizes=(sizes,) * 2, trainer=arguments
    )


class Qwen3(Distils):
    family = "qwen3"


class Gemma3(Distils):
    family = "gemma3"


class SmolLM3(Distils):
    family = "smollm3"


@pytest.mark.parametrize(
    ("kind", "training"),
    [
        (Distils, of("tspipe_1f1b", 3, 3, 3, 2)),
        pytest.param(Qwen3, of("tspipe_zbv", 3, 3, 3, 2, gradient_clip_val=0.1), marks=SLOW),
        pytest.param(Distils, of("tspipe", 3, 3, 3, 2), marks=SLOW),
        pytest.param(Gemma3, of("tspipe_1f1b", 3, 3, 3, 2, num_ranks=3), marks=SLOW),
        pytest.param(SmolLM3, of("tspipe_interleaved", 3, 3, 3, 2), marks=SLOW),
        pytest.param(Qwen3, of("tspipe_gpipe", 4, 4, 4), marks=SLOW),
    ],
)
def test_a_language_model_is_that_of_one_device(
    kind: type[Distils], training: Training, tmp_path: Path
) -> None:
    both(training, kind, tmp_path)


def test_each_rank_reads_its_part_of_pretrained_weights(tmp_path: Path) -> None:
    source = Distils()
    for role in ("teacher", "student"):
        getattr(source, role).save_pretrained(tmp_path / role, max_shard_size="3KB")
    training = of("tspipe_1f1b", 3, 3, 3, 2)
    one = replace(training, strategy="auto", num_ranks=1)
    (expected,) = run(train, one, Distils, num_ranks=1, folder=tmp_path / "alone")
    ranks = run(train, training, Distils, str(tmp_path), folder=tmp_path / "together")
    assert all(rank.meta for rank in ranks)
    same(expected, ranks)


@pytest.mark.parametrize("kind", [pytest.param(Averages, marks=SLOW), ChangesInSecret])
def test_a_head_beside_a_teacher_that_changes_is_refused(
    kind: type[Distils], tmp_path: Path
) -> None:
    job = run_job(train, of("tspipe_1f1b", 3, 3, 3, 2), kind, num_ranks=2, folder=tmp_path)
    assert all(rank.exit_code for rank in job.ranks)
    assert "weight' of a teacher that changes" in job.output


def validated(training: Training) -> Trained:
    (sizes,) = set(training.sizes)
    session = Session(training, module=Distils(), ignored=[RESUMING], val_check_interval=2)
    return session.fit(sentences(sizes), validation=sentences((3, 2))).trained


@SLOW
def test_a_validation_computes_with_both_heads(tmp_path: Path) -> None:
    training = of("tspipe_1f1b", 3, 3, 3, 2, accumulate_grad_batches=2)
    one = replace(training, strategy="auto", num_ranks=1)
    (expected,) = run(validated, one, num_ranks=1, folder=tmp_path / "alone")
    ranks = run(validated, training, folder=tmp_path / "together")
    assert "val" in expected.metrics
    same(expected, ranks)


class Penalizes(Classifier):
    """Its validation computes with a weight of the first stage, which its training doesn't."""

    def validation_step(self, batch: Any, _: int) -> None:
        penalty = self.student.get_parameter("0.0.weight").square().sum()
        self.log("val", self.loss(*batch) + penalty, batch_size=len(batch[0]))


def penalized() -> None:
    training = of("tspipe_1f1b", 3, 3, 3, 2)
    Session(training, module=Penalizes(), ignored=[RESUMING]).fit(
        loader((3, 3, 3, 2)), validation=loader((3, 2))
    )


def test_a_validation_with_what_another_rank_has_is_refused(tmp_path: Path) -> None:
    job = run_job(penalized, num_ranks=2, folder=tmp_path)
    assert all(rank.exit_code for rank in job.ranks)
    assert "'student.0.0.weight', which is on another rank" in job.output
