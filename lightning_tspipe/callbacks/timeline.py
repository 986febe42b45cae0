"""A timeline of all ranks over a few steps of a real run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric.utilities import rank_zero_info
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_tspipe.callbacks.common import Callback, pipelined_of
from lightning_tspipe.callbacks.pictures import log_picture
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.plots import draw_timelines, plot_timelines
from lightning_tspipe.simulation.timeline import Timeline
from lightning_tspipe.strategy.training.pipelined import Pipelined


@dataclass(eq=False, repr=False)
class PipelineTimeline(Callback):
    """Records a window of steps, saves it as ``timeline.json`` and ``timeline.png``, logs metrics.

    At the end of the window the ranks exchange what they recorded, once, and the loggers get

    - ``timeline/bubble_ratio``: share of the ranks' time without work,
    - ``timeline/step_ms``: milliseconds per step,
    - ``timeline/rank0_idle_ms``: for each rank, milliseconds per step without work,
    - ``timeline/stage0_forward_ms``, ``timeline/stage0_backward_ms``,
      ``timeline/stage0_teacher_ms``: for each stage, mean milliseconds of one unit.

    The window's first and last step only frame the others, which the metrics are computed from.

    Loggers that take pictures (TensorBoard's, W&B's) get ``timeline/measured`` and, of a pipeline
    that was planned, ``timeline/plan``. Pictures are drawn where the epoch, the validation or the
    training ends: drawing takes a second, for which all ranks would wait within a step.

    ``tspipe timeline timeline.json`` says what the idle time went to. Ordinary strategies have no
    pipeline to draw: the callback says so and does nothing.

    Args:
        start_step: First recorded global step; the steps before it warm up.
        num_steps: Number of recorded steps.
        path: Folder for the two files; None takes the logger's folder, else the Trainer's
            ``default_root_dir``.

    Attributes:
        timeline: What was recorded, on global rank 0; None before the end of the window.

    Raises:
        ConfigurationError: A negative step or an empty window.
    """

    start_step: int = 5
    num_steps: int = 3
    path: str | Path | None = None

    def __post_init__(self) -> None:
        if self.start_step < 0 or self.num_steps < 1:
            raise ConfigurationError(
                f"start_step={self.start_step} must be at least 0, num_steps={self.num_steps} at "
                "least 1"
            )
        self._awaits = False  # a window that began and was not collected
        self._is_drawn = False
        self.timeline: Timeline | None = None
        self._folder: Path | None = None  # known once the window was collected

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._awaits, self._is_drawn, self.timeline, self._folder = False, False, None, None
        if pipelined_of(trainer) is None:
            rank_zero_info(
                f"PipelineTimeline: {type(trainer.strategy).__name__} has no pipeline to draw"
            )

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        pipelined, is_new = pipelined_of(trainer), not self._awaits and self._folder is None
        if pipelined is not None and is_new and trainer.global_step >= self.start_step:
            pipelined.record(self.num_steps)
            self._awaits = True

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        pipelined = pipelined_of(trainer)
        if pipelined is not None and self._awaits and pipelined.has_recording:
            self._collect(trainer, pipelined)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pipelined = pipelined_of(trainer)
        if pipelined is not None and self._awaits:
            self._collect(trainer, pipelined)  # training ended within the window
        if pipelined is not None and self.timeline is None:
            rank_zero_info(
                f"PipelineTimeline: training ended before step {self.start_step}; nothing to draw"
            )
        self._draw(trainer, has_ended=True)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._draw(trainer)  # what is known; other ranks may be gone

    def _draw(self, trainer: Trainer, *, has_ended: bool = False) -> None:
        """Draw what was recorded, once; the plan also if nothing was."""
        pipelined, timeline, folder = pipelined_of(trainer), self.timeline, self._folder
        if self._is_drawn or pipelined is None or not trainer.is_global_zero:
            return
        if timeline is None and not has_ended:
            return
        self._is_drawn = True
        plan = pipelined.plan
        if plan is not None:
            simulated = plan.simulate_recording(self.num_steps)
            log_picture(trainer, "timeline/plan", lambda: draw_timelines({"simulated": simulated}))
        if timeline is None or folder is None:
            return
        log_picture(trainer, "timeline/measured", lambda: draw_timelines({"measured": timeline}))
        try:
            plot_timelines({"": timeline}, folder / "timeline.png")
        except ConfigurationError as error:  # the training was fine, and the data is saved
            rank_zero_info(f"PipelineTimeline: can't draw: {error}")

    def _collect(self, trainer: Trainer, pipelined: Pipelined) -> None:
        """Exchange the window, on every rank; log and save it on rank 0."""
        # Both are collective, so all ranks must ask.
        timeline = pipelined.timeline()
        log_dir = trainer.log_dir
        self._awaits = False
        self._folder = Path(self.path or log_dir or trainer.default_root_dir)
        if not trainer.is_global_zero or timeline is None:
            return
        self.timeline = timeline
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "timeline.json").write_text(timeline.to_json(), encoding="utf-8")
        metrics = {f"timeline/{name}": value for name, value in timeline.figures().items()}
        # Not by ``pl_module.log``, which drops what falls between two of ``log_every_n_steps``.
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
