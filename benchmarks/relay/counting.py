"""How often the teacher ran, and what was read: counted on every rank, not estimated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from typing_extensions import override


class Counts(Callback):
    """Writes one file per rank at each end of an epoch.

    Args:
        folder: Where.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        engine = trainer.strategy.engine
        found = {
            "steps": trainer.fit_loop.total_batch_idx + 1,
            "forwards": dict(engine.forwards),
            "bytes_loaded": engine.bytes_loaded,
        }
        file = self._folder / f"rank{engine.rank}.json"
        part = file.with_suffix(".part")
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(file)
