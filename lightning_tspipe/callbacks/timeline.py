"""What every rank did when, for a few steps of a real run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities import rank_zero_info
from typing_extensions import override

from lightning_tspipe.callbacks.common import Callback, pipelined_of
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.plots import plot_timeline

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class PipelineTimeline(Callback):
    """Records a window of steps and saves it as ``timeline.json`` and ``timeline.png``.

    Ordinary strategies have no pipeline to draw: the callback says so and does nothing.

    Args:
        start_step: First recorded global step; the steps before it warm up.
        num_steps: Number of recorded steps.
        path: Folder for the two files; None takes the logger's folder, else the Trainer's
            ``default_root_dir``.

    Raises:
        ConfigurationError: A negative step or an empty window.
    """

    def __init__(
        self, start_step: int = 5, num_steps: int = 3, path: str | Path | None = None
    ) -> None:
        if start_step < 0 or num_steps < 1:
            raise ConfigurationError(
                f"start_step={start_step} must be at least 0, num_steps={num_steps} at least 1"
            )
        self.start_step = start_step
        self.num_steps = num_steps
        self.path = path
        self._is_recording = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_recording = False
        if pipelined_of(trainer) is None:
            rank_zero_info(
                f"PipelineTimeline: {type(trainer.strategy).__name__} has no pipeline to draw"
            )

    @override
    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        pipelined = pipelined_of(trainer)
        if pipelined is None or self._is_recording or trainer.global_step < self.start_step:
            return
        pipelined.record(self.num_steps)
        self._is_recording = True

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pipelined = pipelined_of(trainer)
        if pipelined is None:
            return
        # Both are agreed between the ranks, so all of them must ask.
        timeline = pipelined.timeline()
        log_dir = trainer.log_dir
        if not trainer.is_global_zero:
            return
        if timeline is None:
            rank_zero_info(
                f"PipelineTimeline: training ended before step {self.start_step}; nothing to draw"
            )
            return
        folder = Path(self.path or log_dir or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "timeline.json").write_text(timeline.to_json(), encoding="utf-8")
        plot_timeline(timeline, folder / "timeline.png")
