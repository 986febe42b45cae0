"""Host memory of ranks that read pretrained models, over what they keep of them.

    python benchmarks/language/loading.py --devices 2 [--json FILE]

A real training on the CPU: a Llama teaches one of a quarter of its size, both written by
transformers in several files. Memory is resident memory beyond what there was before the models
were built: its peak when the weights are in place, and (``first_step``) before the first backward
of a batch of eight tokens, with the loss and what a step sets up.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typing_extensions import override

from benchmarks.environment import environment_of
from lightning_tspipe import DistillationLoss, TSPipeStrategy, pretrained
from lightning_tspipe.runtime.weights.materializing import Materializer

_WORDS, _TOKENS = 32_000, 8
_FOLDER = "TSPIPE_BENCHMARK_MODELS"  # ranks that are started anew read the same ones


def write_models(folder: Path) -> None:
    """A teacher of 0.9 GB and a student of a quarter, with random weights, in files of 100 MB."""
    for role, layers, width in (("teacher", 12, 1024), ("student", 8, 512)):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=_WORDS, hidden_size=width, intermediate_size=3 * width, head_dim=64,
            num_hidden_layers=layers, num_attention_heads=width // 64,
            num_key_value_heads=width // 128, tie_word_embeddings=False,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder / role, max_shard_size="100MB")


class Distillation(LightningModule):
    """Two pretrained models."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.criterion = DistillationLoss()
        self.student: Any = None

    @override
    def configure_model(self) -> None:
        if self.student is None:
            teacher = pretrained(AutoModelForCausalLM, self.folder / "teacher")
            self.teacher = teacher.requires_grad_(requires_grad=False)
            self.student = pretrained(AutoModelForCausalLM, self.folder / "student").train()

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.student.model(batch, use_cache=False).last_hidden_state
        with torch.no_grad():
            guide = self.teacher.model(batch, use_cache=False).last_hidden_state
        heads = self.student.lm_head, self.teacher.lm_head
        found = self.criterion(hidden, heads[0], guide, heads[1], batch)
        return found.loss  # type: ignore[no-any-return]

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.student.parameters(), lr=1e-4)


class Memory(Callback):
    """Notes what a rank needed more, and what it keeps."""

    def __init__(self) -> None:
        self.loaded, self.stepped, self.share = 0, 0, 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._before = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is now
        fill = Materializer.fill

        def filling(materializer: Materializer, keep: Callable[[str], bool]) -> None:
            fill(materializer, keep)
            self.loaded = _memory("VmHWM") - self._before

        Materializer.fill = filling  # type: ignore[method-assign,assignment]

    @override
    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        if not self.share:
            self.stepped = _memory("VmHWM") - self._before
            self.share = sum(p.nbytes for p in pl_module.parameters() if not p.is_meta)


def _memory(what: str) -> int:
    """Bytes of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith(f"{what}:"))
    return 1024 * int(found)


def measure(devices: int, folder: Path) -> list[dict[str, float]]:
    """For each rank, on the first one."""
    torch.set_num_threads(1)
    memory = Memory()
    trainer = Trainer(
        strategy=TSPipeStrategy(schedule="1f1b", weights="synchronous", costs="flops"),
        accelerator="cpu", devices=devices, max_steps=1, accumulate_grad_batches=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[memory],
    )  # fmt: skip
    batches: Any = [torch.arange(_TOKENS)[None]] * 2
    trainer.fit(Distillation(folder), DataLoader(batches, batch_size=None))
    numbers = torch.tensor([memory.loaded, memory.stepped, memory.share])
    found = [torch.zeros_like(numbers) for _ in range(devices)]
    torch.distributed.all_gather(found, numbers)
    if not trainer.is_global_zero:
        return []
    return [
        {"load": loaded / share, "first_step": stepped / share, "share_bytes": share}
        for loaded, stepped, share in (each.tolist() for each in found)
    ]


def main() -> None:
    """Measure, print, add to a file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--json", type=Path, help="add the result to this file")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="models-") as temporary:
        folder = Path(os.environ.setdefault(_FOLDER, temporary))
        if not any(folder.iterdir()):
            write_models(folder)
        ranks = measure(options.devices, folder)
    if not ranks:
        return
    path = options.json
    report = json.loads(path.read_text()) if path and path.exists() else {}
    report["environment"] = environment_of(("torch", "lightning", "transformers"))
    report[f"{options.devices} ranks"] = {
        "load_host_memory_over_share": max(rank["load"] for rank in ranks),
        "ranks": ranks,
    }
    print(json.dumps(report, indent=2))
    if path:
        path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
