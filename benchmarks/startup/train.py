"""One start: from the launch of the processes to the end of the first step.

    python -m benchmarks.startup.train METHOD NETWORK FOLDER

``LAUNCHED`` says when it was launched, in seconds of the system's clock. Each rank writes how long
each part has taken into ``FOLDER/RANK.json``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

LAUNCHED = "BENCHMARK_LAUNCHED"
STARTED = time.time()

import torch  # noqa: E402 - imports are a part of what is measured
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.profilers import Profiler  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from typing_extensions import override  # noqa: E402

LIGHTNING = time.time()

if sys.argv[1] != "ddp":
    import lightning_tspipe  # noqa: F401 - registers the strategies

PACKAGE = time.time()

from benchmarks.startup.modules import BYOL, ENTRIES, SAMPLES  # noqa: E402

IMPORTED = time.time()
PARTS = ("capture", "measure", "plan", "place")
RANKS = 2


class Watch(Profiler):
    """Adds up how long the parts of a strategy's set-up take."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._began: dict[str, float] = {}

    @override
    def start(self, action_name: str) -> None:
        self._began[action_name] = time.time()

    @override
    def stop(self, action_name: str) -> None:
        part = action_name.rpartition(".")[2]
        if action_name.startswith("[Strategy]") and part in self.seconds:
            self.seconds[part] += time.time() - self._began[action_name]


class Moments(Callback):
    """When the processes have met, and when the first step begins and ends."""

    def __init__(self) -> None:
        self.met = self.begins = self.ends = 0.0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.met = time.time()

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self.begins = time.time()

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.ends = time.time()


def main() -> None:
    """Train one step, and write."""
    method, network, folder = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    entry = ENTRIES[network]
    module = BYOL(entry)
    built = time.time()
    watch, moments = Watch(), Moments()
    trainer = Trainer(
        accelerator="cpu", strategy=method, devices=RANKS, max_steps=1, callbacks=[moments],
        profiler=watch, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    share = RANKS if method == "ddp" else 1
    data = TensorDataset(*entry.batch(SAMPLES))
    trainer.fit(module, DataLoader(data, batch_size=SAMPLES // share))
    launched = float(os.environ[LAUNCHED])
    setup = sum(watch.seconds.values())
    parts = {
        "python": STARTED - launched,  # of another rank: until this one has started it, too
        "imports": LIGHTNING - STARTED,
        "package": PACKAGE - LIGHTNING,
        "networks": IMPORTED - PACKAGE,
        "building": built - IMPORTED,
        "meeting": moments.met - built,
        "moving": moments.begins - moments.met,
        **watch.seconds,
        "step": moments.ends - moments.begins - setup,
        "whole": moments.ends - launched,
    }
    text = json.dumps({name: round(seconds, 3) for name, seconds in parts.items()})
    (Path(folder) / f"{trainer.global_rank}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
