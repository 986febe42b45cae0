"""The teacher as the exponential moving average of the student."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tspipe.callbacks.common import (
    Names,
    Restoring,
    as_names,
    may_log,
    pipelined_of,
    submodules,
)
from lightning_tspipe.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

Momentum = float | tuple[float, float] | Callable[[int, int], float]
BuffersPolicy = Literal["keep", "copy", "average"]


class Place(NamedTuple):
    """A tensor by its module and name: a pipeline that repacks makes new buffers."""

    module: nn.Module
    key: str

    @property
    def tensor(self) -> Tensor:
        """The current tensor."""
        tensor: Tensor = getattr(self.module, self.key)
        return tensor


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

    def __init__(
        self,
        momentum: Momentum = 0.996,
        student: Names = "student",
        teacher: Names = "teacher",
        buffers: BuffersPolicy = "keep",
        *,
        log_momentum: bool = False,
    ) -> None:
        super().__init__()
        self.student = as_names(student)
        self.teacher = as_names(teacher)
        if len(self.student) != len(self.teacher):
            raise ConfigurationError(
                f"every student submodule needs its teacher: student={self.student}, "
                f"teacher={self.teacher}"
            )
        if buffers not in {"keep", "copy", "average"}:
            raise ConfigurationError(f"buffers={buffers!r}: choose 'keep', 'copy' or 'average'")
        _check_momentum(momentum)
        self.momentum = momentum
        self.buffers = buffers
        self.log_momentum = log_momentum
        self._num_steps = -1
        self._global_step = 0
        self._has_stepped = False
        self._parameters: list[Pair] = []
        self._buffers: list[Pair] = []

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
        pipelined = pipelined_of(trainer)
        if pipelined is not None:
            pipelined.averages(dict(zip(self.teacher, self.student, strict=True)))
        # Before the strategy wraps the module: DDP must not wait for gradients of the teacher.
        # A teacher that the module builds later (configure_model) is frozen in on_fit_start.
        if stage == "fit" and all(_has_submodule(pl_module, name) for name in self.teacher):
            self._freeze(pl_module)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._freeze(pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        students = submodules(pl_module, self.student, "student")
        teachers = submodules(pl_module, self.teacher, "teacher")
        self._parameters, self._buffers = [], []
        for names in zip(self.student, self.teacher, strict=True):
            student, teacher = (names[0], students[names[0]]), (names[1], teachers[names[1]])
            self._parameters += _pairs(student, teacher, "parameter")
            if self.buffers != "keep":
                self._buffers += _pairs(student, teacher, "buffer")
        self._num_steps = self._planned_steps(trainer)
        self._global_step = trainer.global_step
        self._has_stepped = False
        self.restore()
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, Optimizer):
                self.undo.append(optimizer.register_step_post_hook(self._on_optimizer_step).remove)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning counts steps that the gradient scaler skips, and the optimizer's own hook does
        # not see them: only both together mean that the student has changed.
        advanced = trainer.global_step > self._global_step
        if advanced and (self._has_stepped or not self.undo):
            value = self.momentum_at(trainer.global_step - 1, self._num_steps)
            self.update(value)
            if self.log_momentum and may_log(trainer):
                pl_module.log("ema_momentum", value, batch_size=1)
        if advanced:
            self._global_step = trainer.global_step
            self._has_stepped = False

    @torch.no_grad()
    def update(self, momentum: float) -> None:
        """Average everything that this rank owns, once.

        Raises:
            ConfigurationError: This rank owns only one tensor of a pair.
        """
        _average(_owned(self._parameters), momentum)
        pairs = _owned(self._buffers)
        averaged = [pair for pair in pairs if self.buffers == "average" and _is_float(pair[1])]
        _average(averaged, momentum)
        taken = {name for name, _, _ in averaged}
        for name, teacher, student in pairs:
            if name not in taken:
                teacher.copy_(student)

    def _freeze(self, pl_module: LightningModule) -> None:
        for module in submodules(pl_module, self.teacher, "teacher").values():
            module.requires_grad_(requires_grad=False)

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
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None or not bool(found_inf):
            self._has_stepped = True


def _check_momentum(momentum: Momentum) -> None:
    if callable(momentum):
        return
    values = momentum if isinstance(momentum, tuple) else (momentum,)
    if not all(0 <= value <= 1 for value in values) or len(values) > 2:
        raise ConfigurationError(
            f"momentum={momentum!r}: expected a number in [0, 1], a (start, end) pair of them, "
            f"or a function of (step, num_steps)"
        )


def _has_submodule(module: nn.Module, name: str) -> bool:
    try:
        module.get_submodule(name)
    except AttributeError:
        return False
    return True


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _pairs(
    student: tuple[str, nn.Module],
    teacher: tuple[str, nn.Module],
    kind: Literal["parameter", "buffer"],
) -> list[Pair]:
    """Pair the teacher's tensors with the student's by their names within the two modules."""
    student_name, student_module = student
    teacher_name, teacher_module = teacher
    sources = dict(_places(student_module, kind, remove_duplicate=False))
    pairs: list[Pair] = []
    for name, place in _places(teacher_module, kind, remove_duplicate=True):
        found = sources.get(name)
        where = f"{teacher_name}.{name}"
        if found is None:
            raise ConfigurationError(
                f"the teacher's {kind} {where} has no {student_name}.{name} to follow; build the "
                f"teacher as a copy of the student's submodules (copy.deepcopy), or name the "
                f"matching submodules: student=[...], teacher=[...]"
            )
        tensor, source = place.tensor, found.tensor
        if source is tensor:
            raise ConfigurationError(
                f"teacher and student share {where}; copy the student (copy.deepcopy) instead"
            )
        if source.shape != tensor.shape:
            raise ConfigurationError(
                f"{where} has shape {tuple(tensor.shape)}, {student_name}.{name} "
                f"{tuple(source.shape)}; the teacher must be a copy of the student"
            )
        pairs.append((where, place, found))
    return pairs


def _places(
    module: nn.Module, kind: Literal["parameter", "buffer"], *, remove_duplicate: bool
) -> Iterator[tuple[str, Place]]:
    named: Iterable[tuple[str, Tensor]]
    if kind == "parameter":
        named = module.named_parameters(remove_duplicate=remove_duplicate)
    else:
        named = module.named_buffers(remove_duplicate=remove_duplicate)
    for name, _ in named:
        path, _, key = name.rpartition(".")
        yield name, Place(module.get_submodule(path), key)


def _owned(pairs: Iterable[Pair]) -> list[tuple[str, Tensor, Tensor]]:
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
            owned.append((name, teacher, student))
    return owned


def _average(pairs: list[tuple[str, Tensor, Tensor]], momentum: float) -> None:
    if not pairs:
        return
    teachers = [teacher for _, teacher, _ in pairs]
    # lerp reads and writes each teacher tensor once; a product and a sum would pass over it twice.
    sources = [student.to(teacher) for _, teacher, student in pairs]
    torch._foreach_lerp_(teachers, sources, 1.0 - momentum)
