"""Does a student learn more from a teacher than alone, and the same as on one device?

    python benchmarks/language/accuracy.py [--seeds 0 1 2] [--json FILE]

Small Llamas of bytes, on the documentation of this project. For each seed a teacher is trained,
and then two students that start alike: one by the teacher, one by the text alone. ``updates`` many
of the first one are repeated in float64, on one device and by two ranks in windows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM
from typing_extensions import override

from benchmarks.environment import environment_of, show
from lightning_tspipe import DistillationLoss, Perplexity

DOCUMENTS = Path(__file__).resolve().parents[2] / "docs"
WORDS, LENGTH, SEQUENCES, WINDOW = 256, 128, 8, 2
UPDATES, OF_TEACHER = 200, 1200
PACKAGES = ("torch", "transformers", "lightning")


def sequences(*, held_out: bool) -> Tensor:
    """The bytes of the documentation, one of ten sequences held out; shape (number, LENGTH)."""
    text = b"".join(file.read_bytes() for file in sorted(DOCUMENTS.rglob("*.md")))
    number = len(text) // LENGTH
    rows = torch.frombuffer(bytearray(text[: number * LENGTH]), dtype=torch.uint8)
    mine = torch.arange(number) % 10 == 0
    return rows.view(number, LENGTH)[mine if held_out else ~mine].long()


def batches(seed: int, number: int) -> list[Tensor]:
    """Shuffled batches of the training's text."""
    rows = sequences(held_out=False)
    made = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(rows), generator=made) for _ in range(9)])
    return list(rows[order[: number * SEQUENCES]].split(SEQUENCES))


def model(layers: int, seed: int) -> LlamaForCausalLM:
    """A model with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=48 * layers, intermediate_size=96 * layers,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=layers < 4,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Learns(LightningModule):
    """A student, by a teacher or (alpha=0) by the text alone.

    Args:
        student: The student.
        teacher: The teacher.
        alpha: Share of the teacher.
        lr: Learning rate.
    """

    def __init__(
        self, student: LlamaForCausalLM, teacher: LlamaForCausalLM, alpha: float, lr: float = 2e-3
    ) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher.requires_grad_(requires_grad=False)
        self.criterion = DistillationLoss(temperature=1.0, alpha=alpha)
        self.perplexity, self.lr = Perplexity(), lr
        self.losses: list[float] = []

    def compare(self, tokens: Tensor) -> Any:  # noqa: ANN401 - a named tuple
        """The loss of a batch."""
        hidden = self.student.model(tokens, use_cache=False).last_hidden_state
        with torch.no_grad():
            guide = self.teacher.model(tokens, use_cache=False).last_hidden_state
        labels = tokens.roll(-1, 1).index_fill(1, torch.tensor([LENGTH - 1]), -100)
        return self.criterion(hidden, self.student.lm_head, guide, self.teacher.lm_head, labels)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.compare(batch).loss  # type: ignore[no-any-return]

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_rank == 0:
            self.losses.append(float(outputs["loss"]))

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        found = self.compare(batch)
        self.perplexity(found.cross_entropy, found.num_tokens)
        self.log("perplexity", self.perplexity)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.student.parameters(), lr=self.lr)


def train(module: Learns, seed: int, updates: int, **options: Any) -> float:  # noqa: ANN401
    """Train; held-out perplexity, if it is on one device."""
    trainer = Trainer(
        accelerator="cpu", **{"devices": 1} | options, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0,
    )  # fmt: skip
    data: Any = batches(seed, updates * trainer.accumulate_grad_batches)
    trainer.fit(module, DataLoader(data, batch_size=None))
    if trainer.num_devices > 1:
        return float("nan")
    held_out: Any = sequences(held_out=True).split(64)
    (found,) = trainer.validate(module, DataLoader(held_out, batch_size=None), verbose=False)
    return float(found["perplexity"])


def of_seed(seed: int) -> dict[str, float]:
    """Perplexities of a teacher, of a student that it has taught, and of one alone."""
    teacher = model(4, seed)
    found = {"teacher": train(Learns(teacher, model(1, seed), 0.0, 1e-3), seed, OF_TEACHER)}
    for name, alpha in (("distilled", 0.9), ("alone", 0.0)):
        student = Learns(model(2, seed + 1), teacher, alpha)
        found[name] = train(student, seed + 2, UPDATES)
    return found


def again(number: int, file: Path) -> None:
    """The same updates on so many devices, in float64."""
    module = Learns(model(2, 1), model(4, 0), 0.5)
    strategy: Any = {"strategy": "tspipe_1f1b"} if number > 1 else {}
    strategy |= {"accumulate_grad_batches": WINDOW, "precision": "64-true"}
    train(module, 2, UPDATES, devices=number, **strategy)
    if module.trainer.global_rank == 0:
        file.write_text(json.dumps(module.losses), encoding="utf-8")


def difference() -> float:
    """The largest relative difference of losses, of two ranks and of one device."""
    losses: list[list[float]] = []
    with TemporaryDirectory(prefix="language-") as folder:
        for number in (1, 2):
            file = Path(folder) / f"{number}.json"
            command = [sys.executable, "-m", "benchmarks.language.accuracy", "--again"]
            subprocess.run(  # noqa: S603 - our own program
                [*command, str(number), str(file)], check=True, stdout=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            losses.append(json.loads(file.read_text(encoding="utf-8")))
    one, two = losses
    return max(abs(a - b) / abs(a) for a, b in zip(one, two, strict=True))


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--again", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.again is not None:
        again(int(options.again[0]), Path(options.again[1]))
        return 0
    perplexities = {}
    for seed in options.seeds:
        perplexities[seed] = of_seed(seed)
        print(seed, perplexities[seed], file=sys.stderr, flush=True)
    report = {
        "environment": environment_of(PACKAGES), "updates": UPDATES,
        "held_out_perplexity": perplexities,
        "figures": {
            "distilled_over_alone": max(p["distilled"] / p["alone"] for p in perplexities.values()),
            "difference_of_losses": difference(),
        },
    }  # fmt: skip
    show(report, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
