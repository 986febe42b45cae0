"""A timeline of all ranks, recorded over a few steps of a real run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities import rank_zero_info
from typing_extensions import override

from lightning_tspipe.callbacks.common import Callback, pipelined_of
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.plots import plot_timeline
from lightning_tspipe.simulation.figures import figures

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_tspipe.simulation.timeline import Timeline
    from lightning_tspipe.strategy.training.pipelined import Pipelined


class PipelineTimeline(Callback):
    """Records a window of steps, saves it as ``timeline.json`` and ``timeline.png``, logs metrics.

    At the end of the window the ranks exchange what they recorded, once, and the loggers get

    - ``timeline/bubble_ratio``: share of the ranks' time without work,
    - ``timeline/step_ms``: milliseconds per step,
    - ``timeline/rank0_idle_ms``: for each rank, milliseconds per step without work,
    - ``timeline/stage0_forward_ms``, ``timeline/stage0_backward_ms``,
      ``timeline/stage0_teacher_ms``: for each stage, mean milliseconds of one unit.

    The window's first and last step only frame the others, which the metrics are computed from.

    ``tspipe timeline timeline.json`` says what the idle time went to. The picture is drawn when
    training ends: drawing takes a second, for which all ranks would wait. Ordinary strategies have
    no pipeline to draw: the callback says so and does nothing.

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
        self._is_collected = False
        self._recorded: Timeline | None = None
        self._folder = Path()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_recording = self._is_collected = False
        self._recorded = None
        if pipelined_of(trainer) is None:
            rank_zero_info(
                f"PipelineTimeline: {type(trainer.strategy).__name__} has no pipeline to draw"
            )

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        pipelined = pipelined_of(trainer)
        if pipelined is None or self._is_recording or trainer.global_step < self.start_step:
            return
        pipelined.record(self.num_steps)
        self._is_recording = True

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pipelined = pipelined_of(trainer)
        is_mine = self._is_recording and not self._is_collected  # there may be several windows
        if pipelined is not None and is_mine and pipelined.has_recording:
            self._collect(trainer, pipelined)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pipelined = pipelined_of(trainer)
        if pipelined is None:
            return
        if self._is_recording and not self._is_collected:
            self._collect(trainer, pipelined)  # training ended within the window
        if not trainer.is_global_zero:
            return
        if self._recorded is None:
            rank_zero_info(
                f"PipelineTimeline: training ended before step {self.start_step}; nothing to draw"
            )
            return
        try:
            plot_timeline(self._recorded, self._folder / "timeline.png")
        except ConfigurationError as error:  # the training was fine, and the data is saved
            rank_zero_info(f"PipelineTimeline: no picture: {error}")

    def _collect(self, trainer: Trainer, pipelined: Pipelined) -> None:
        """Exchange the window, on every rank; log and save it on rank 0."""
        # Both are collective, so all ranks must ask.
        timeline = pipelined.timeline()
        log_dir = trainer.log_dir
        self._is_collected = True
        if not trainer.is_global_zero or timeline is None:
            return
        self._recorded = timeline
        self._folder = Path(self.path or log_dir or trainer.default_root_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "timeline.json").write_text(timeline.to_json(), encoding="utf-8")
        metrics = {f"timeline/{name}": value for name, value in figures(timeline).items()}
        # Not by ``pl_module.log``, which drops what falls between two of ``log_every_n_steps``.
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
