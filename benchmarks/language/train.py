"""One training of a small pair of Llamas, by one method.

    python -m benchmarks.language.train METHOD FILE

Each rank writes what it holds into ``FILE.RANK``, and rank 0 the seconds of each window but the
first into ``FILE``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM
from typing_extensions import override

from benchmarks.crews.messages import Bytes
from benchmarks.language.two_phase import two_phases
from benchmarks.schedules.emulation import Clock
from benchmarks.throughput.memory import count_at_step
from lightning_tspipe import DistillationLoss, TSPipeStrategy

WORDS, TOKENS, SEQUENCES = 2048, 128, 2
WINDOW, WINDOWS = 4, 8
DEVICES = 2
CHUNK = 64
STATE_LIMIT = 0.6


def model(layers: int, width: int) -> LlamaForCausalLM:
    """A model with random weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=width, intermediate_size=3 * width,
            num_hidden_layers=layers, num_attention_heads=width // 64,
            num_key_value_heads=width // 64, tie_word_embeddings=False,
        )
    )  # fmt: skip


class Distillation(LightningModule):
    """A teacher of 39 million parameters and a student of 9."""

    def __init__(self) -> None:
        super().__init__()
        self.student = model(4, 384)
        self.teacher = model(10, 576).requires_grad_(requires_grad=False)
        self.criterion = DistillationLoss(chunk_size=CHUNK)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.student.model(batch, use_cache=False).last_hidden_state
        with torch.no_grad():
            guide = self.teacher.model(batch, use_cache=False).last_hidden_state
        labels = batch.roll(-1, 1)
        heads = self.student.lm_head, self.teacher.lm_head
        return self.criterion(hidden, heads[0], guide, heads[1], labels).loss  # type: ignore[no-any-return]

    @override
    def on_train_start(self) -> None:
        self.teacher.train(mode=False)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.student.parameters(), lr=1e-4)


class Sharded(Distillation):
    """The same with both models sharded by FSDP2, layer by layer, as its guide has it.

    Heads are sharded parameters, so the models make whole logits.
    """

    @override
    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        for network in (self.student, self.teacher):
            fully_shard(network, mesh=mesh["data_parallel"])

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            guide = self.teacher(batch, use_cache=False).logits.flatten(0, 1)
        own = self.student(batch, use_cache=False).logits.flatten(0, 1)
        labels = batch.roll(-1, 1).flatten()
        p, q = functional.log_softmax(guide, 1), functional.log_softmax(own, 1)
        divergence = functional.kl_div(q, p, log_target=True, reduction="batchmean")
        return 0.5 * divergence + 0.5 * functional.nll_loss(q, labels)


def main() -> None:
    """Train, and write."""
    method, name = sys.argv[1:]
    file = Path(name)
    torch.set_num_threads(1)
    is_pipelined = method in {"tspipe", "two_phase"}
    strategies: dict[str, Any] = {
        "ddp": "ddp",
        "fsdp2": ModelParallelStrategy(data_parallel_size=DEVICES, tensor_parallel_size=1),
    }
    strategy: Any = strategies.get(method)
    if is_pipelined:
        strategy = TSPipeStrategy(schedule="1f1b", weights="synchronous", state_limit=STATE_LIMIT)
    callbacks: list[Callback] = [Clock(WINDOW, file)]
    if method == "two_phase":
        callbacks.append(two_phases())
    module = Sharded() if method == "fsdp2" else Distillation()
    trainer = Trainer(
        accelerator="cpu", strategy=strategy, devices=DEVICES, accumulate_grad_batches=WINDOW,
        callbacks=callbacks, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    logits = 2 * CHUNK * WORDS * 4 if method != "fsdp2" else 4 * TOKENS * WORDS * 4

    def write(found: Bytes) -> None:
        has_loss = not is_pipelined or trainer.global_rank == 0
        amounts = asdict(found) | {"logits": logits * has_loss}
        held = file.with_suffix(f".{trainer.global_rank}")
        held.write_text(json.dumps(amounts), encoding="utf-8")

    count_at_step(module, write)
    shares = 1 if is_pipelined else DEVICES  # of a batch; each process gets its own
    generator = torch.Generator().manual_seed(0)
    batches: Any = [
        torch.randint(WORDS, (SEQUENCES // shares, TOKENS), generator=generator)
        for _ in range(WINDOW * WINDOWS * shares)
    ]
    trainer.fit(module, DataLoader(batches, batch_size=None))


if __name__ == "__main__":
    main()
