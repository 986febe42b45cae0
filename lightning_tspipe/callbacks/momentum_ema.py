"""The teacher as the exponential moving average of the student."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tspipe.callbacks import common
from lightning_tspipe.callbacks.common import Names, Place, Restoring
from lightning_tspipe.errors import ConfigurationError

Momentum = float | tuple[float, float] | Callable[[int, int], float]
BuffersPolicy = Literal["keep", "copy", "average"]


Pair = tuple[str, Place, Place]
"""(name in the teacher, in the teacher, in the student)"""


def cosine_momentum(step: int, num_steps: int, start: float, end: float) -> float:
    """Momentum of update ``step`` (from 0) of ``num_steps`` on a cosine from start to end.

    Source: BYOL (Grill et al., 2020), appendix A, "moving average"; the same formula as lightly's
    ``cosine_schedule``, so that the first update uses ``start`` and the last one ``end``.

    >>> [round(cosine_momentum(step, 3, 0.9, 1.0), 3) for step in range(3)]
    [0.9, 0.95, 1.0]
    """
    if num_steps <= 1 or step >= num_steps - 1:
        return end
    return end - (end - start) * (math.cos(math.pi * step / (num_steps - 1)) + 1) / 2


@dataclass(eq=False, repr=False)
class MomentumEMA(Restoring):
    """``teacher = m * teacher + (1 - m) * student`` after every optimizer step.

    Parameters are matched by name; the student may have more of them (a predictor). The teacher
    does not change on accumulated batches, nor on optimizer steps that 16-bit mixed precision
    skips. Under a pipeline each rank averages what it owns, whether the training step calls the
    teacher or not.

    Args:
        momentum: A constant, ``(start, end)`` for a cosine over all optimizer steps, or
            ``fn(step, num_steps)`` with the update's index from 0 and the planned number of
            updates (-1 where training is unbounded).
        student: Dotted name of the student, or several (``["backbone", "projection_head"]``).
        teacher: The teacher's names, one for each of the student's.
        buffers: What happens to the teacher's buffers (BatchNorm statistics): ``"keep"`` leaves
            them to the teacher, ``"copy"`` takes the student's, ``"average"`` averages the
            floating-point ones and copies the others.
        log_momentum: Log the momentum as ``ema_momentum``.

    Raises:
        ConfigurationError: A momentum outside [0, 1], unequal numbers of names, a missing
            submodule, a teacher parameter without a student parameter of its name and shape.
    """

    momentum: Momentum = 0.996
    student: Names = "student"
    teacher: Names = "teacher"
    buffers: BuffersPolicy = "keep"
    _: KW_ONLY
    log_momentum: bool = False

    def __post_init__(self) -> None:
        self.student, self.teacher = common.as_names(self.student), common.as_names(self.teacher)
        if len(self.student) != len(self.teacher):
            raise ConfigurationError(
                f"name as many teacher as student submodules: student={self.student}, "
                f"teacher={self.teacher}"
            )
        if self.buffers not in {"keep", "copy", "average"}:
            raise ConfigurationError(
                f"buffers={self.buffers!r}: choose 'keep', 'copy' or 'average'"
            )
        _check_momentum(self.momentum)
        self._num_steps = -1
        self._global_step = 0
        self._has_stepped = False
        self._is_watching = False  # optimizers, whose steps a gradient scaler may skip
        self._averaged: list[Pair] = []
        self._copied: list[Pair] = []

    def momentum_at(self, step: int, num_steps: int) -> float:
        """The momentum of update ``step`` (from 0) of ``num_steps``.

        Raises:
            ConfigurationError: A user's schedule that leaves [0, 1].
        """
        if callable(self.momentum):
            value = float(self.momentum(step, num_steps))
            _check_momentum(value)
            return value
        if isinstance(self.momentum, tuple):
            return cosine_momentum(step, num_steps, *self.momentum)
        return self.momentum

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        pipelined = common.pipelined_of(trainer)
        if pipelined is not None:
            pipelined.averages(dict(zip(self.teacher, self.student, strict=True)))
        # Before the strategy wraps the module: DDP must not wait for gradients of the teacher.
        # A teacher that the module builds later (configure_model) is frozen in on_fit_start.
        known = dict(pl_module.named_modules(remove_duplicate=False))
        if stage == "fit" and all(name in known for name in self.teacher):
            self.on_fit_start(trainer, pl_module)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for module in common.submodules(pl_module, self.teacher, "teacher").values():
            module.requires_grad_(requires_grad=False)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        students = common.submodules(pl_module, self.student, "student")
        teachers = common.submodules(pl_module, self.teacher, "teacher")
        self._averaged, self._copied = [], []
        for names in zip(self.student, self.teacher, strict=True):
            pair = (names[0], students[names[0]]), (names[1], teachers[names[1]])
            self._averaged += _pairs(*pair, is_buffer=False)
            for buffer in [] if self.buffers == "keep" else _pairs(*pair, is_buffer=True):
                kind = buffer[1].tensor.dtype
                averages = self.buffers == "average" and (kind.is_floating_point or kind.is_complex)
                (self._averaged if averages else self._copied).append(buffer)
        self._num_steps = self._planned_steps(trainer)
        self._global_step = trainer.global_step
        self._has_stepped = self._is_watching = False
        self.restore()
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, Optimizer):
                hook = optimizer.register_step_post_hook(self._on_optimizer_step)
                self.undo.callback(hook.remove)
                self._is_watching = True

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step <= self._global_step:
            return
        # Lightning counts steps that the gradient scaler skips, and the optimizer's own hook does
        # not see them: only both together mean that the student has changed.
        if self._has_stepped or not self._is_watching:
            value = self.momentum_at(trainer.global_step - 1, self._num_steps)
            self.update(value)
            if self.log_momentum and common.may_log(trainer):
                pl_module.log("ema_momentum", value, batch_size=1)
        self._global_step = trainer.global_step
        self._has_stepped = False

    @torch.no_grad()
    def update(self, momentum: float) -> None:
        """Average everything that this rank owns, once.

        Raises:
            ConfigurationError: This rank owns only one tensor of a pair.
        """
        averaged = _owned(self._averaged)
        # lerp reads and writes each tensor once; a product and a sum would pass over it twice.
        if averaged:
            sources = [student.to(teacher) for teacher, student in averaged]
            torch._foreach_lerp_([teacher for teacher, _ in averaged], sources, 1.0 - momentum)
        for teacher, student in _owned(self._copied):
            teacher.copy_(student)

    def _planned_steps(self, trainer: Trainer) -> int:
        if isinstance(self.momentum, float | int):
            return -1
        total = trainer.estimated_stepping_batches
        if math.isfinite(total):
            return int(total)
        if isinstance(self.momentum, tuple):
            raise ConfigurationError(
                "a momentum from start to end needs the number of steps: give Trainer max_steps "
                "or max_epochs (and a loader with a length), or pass momentum as a function"
            )
        return -1

    def _on_optimizer_step(self, optimizer: Optimizer, *_: object) -> None:
        # Fused optimizers are always called; they skip by themselves when the scaler says so.
        self._has_stepped |= not getattr(optimizer, "found_inf", None)


def _check_momentum(momentum: Momentum) -> None:
    if callable(momentum):
        return
    values = momentum if isinstance(momentum, tuple) else (momentum,)
    if not all(0 <= value <= 1 for value in values) or len(values) > 2:
        raise ConfigurationError(
            f"momentum={momentum!r}: expected a number in [0, 1], a (start, end) pair of them, "
            f"or a function of (step, num_steps)"
        )


def _pairs(
    student: tuple[str, nn.Module], teacher: tuple[str, nn.Module], *, is_buffer: bool
) -> list[Pair]:
    """Pair the teacher's tensors with the student's by their names within the two modules."""
    student_name, student_module = student
    teacher_name, teacher_module = teacher
    sources = dict(common.places_of(student_module, is_buffer=is_buffer, remove_duplicate=False))
    pairs: list[Pair] = []
    for name, place in common.places_of(teacher_module, is_buffer=is_buffer):
        found = sources.get(name)
        where, source = f"{teacher_name}.{name}", f"{student_name}.{name}"
        if found is None:
            why = f"has no {source} to follow"
        elif found.tensor is place.tensor:
            why = "is shared with the student"
        elif found.tensor.shape != place.tensor.shape:
            why = f"has shape {tuple(place.tensor.shape)}, {source} {tuple(found.tensor.shape)}"
        else:
            pairs.append((where, place, found))
            continue
        raise ConfigurationError(
            f"the teacher's {where} {why}; build the teacher as a copy of the student's "
            "submodules (copy.deepcopy), or name the matching submodules: student=[...], "
            "teacher=[...]"
        )
    return pairs


def _owned(pairs: Iterable[Pair]) -> list[tuple[Tensor, Tensor]]:
    """The pairs that this rank holds; other ranks' tensors are on the meta device."""
    owned = []
    for name, mine, other in pairs:
        teacher, student = mine.tensor, other.tensor
        if teacher.is_meta != student.is_meta:
            raise ConfigurationError(
                f"{name} and the student tensor that it follows lie on different ranks; name both "
                "(TSPipeStrategy(student=..., teacher=...)), and cut them at the same places "
                "(partition='auto' does)"
            )
        if not teacher.is_meta:
            owned.append((teacher, student))
    return owned
