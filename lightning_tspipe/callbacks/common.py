"""What the callbacks share: one base for both Lightning worlds, and how they see the strategy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from lightning_tspipe.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from lightning_tspipe.runtime.weights.teacher_prediction import TeacherPrediction
    from lightning_tspipe.simulation.timeline import Timeline
else:
    from lightning.pytorch import Callback

    if find_spec("pytorch_lightning") is not None:
        # ``lightning.pytorch`` and ``pytorch_lightning`` are separate worlds: each Trainer asks
        # whether a callback is an instance of *its* base. One that derives from both is at home
        # in both.
        from pytorch_lightning import Callback as OtherCallback

        class Callback(Callback, OtherCallback):
            """The callback base of both Lightning worlds."""


__all__ = [
    "Callback",
    "Names",
    "Pipelined",
    "as_names",
    "is_over",
    "may_log",
    "pipelined_of",
    "submodules",
]

Names = str | Sequence[str]


class Pipelined(Protocol):
    """What a callback may ask of a pipelining strategy (``trainer.strategy.pipelined``)."""

    is_loss_rank: bool
    num_stages: int
    bubble_ratio: float | None
    decides_by_times: bool
    data_parallel_size: int
    delay: int
    predicts_teacher: bool
    has_recording: bool
    replica: int
    num_ranks: int
    data_rank: int
    batch_size: int
    teacher_ran_ahead: bool | None
    seconds_reading: float
    student_names: tuple[str, ...]

    def freezes(self, *, repack: bool) -> None:
        """Layers will freeze; before the training loader is made."""

    def averages(self, originals: Mapping[str, str]) -> None:
        """Something averages parts of the student, by the names of submodules."""

    def use_front(self, front: Any) -> None:
        """Have something asked what the frozen part returned for a sample before."""

    def use_features(self, cache: Any) -> None:
        """Have something asked what the trunk of heads returns for a sample."""

    def look_at_trunk(self) -> None:
        """Features of a trunk that has changed are not read; every rank calls it."""

    def freeze(
        self,
        names: Collection[str],
        mesh: tuple[int | None, int | None],
        told: Callable[[float], None],
    ) -> None:
        """Take frozen parameters out of the pipeline, between two epochs."""

    def gather(self, value: Any) -> list[Any] | None:
        """The values of a pipeline's ranks, on its loss rank; every rank calls it."""

    def sums(self, values: Sequence[float]) -> list[float]:
        """Of each of some numbers, the sum over all ranks; every rank calls it."""

    @property
    def teacher_prediction(self) -> TeacherPrediction | None:
        """What predicts this rank's part of the teacher; None before the first batch."""

    def flops_per_sample(self) -> float:
        """Floating-point operations of one sample in a training step."""

    def of_first_replica(self, value: Any) -> Any:
        """What this rank's peer in the first replica has; every rank calls it."""

    def evaluate(
        self,
        fn: Callable[[Any], Any],
        loader: Iterable[Any],
        *,
        limit: int | None = None,
    ) -> Iterator[Any]:
        """Run ``fn`` on every batch through the pipeline; results on the loss rank, else None."""

    def timeline(self) -> Timeline | None:
        """Gather the last recorded window; every rank calls it, the loss rank gets the result."""

    def record(self, num_steps: int) -> None:
        """Start to record ``num_steps`` steps."""


def pipelined_of(trainer: Trainer) -> Pipelined | None:
    """The pipeline behind the trainer's strategy, or None on ordinary strategies."""
    pipelined: Pipelined | None = getattr(trainer.strategy, "pipelined", None)
    return pipelined


def may_log(trainer: Trainer) -> bool:
    """Whether this rank speaks: the loss rank of a pipeline, else global rank 0."""
    pipelined = pipelined_of(trainer)
    return trainer.is_global_zero if pipelined is None else pipelined.is_loss_rank


def is_over(trainer: Trainer) -> bool:
    """Whether no epoch follows: a run may be resumed from where it had ended."""
    steps, epochs = trainer.max_steps, trainer.max_epochs
    return 0 <= steps <= trainer.global_step or 0 <= (epochs or -1) <= trainer.current_epoch


def log_at_epoch_end(
    trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
) -> None:
    """Log numbers that all ranks know at an epoch's end; nothing if there are none.

    Ranks of DDP agree already; of a pipeline only one logs, and must not wait for others.
    """
    if metrics:
        pl_module.log_dict(
            metrics,
            prog_bar=True,
            batch_size=1,
            sync_dist=True,
            rank_zero_only=pipelined_of(trainer) is not None,
        )


def as_names(names: Names) -> tuple[str, ...]:
    """One dotted name or several, as a tuple.

    Raises:
        ConfigurationError: Something other than names, or none at all.

    >>> as_names("teacher")
    ('teacher',)
    """
    result = (names,) if isinstance(names, str) else tuple(names)
    if not result or not all(result):
        raise ConfigurationError(f"expected the dotted name of a submodule, or several: {names!r}")
    return result


def submodules(pl_module: LightningModule, names: Names, argument: str) -> dict[str, nn.Module]:
    """The submodules of those dotted names, in that order.

    Args:
        pl_module: The module that holds them.
        names: One dotted name or several.
        argument: The callback's argument, for the message.

    Raises:
        ConfigurationError: A name that is not a submodule.
    """
    found: dict[str, nn.Module] = {}
    for name in as_names(names):
        try:
            found[name] = pl_module.get_submodule(name)
        except AttributeError:
            children = ", ".join(child for child, _ in pl_module.named_children()) or "none"
            raise ConfigurationError(
                f"{type(pl_module).__name__} has no submodule {name!r}; pass "
                f"{argument}='name' or {argument}=['name', ...] with dotted names "
                f"(its direct submodules: {children})"
            ) from None
    return found
