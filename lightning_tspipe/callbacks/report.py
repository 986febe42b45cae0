"""A report at the end of a run."""

from __future__ import annotations

import platform
import shlex
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_tspipe.callbacks.common import Callback, pipelined_of
from lightning_tspipe.callbacks.metric_history import MetricHistory
from lightning_tspipe.callbacks.throughput import PipelineThroughputMonitor
from lightning_tspipe.callbacks.timeline import PipelineTimeline
from lightning_tspipe.pages.report import Report
from lightning_tspipe.plots import timed_curves
from lightning_tspipe.simulation.timeline import Timeline

FILE = "report.html"
_CLOCK = "elapsed"
_PACKAGES = ("lightning-tspipe", "lightning", "torch")


@dataclass(eq=False, repr=False)
class RunReport(Callback):
    """Writes ``report.html`` when training ends, however it ends: one file for any browser.

    It has the plan, a timeline of some steps to zoom, throughput, the memory of each rank, the
    accuracies and losses that were logged, and how the run was started. It says what is missing,
    and why.

    A Trainer without ``PipelineThroughputMonitor`` or ``PipelineTimeline`` gets one of each, which
    log what they measure; add your own for other settings. A ``KNNEvaluator`` or
    ``OnlineLinearProbe`` gives accuracies. Curves need ``pip install lightning-tspipe[plots]``.
    They go on where a checkpoint ends.

    Under ordinary strategies there is a report without a plan and a timeline.

    Args:
        path: Folder of the report; None takes the logger's folder, else the Trainer's
            ``default_root_dir``.

    Attributes:
        file: The report, once training has begun.
    """

    path: str | Path | None = None

    def __post_init__(self) -> None:
        self.file: Path | None = None
        self._history: MetricHistory | None = None
        self._restored: dict[str, Any] = {}  # by a checkpoint, for the coming fit
        self._over: dict[str, Any] = {}  # of a fit that is over, for a checkpoint
        self._mark = 0.0

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._over if self._history is None else {"points": self._history.points}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        for own in (PipelineTimeline(path=self.path), PipelineThroughputMonitor()):
            if not any(isinstance(callback, type(own)) for callback in callbacks):
                # Before checkpoints are written, which is what the last callbacks do.
                callbacks.insert(callbacks.index(self) + 1, own)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = trainer.log_dir  # collective, so it can't be asked for once something fails
        self.file = Path(self.path or folder or trainer.default_root_dir) / FILE
        self._mark = time.monotonic()
        self._history = MetricHistory(trainer.default_root_dir)
        self._history.points |= {k: list(v) for k, v in self._restored.get("points", {}).items()}
        self._restored = {}
        trainer.loggers = [*trainer.loggers, self._history]

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module, None)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._write(trainer, pl_module, exception)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._let_go(trainer)

    def _let_go(self, trainer: Trainer) -> MetricHistory | None:
        """The loggers are the user's own again; returns the history, once."""
        history, self._history = self._history, None
        if history is not None:
            self._over = {"points": history.points}
            trainer.loggers = [logger for logger in trainer.loggers if logger is not history]
        return history

    def _write(
        self, trainer: Trainer, pl_module: LightningModule, error: BaseException | None
    ) -> None:
        history = self._let_go(trainer)
        if history is None or self.file is None or not trainer.is_global_zero:
            return
        try:
            text = self._report(trainer, pl_module, history, error).to_html()
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(text, encoding="utf-8")
        # The training is worth more than its report, and its own error more than this one.
        except Exception as failure:  # noqa: BLE001
            rank_zero_warn(f"RunReport: {type(failure).__name__}: {failure}; no report is written")
            return
        rank_zero_info(f"Report: {self.file}")

    def _report(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        history: MetricHistory,
        error: BaseException | None,
    ) -> Report:
        pipelined = pipelined_of(trainer)
        clock = sorted(history.points.get(_CLOCK, []))
        points = {name: found for name, found in history.points.items() if name != _CLOCK}
        timeline = _timeline_of(trainer)
        details = ""
        if isinstance(error, Exception):
            details = "".join(traceback.format_exception(error))
        return Report(
            title=type(pl_module).__name__,
            outcome=_outcome(error),
            details=details,
            facts=self._facts(trainer, pl_module),
            curves=timed_curves(points, clock),
            plan=None if pipelined is None else pipelined.plan,
            table="" if pipelined is None else pipelined.table,
            timeline=timeline,
            absent=_absent(trainer, is_pipelined=pipelined is not None),
        )

    def _facts(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, str]:
        """When, where and how, by name."""
        pipelined, strategy = pipelined_of(trainer), type(trainer.strategy).__name__
        if pipelined is None:
            devices = f"{trainer.world_size}"
        else:
            devices = f"{pipelined.num_ranks}, replicas: {pipelined.data_parallel_size}"
        kind = pl_module.device.type
        if kind == "cuda":
            kind = torch.cuda.get_device_name(pl_module.device)
        ended = datetime.now().astimezone()
        seconds = timedelta(seconds=round(time.monotonic() - self._mark))
        moment = f"{ended:%Y-%m-%d %H:%M}"
        return {
            "ended": f"{moment}, after {seconds}; {trainer.global_step} steps, "
            f"{trainer.current_epoch} whole epochs",
            "command": shlex.join(["python", *sys.argv]),
            "strategy": strategy,
            "devices of a pipeline": devices,
            "kind of device": kind,
            "precision": str(trainer.precision),
            "batches per update": str(trainer.accumulate_grad_batches),
            "versions": ", ".join(
                [f"Python {platform.python_version()}", *(f"{p} {version(p)}" for p in _PACKAGES)]
            ),
        }


def _timeline_of(trainer: Trainer) -> Timeline | None:
    """What a callback has recorded last; None if nothing was."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    found = [each.timeline for each in callbacks if isinstance(each, PipelineTimeline)]
    return next((timeline for timeline in reversed(found) if timeline is not None), None)


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    if not isinstance(error, Exception):  # by a key or a signal
        return f"stopped: {type(error).__name__}"
    text = str(error).partition("\n")[0]
    return f"failed: {type(error).__name__}" + f": {text}" * bool(text)


def _absent(trainer: Any, *, is_pipelined: bool) -> dict[str, str]:
    """Why a part of the report may be missing, by its heading."""
    callbacks = trainer.callbacks
    monitor = next(each for each in callbacks if isinstance(each, PipelineThroughputMonitor))
    timeline = next(each for each in callbacks if isinstance(each, PipelineTimeline))
    measured = (
        f"Training ended before the monitor's {monitor.window} batches were over. Of more, "
        f"something is logged every {trainer.log_every_n_steps} steps: "
        "Trainer(log_every_n_steps=...)."
    )
    absent = {
        "Throughput": measured,
        "Memory": measured,
        "Accuracy": "None was logged. KNNEvaluator and OnlineLinearProbe log the accuracy of the "
        "features, or log your own as val_acc.",
        "Timeline": f"Training ended before step {timeline.start_step}, from which on steps are "
        "recorded.",
    }
    if not is_pipelined:
        nothing = f"{type(trainer.strategy).__name__} has no pipeline."
        absent |= {"Plan": nothing, "Timeline": nothing}
    else:
        absent["Plan"] = "Training ended before the first batch was over."
    return absent
