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
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, T5Config

from lightning_tspipe import DistillationLoss
from lightning_tspipe.cli import modules
from lightning_tspipe.cli.language import LanguageStep, at_narrow_places, profile_language_step
from lightning_tspipe.cli.main import main
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.step_profile import StepProfile
from tests.choosing import some_of

LENGTH, RATE = 12, 1e9
DEVICES = ("--devices", 2, "--flops", "1GFLOP/s", "--link", "1GB/s", "--length", LENGTH)


def llama(width: int, layers: int, *, words: int = 50, tied: bool = False) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=words, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied, pad_token_id=None,
    )  # fmt: skip


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    llama(16, 2).save_pretrained(tmp_path / "teacher")
    return tmp_path / "teacher"


@pytest.fixture
def student(tmp_path: Path) -> Path:
    llama(8, 1, tied=True).save_pretrained(tmp_path / "student")
    return tmp_path / "student"


@pytest.fixture
def costs(student: Path, teacher: Path) -> StepProfile:
    return profile_language_step(LanguageStep(str(student), str(teacher), LENGTH), RATE)


def nbytes(folder: Path) -> int:
    """Of all parameters of a model, in float32, and of the buffers that it reads."""
    model = Distils.made(folder, torch.float32)
    buffers = [b for name, b in model.named_buffers() if not name.endswith("original_inv_freq")]
    return sum(t.nbytes for t in (*model.parameters(), *buffers))


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
        make: Any = AutoModelForCausalLM.from_config
        return make(AutoConfig.from_pretrained(folder), dtype=dtype)

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


@pytest.mark.parametrize(
    ("precision", "alone"),
    some_of(
        [("32-true", False), ("bf16-true", False), ("32-true", True), ("bf16-true", True)],
        slow=[("32-true", False), ("bf16-true", True)],
    ),
)
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


def test_memory_is_that_of_the_parameters(costs: StepProfile, student: Path, teacher: Path) -> None:
    whole, embedding = nbytes(student) + nbytes(teacher), 50 * 8 * 4
    trained = sum(p.nbytes for p in Distils.made(student, torch.float32).parameters())
    window: dict[str, Any] = {"window": 4, "weights": "synchronous"}
    for num_ranks, schedule, copies, options in (
        (1, "sequential", 1, {}),
        (2, "gpipe", 2, {}),  # the embedding is on rank 1, and the head with the loss on rank 0
        (2, "1f1b", 2, window),
        (2, "zbv", 1, window),  # rank 0 has the first stage, too
    ):
        plan = costs.plan(num_ranks, schedule=schedule, **options)
        use, more = plan.memory, (copies - 1) * embedding
        assert use is not None
        assert sum(use.parameters) + sum(use.teacher) == whole + more
        assert sum(use.gradients) == trained + more
        assert sum(use.optimizer) == 2 * (trained + more)
        assert sum(plan.state_bytes) == whole + 3 * trained + 4 * more


def test_the_loss_needs_two_chunks_of_logits(
    costs: StepProfile, student: Path, teacher: Path
) -> None:
    # All tokens are in one chunk, and the head's gradient is as large as its sums.
    assert costs.loss_working_bytes == 2 * LENGTH * 50 * 4
    tokens, head = 3, 50 * 8
    step = LanguageStep(str(student), str(teacher), LENGTH, 2, "bf16-true", chunk_size=tokens)
    found = profile_language_step(step, RATE)
    assert found.loss_working_bytes == 2 * tokens * 50 * 4 + head * (4 - 2)
    assert found.loss_trainable_bytes == 2 * head


def test_logits_of_a_model_alone_grow_with_the_batch(student: Path) -> None:
    step = LanguageStep(str(student), None, LENGTH, 2)
    found = profile_language_step(step, RATE)
    assert found.loss_working_bytes_per_sample == LENGTH * 50 * (4 + 3 * 4)
    held = [
        profile.plan(1, schedule="sequential").memory_bytes[0]
        for profile in (found.with_batch(4), replace(found.with_batch(4), loss_working_bytes=7))
    ]
    assert held[1] - held[0] == 7
    plain = replace(found, loss_working_bytes_per_sample=0).with_batch(4)
    logits = 4 * found.loss_working_bytes_per_sample
    assert held[0] - plain.plan(1, schedule="sequential").memory_bytes[0] == logits


def test_cuts_are_where_least_is_sent(costs: StepProfile) -> None:
    narrow = at_narrow_places(costs)
    atoms = narrow.student.atoms
    behind = [one.name for one in atoms[:-1] if not one.joined]
    assert any("o_proj" in name for name in behind)
    assert any("down_proj" in name for name in behind)
    assert not any(part in name for name in behind for part in ("k_proj", "gate_proj", "up_proj"))
    assert narrow.teacher is not None
    assert [replace(one, joined=False) for one in atoms] == list(costs.student.atoms)


def test_whether_models_fit(
    student: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ("--teacher-model", teacher, "--student-model", student / "config.json")
    saved, profile = tmp_path / "plan.json", tmp_path / "profile.json"
    ways = ("--window", 4, "--memory", "1MB", "--save", saved, "--save-profile", profile)
    assert run(*models, *DEVICES, *ways) == 0
    answer, alone, *rows = capsys.readouterr().out.splitlines()
    plan = Plan.from_json(saved.read_text())
    rank = max((0, 1), key=plan.memory_bytes.__getitem__)
    held = f"{plan.memory_bytes[rank] / 1e6:.1f} MB"
    assert answer.startswith(f"fits: yes. Rank {rank} needs most of its memory, {held} of 1.0 MB (")
    whole = nbytes(student) + nbytes(teacher)
    assert re.search(r"\(DDP\): \d+\.\d MB of parameters", alone)
    assert StepProfile.from_json(profile.read_text()).state_bytes > whole
    assert {row.lstrip("* ").split()[0] for row in rows[1:7]} == {
        "tspipe", "gpipe", "sequential", "1f1b", "interleaved", "zbv",
    }  # fmt: skip
    least = min(plan.memory_bytes)
    options = ("--devices", 2, "--window", 4, "--schedule", "1f1b")
    assert run(profile, *options, "--memory", f"{least // 2000}kB") == 2
    told = capsys.readouterr()
    assert told.out == "fits: no\n"
    assert "would need" in told.err


def changed(folder: Path, **values: Any) -> Path:
    """Another folder, with another configuration."""
    other = folder.with_name("changed")
    other.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | values))
    return other


def test_what_is_no_pair_of_language_models(
    student: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: object) -> str:
        assert run(*DEVICES, *arguments) == 2
        return capsys.readouterr().err

    assert f"there is no folder or file {tmp_path}/none" in refused(
        "--student-model", tmp_path / "none"
    )
    (tmp_path / "empty").mkdir()
    assert "give a folder with the model's config.json" in refused(
        "--student-model", tmp_path / "empty"
    )
    T5Config(num_layers=1).save_pretrained(tmp_path / "t5")
    assert "type 't5', which transformers cannot build as a causal language model" in refused(
        "--student-model", tmp_path / "t5"
    )
    larger = changed(teacher, vocab_size=64)
    words = refused("--student-model", student, "--teacher-model", larger)
    assert "has 50 words, and" in words
    assert "both need the same tokenizer" in words
    assert "--length 0" in refused("--student-model", student, "--length", 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--flops", "1TFLOP/s"), "nothing to plan: give FILE.py, or a --student-model"),
        (("--student-model", "a"), "as in --flops 150TFLOP/s"),
        (("--teacher-model", "a"), "needs a --student-model"),
        (("file.py", "--student-model", "a"), "give file.py or --student-model, not both"),
        (
            ("--student-model", "a", "--flops", "1TFLOP/s", "--schedule", "relay"),
            "give FILE.py instead of --student-model",
        ),
    ],
)
def test_options_that_contradict_each_other(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments, "--devices", 2) == 2
    assert words in capsys.readouterr().err


def test_a_name_without_a_connection(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co'")

    monkeypatch.setattr(AutoConfig, "from_pretrained", offline)
    assert run("--student-model", "someone/model", *DEVICES) == 2
    assert "no configuration of 'someone/model' could be read: We couldn't" in (
        told := capsys.readouterr().err
    )
    assert "give a folder with the model's config.json" in told


def test_a_model_of_another_family(tmp_path: Path) -> None:
    GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=50, n_positions=LENGTH).save_pretrained(
        tmp_path / "gpt2"
    )
    found = profile_language_step(LanguageStep(str(tmp_path / "gpt2"), None, LENGTH), RATE)
    assert found.student.num_atoms > 2
    assert [tied.with_loss for tied in found.tied] == [False]
