"""Early stopping and best checkpoints of each head of a ``StudentFanout``."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_tspipe.callbacks.common import Callback, pipelined_of
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.heads import StudentFanout

log = logging.getLogger("lightning_tspipe")

Mode = Literal["min", "max"]


@dataclass(eq=False, repr=False)
class _EachHead(Callback, ABC):
    """Checks one metric of each head after every validation, or else after every training epoch."""

    decides_by_metrics: ClassVar[bool] = True

    monitor: str = "val_loss"
    mode: Mode = "min"
    min_delta: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.mode not in {"min", "max"}:
            raise ConfigurationError(f"mode={self.mode!r}: must be 'min' or 'max'")
        if self.min_delta < 0:
            raise ConfigurationError(f"min_delta={self.min_delta} is negative")
        self.best: dict[str, float] = {}  # of each head
        self._waited: dict[str, int] = {}  # checks since then
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
        """What was seen of each head; which ones have stopped is the module's to save."""
        return {
            name: [value, self._waited[name], name in self._ended]
            for name, value in self.best.items()
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = {name: values[0] for name, values in state_dict.items()}
        self._waited = {name: values[1] for name, values in state_dict.items()}
        self._ended = {name for name, values in state_dict.items() if values[2]}
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
                f"{type(self).__name__}(monitor={self.monitor!r}): no head logged it; the logged "
                f"metrics are {logged}. Log it in a step: self.log({self.monitor!r}, ...)"
            )
        sign = 1 if self.mode == "max" else -1
        for name, value in values.items():
            best = self.best.setdefault(name, math.nan)
            is_first = math.isnan(best) and not math.isnan(value)
            self._waited[name] = self._waited.get(name, 0) + 1
            if is_first or sign * (value - best) > self.min_delta:
                self.best[name], self._waited[name] = value, 0
            self._looked(trainer, student, name)
        self._ended |= student.stopped.keys()

    @abstractmethod
    def _looked(self, trainer: Trainer, student: StudentFanout, name: str) -> None:
        """Act on what was seen of a head."""


def _student(pl_module: LightningModule) -> StudentFanout:
    return pl_module.student  # type: ignore[return-value] # see ``setup``


@dataclass(eq=False, repr=False)
class HeadEarlyStopping(_EachHead):
    """Stops each head that no longer improves; the run ends with the last head.

    Args:
        monitor: The metric, as the steps log it: ``"val_loss"`` is ``animal/val_loss`` of the head
            ``animal``.
        mode: Whether smaller or larger is better.
        patience: Number of checks without improvement after which a head stops.
        min_delta: Smallest difference that counts as an improvement.
    """

    _: KW_ONLY
    patience: int = 3
    min_delta: float = 0.0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience < 1:
            raise ConfigurationError(f"patience={self.patience} must be at least 1")

    @override
    def _looked(self, trainer: Trainer, student: StudentFanout, name: str) -> None:
        if self._waited[name] >= self.patience:
            reason = f"{name}/{self.monitor} is no better than {self.best[name]:.4g}"
            student.stop(name, reason)
            if trainer.is_global_zero:
                log.info("head %s stops in epoch %d: %s", name, trainer.current_epoch, reason)
        if len(student.stopped) == len(student.names):
            trainer.should_stop = True


@dataclass(eq=False, repr=False)
class HeadCheckpoint(_EachHead):
    """Saves each head whenever it is at its best, to ``dirpath/<head>.ckpt``.

    ``tspipe export dirpath/animal.ckpt --part student.heads.animal`` exports its weights.

    Args:
        monitor: The metric, as the steps log it.
        mode: Whether smaller or larger is better.
        dirpath: Folder to write to; by default ``heads`` below the Trainer's root. In a pipeline
            over several machines a head is saved on the machine that trains it.
    """

    _: KW_ONLY
    dirpath: str | Path | None = None

    @override
    def _looked(self, trainer: Trainer, student: StudentFanout, name: str) -> None:
        pipelined = pipelined_of(trainer)
        first = trainer.is_global_zero if pipelined is None else pipelined.replica == 0
        if self._waited[name] or not first or name not in student.here:
            return
        default = Path(trainer.default_root_dir) / "heads"
        folder = default if self.dirpath is None else Path(self.dirpath)
        state = student.heads[name].state_dict()
        content = {
            "state_dict": {
                f"student.heads.{name}.{key}": v.detach().cpu() for key, v in state.items()
            },
            "head": name,
            self.monitor: self.best[name],
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
        }
        TorchCheckpointIO().save_checkpoint(content, folder / f"{name}.ckpt")
