"""Early stopping and best checkpoints of each head of a ``StudentFanout``."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from typing_extensions import override

from lightning_tspipe.callbacks.common import Callback, pipelined_of
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.heads import StudentFanout

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

log = logging.getLogger("lightning_tspipe")

Mode = Literal["min", "max"]


@dataclass
class _Best:
    """The best value of one head, and the number of checks since then."""

    value: float = math.nan
    waited: int = 0


class _EachHead(Callback):
    """Checks one metric of each head after every validation, or else after every training epoch."""

    decides_by_metrics = True

    def __init__(self, monitor: str, mode: Mode, min_delta: float = 0.0) -> None:
        if mode not in {"min", "max"}:
            raise ConfigurationError(f"mode={mode!r}: 'min' or 'max'")
        if min_delta < 0:
            raise ConfigurationError(f"min_delta={min_delta} is negative")
        self.monitor = monitor
        self.mode = mode
        self.min_delta = min_delta
        self.best: dict[str, _Best] = {}
        self._ended: set[str] = set()
        self._is_resumed = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(getattr(pl_module, "student", None), StudentFanout):
            raise ConfigurationError(
                f"{type(self).__name__} needs a module whose student is a StudentFanout"
            )

    @property
    @override
    def state_key(self) -> str:
        """Lightning's key, which tells callbacks apart that monitor different metrics."""
        return f"{type(self).__qualname__}[{self.monitor},{self.mode}]"

    @override
    def state_dict(self) -> dict[str, Any]:
        ended = self._ended
        return {n: [best.value, best.waited, n in ended] for n, best in self.best.items()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = {name: _Best(*values[:2]) for name, values in state_dict.items()}
        self._ended = {name for name, values in state_dict.items() if any(values[2:])}
        self._is_resumed = True

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_resumed:  # there, one that had stopped may still be to be looked at
            self._ended = set(_student(pl_module).stopped)
        self._is_resumed = False

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._look(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.enable_validation:
            self._look(trainer, pl_module)

    def _look(self, trainer: Trainer, pl_module: LightningModule) -> None:
        student, known = _student(pl_module), trainer.callback_metrics
        # A head that stops now is still checked by the callbacks that come after this one.
        names = [name for name in student.names if name not in self._ended]
        values = {n: float(known[key]) for n in names if (key := f"{n}/{self.monitor}") in known}
        if names and not values:
            logged = ", ".join(sorted(known)) or "nothing"
            raise ConfigurationError(
                f"{type(self).__name__}(monitor={self.monitor!r}): no head logged it; logged were "
                f"{logged}. Log it in a step: self.log({self.monitor!r}, ...)"
            )
        for name, value in values.items():
            best = self.best.setdefault(name, _Best())
            if self._is_better(value, best.value):
                best.value, best.waited = value, 0
            else:
                best.waited += 1
            self._looked(trainer, student, name, best)
        self._ended |= student.stopped.keys()

    def _is_better(self, value: float, best: float) -> bool:
        sign = 1 if self.mode == "max" else -1
        is_first = math.isnan(best) and not math.isnan(value)
        return is_first or sign * (value - best) > self.min_delta

    def _looked(self, trainer: Trainer, student: StudentFanout, name: str, best: _Best) -> None:
        raise NotImplementedError


def _student(pl_module: LightningModule) -> StudentFanout:
    return pl_module.student  # type: ignore[return-value] # see ``setup``


class HeadEarlyStopping(_EachHead):
    """Stops each head that no longer improves; the run ends with the last head.

    Args:
        monitor: The metric, as the steps log it: ``"val_loss"`` is ``animal/val_loss`` of the head
            ``animal``.
        mode: Whether smaller or larger is better.
        patience: Number of checks without improvement after which a head stops.
        min_delta: Smallest difference that counts as an improvement.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        mode: Mode = "min",
        *,
        patience: int = 3,
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        if patience < 1:
            raise ConfigurationError(f"patience={patience}: at least 1")
        self.patience = patience
        self.stopped: dict[str, str] = {}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": super().state_dict(), "stopped": dict(self.stopped)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["best"])
        self.stopped = dict(state_dict["stopped"])

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, reason in self.stopped.items():  # of a run that is resumed
            _student(pl_module).stop(name, reason)
        super().on_train_start(trainer, pl_module)

    @override
    def _looked(self, trainer: Trainer, student: StudentFanout, name: str, best: _Best) -> None:
        if best.waited >= self.patience:
            reason = f"{name}/{self.monitor} is no better than {best.value:.4g}"
            student.stop(name, reason)
            if trainer.is_global_zero:
                log.info("head %s stops in epoch %d: %s", name, trainer.current_epoch, reason)
        self.stopped = dict(student.stopped)
        if len(student.stopped) == len(student.names):
            trainer.should_stop = True


class HeadCheckpoint(_EachHead):
    """Saves each head whenever it is at its best, to ``dirpath/<head>.ckpt``.

    ``tspipe export dirpath/animal.ckpt --part student.heads.animal`` exports its weights.

    Args:
        monitor: The metric, as the steps log it.
        mode: Whether smaller or larger is better.
        dirpath: Folder to write to; by default ``heads`` below the Trainer's root. In a pipeline
            over several machines a head is saved on the machine that trains it.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        mode: Mode = "min",
        *,
        dirpath: str | Path | None = None,
    ) -> None:
        super().__init__(monitor, mode)
        self.dirpath = None if dirpath is None else Path(dirpath)

    @override
    def _looked(self, trainer: Trainer, student: StudentFanout, name: str, best: _Best) -> None:
        pipelined = pipelined_of(trainer)
        first = trainer.is_global_zero if pipelined is None else pipelined.replica == 0
        if best.waited or not first or name not in student.here:
            return
        folder = self.dirpath or Path(trainer.default_root_dir) / "heads"
        folder.mkdir(parents=True, exist_ok=True)
        state = student.heads[name].state_dict()
        content = {
            "state_dict": {
                f"student.heads.{name}.{key}": v.detach().cpu() for key, v in state.items()
            },
            "head": name,
            self.monitor: best.value,
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
        }
        path = folder / f"{name}.ckpt"
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        torch.save(content, unfinished)
        unfinished.replace(path)
