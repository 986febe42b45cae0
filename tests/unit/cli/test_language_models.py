"""``tspipe plan --student-model``: language models of which only the configuration is here."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, GPT2Config, LlamaConfig
from transformers import T5Config

from lightning_tspipe import DistillationLoss
from lightning_tspipe.cli import modules
from lightning_tspipe.cli.language import LanguageStep, at_narrow_places, profile_language_step
from lightning_tspipe.cli.main import main
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.step_profile import StepProfile

LENGTH, RATE = 12, 1e9
DEVICES = ("--devices", 2, "--flops", "1GFLOP/s", "--link", "1GB/s", "--length", LENGTH)


def llama(width: int, layers: int, *, words: int = 50, tied: bool = False) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=words, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied, pad_token_id=None,
    )  # fmt: skip


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    llama(16, 3).save_pretrained(tmp_path / "teacher")
    return tmp_path / "teacher"


@pytest.fixture
def student(tmp_path: Path) -> Path:
    llama(8, 2, tied=True).save_pretrained(tmp_path / "student")
    return tmp_path / "student"


def run(*arguments: object) -> int:
    return main(["plan", *map(str, arguments)])


class Distils(LightningModule):
    """The step of ``examples/language_model.py``, with weights."""

    def __init__(self, student: Path, teacher: Path | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.student = self.made(student, dtype).train()
        if teacher is not None:
            self.teacher = self.made(teacher, dtype).requires_grad_(requires_grad=False)
        self.criterion = DistillationLoss(chunk_size=1024)

    @staticmethod
    def made(folder: Path, dtype: torch.dtype) -> Any:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        tokens, positions, labels = batch
        inside = {"position_ids": positions, "use_cache": False}
        hidden = self.student.model(tokens, **inside).last_hidden_state
        with torch.no_grad():
            guide = self.teacher.model(tokens, **inside).last_hidden_state
        loss: Tensor = self.criterion(
            hidden, self.student.lm_head, guide, self.teacher.lm_head, labels
        ).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.student.parameters())


class Learns(Distils):
    def training_step(self, batch: list[Tensor]) -> Tensor:
        tokens, positions, labels = batch
        logits = self.student(tokens, position_ids=positions, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("alone", [False, True], ids=["distils", "learns"])
def test_a_configuration_has_the_costs_of_its_module(
    precision: Any, alone: bool, student: Path, teacher: Path
) -> None:
    dtype = torch.float32 if precision == "32-true" else torch.bfloat16
    step = LanguageStep(str(student), None if alone else str(teacher), LENGTH, 3, precision)
    found = profile_language_step(step, RATE)
    words, positions = torch.randint(50, (3, LENGTH)), torch.arange(LENGTH).repeat(3, 1)
    module = Learns(student, None, dtype) if alone else Distils(student, teacher, dtype)
    data = [[words, positions, words]]
    real = modules.measure(module, data, accelerator="cpu", flops_per_second=RATE)
    assert found.loss_working_bytes + found.loss_working_bytes_per_sample > 0
    without = replace(found, loss_working_bytes=0, loss_working_bytes_per_sample=0)
    assert without == real
    size = dtype.itemsize
    trained = sum(p.numel() for p in module.student.parameters())
    # Each parameter is read once, but for the embedding, which is the head, too.
    (tied,) = found.tied
    assert tied.num_bytes == tied.trainable_bytes == 50 * 8 * size
    counted = found.student.gradient_sums[-1] + found.loss_trainable_bytes
    assert counted == size * trained + tied.num_bytes
