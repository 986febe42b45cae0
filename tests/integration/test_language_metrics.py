"""What is measured and logged of language models, in a pipeline as on one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_tspipe import Perplexity, PipelineThroughputMonitor
from tests.integration.jobs import run
from tests.integration.test_language import LENGTH, Distils, of, sentences
from tests.integration.trainings import RESUMING, Epochs, Session, Training
from tests.integration.windows import SLOW

IGNORED = -100
SIZES = (3, 3, 3, 3, 3, 2)
WINDOWS = of("tspipe_1f1b", *SIZES)
ALONE = replace(WINDOWS, strategy="auto", num_ranks=1)
PEAK = 1e9
UNVALIDATED = [RESUMING, ".*no `val_dataloader`", "The dirpath has changed"]


def labels_of(batch: Any) -> int:
    """Where the batch is: its values, not those of a placeholder."""
    return int((batch[1][0] != IGNORED).sum())


def rarely(sizes: tuple[int, ...]) -> Epochs:
    """Sentences of which some tokens only have a label, in each batch other ones."""
    made, epochs = torch.Generator().manual_seed(8), sentences(sizes)._epochs
    for epoch in epochs:
        for share, (_, (labels, _)) in enumerate(epoch, 1):
            chosen = torch.rand(labels.shape, generator=made) < share / (len(epoch) + 1)
            labels[~chosen] = IGNORED
    return Epochs(epochs)


def monitored(training: Training, path: str = "") -> dict[str, float]:
    """What the monitor knows in the end; from a checkpoint, if there is one."""
    monitor = PipelineThroughputMonitor(window=4, length_fn=labels_of, peak_flops=PEAK)
    saving = ModelCheckpoint(".", "{step}", every_n_train_steps=1, save_top_k=-1)
    session = Session(training, monitor, saving, module=Distils(), ignored=UNVALIDATED,
                      enable_checkpointing=True)  # fmt: skip
    session.fit(rarely(SIZES), **({"ckpt_path": path} if path else {}))
    return monitor.summary()


def flops_of_step(module: Distils) -> float:
    """Operations of one sample: backwards are two forwards."""

    def flops(role: str) -> float:
        network, head = getattr(module, role).model, getattr(module, role).lm_head
        tokens = torch.zeros(1, LENGTH, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            head(network(tokens, use_cache=False).last_hidden_state)
        return counter.get_total_flops()

    return 3 * flops("student") + flops("teacher")


@pytest.mark.slow
def test_tokens_and_the_operations_of_heads_are_counted(tmp_path: Path) -> None:
    tokens = sum(labels_of(batch) for epoch in rarely(SIZES)._epochs for batch in epoch)
    expected = flops_of_step(Distils())
    for num_ranks in (1, 2):
        training = replace(WINDOWS, num_ranks=num_ranks)
        found, *others = run(
            monitored, training, num_ranks=num_ranks, folder=tmp_path / str(num_ranks)
        )
        assert others == [{}] * (num_ranks - 1)
        assert found["num_tokens"] == tokens
        assert found["num_samples"] == 2 * sum(SIZES)
        assert found["tokens_per_second"] > 0
        # The pipeline's, of its devices' peaks.
        flops = found["mfu"] / found["samples_per_second"] * PEAK * num_ranks
        assert flops == pytest.approx(expected)


@SLOW
def test_tokens_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Which was saved behind batch 3, in the middle of an epoch and of a window."""
    (first, _) = run(monitored, WINDOWS, folder=tmp_path)
    (again, _) = run(monitored, WINDOWS, str(tmp_path / "step=1.ckpt"), folder=tmp_path / "again")
    for name in ("num_tokens", "num_samples", "num_batches"):
        assert again[name] == first[name]


class Validates(Distils):
    """Logs perplexities of both, and a mean of means."""

    def __init__(self) -> None:
        super().__init__()
        self.val_perplexity, self.teacher_perplexity = Perplexity(), Perplexity()
        self.train_perplexity = Perplexity()

    def compare(self, x: Tensor, y: Tensor) -> Any:
        hidden, guide = (
            role.model(x, position_ids=y[1], use_cache=False).last_hidden_state
            for role in (self.student, self.teacher)
        )
        return self.distillation(hidden, self.student.lm_head, guide, self.teacher.lm_head, y[0])

    def training_step(self, batch: Any, _: int) -> Tensor:
        found = self.compare(*batch)
        self.train_perplexity(found.cross_entropy, found.num_tokens)
        self.log("perplexity", self.train_perplexity, on_step=True, on_epoch=True)
        return found.loss

    def validation_step(self, batch: Any, _: int) -> None:
        found = self.compare(*batch)
        self.val_perplexity(found.cross_entropy, found.num_tokens)
        self.teacher_perplexity(found.teacher_cross_entropy, found.num_tokens)
        self.log("val_perplexity", self.val_perplexity)
        self.log("val_teacher_perplexity", self.teacher_perplexity)
        self.log("mean_of_means", found.cross_entropy.exp(), batch_size=len(batch[0]))


def perplexities(training: Training) -> Any:
    session = Session(training, module=Validates(), ignored=[RESUMING])
    metrics = session.fit(rarely(SIZES), validation=rarely((3, 2, 3))).trained.metrics
    module, validation = session.module, rarely((3, 2, 3))
    (after,) = session.validate(validation)
    if training.num_ranks > 1:
        return metrics, after, 0.0
    total = number = 0.0
    with torch.no_grad():
        for x, (labels, positions) in next(iter([validation._epochs[0]])):
            logits = module.student(x, position_ids=positions, use_cache=False).logits
            total += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="sum"
            ).item()
            number += int((labels != IGNORED).sum())
    return metrics, after, torch.tensor(total / number).exp().item()


@SLOW
def test_perplexity_of_all_tokens(tmp_path: Path) -> None:
    one, two = (replace(training, sizes=(SIZES,)) for training in (ALONE, WINDOWS))
    ((expected, after, by_hand),) = run(perplexities, one, num_ranks=1, folder=tmp_path / "alone")
    assert after["val_perplexity"] == pytest.approx(by_hand, rel=1e-12)
    assert abs(after["mean_of_means"] / by_hand - 1) > 1e-6
    assert expected.keys() >= {"perplexity_epoch", "val_perplexity", "val_teacher_perplexity"}
    for metrics, validated, _ in run(perplexities, two, folder=tmp_path / "together"):
        assert metrics == pytest.approx(expected, rel=1e-12)
        assert validated == pytest.approx(after, rel=1e-12)
