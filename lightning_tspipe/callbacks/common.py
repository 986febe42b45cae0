"""Base classes of the callbacks, and their view of the trainer and its strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import nn
from typing_extensions import override

from lightning_tspipe.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from lightning_tspipe.strategy.training.pipelined import Pipelined
else:
    from lightning.pytorch import Callback

    if find_spec("pytorch_lightning") is not None:
        # ``lightning.pytorch`` and ``pytorch_lightning`` are separate namespaces: each Trainer asks
        # whether a callback is an instance of *its* base class, so callbacks derive from both.
        from pytorch_lightning import Callback as OtherCallback

        class Callback(Callback, OtherCallback):
            """Callback base class for both Lightning namespaces."""


__all__ = [
    "Callback",
    "Names",
    "Restoring",
    "as_names",
    "derives_from",
    "is_over",
    "log_at_epoch_end",
    "may_log",
    "pipelined_of",
    "refuse_sharding",
    "replaced",
    "submodules",
]

Names = str | Sequence[str]


class Restoring(Callback):
    """A callback that replaces things while a fit lasts, and puts them back however it ends.

    Attributes:
        undo: Functions that put something back; the last one is called first.
    """

    def __init__(self) -> None:
        self.undo: list[Callable[[], None]] = []

    def restore(self) -> None:
        """Put everything back; twice is fine."""
        while self.undo:
            self.undo.pop()()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.restore()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.restore()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.restore()


def replaced(owner: object, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of one object; returns the function that undoes it."""
    own = vars(owner).get(name)
    vars(owner)[name] = function

    def undo() -> None:
        if own is None:
            vars(owner).pop(name, None)
        else:
            vars(owner)[name] = own

    return undo


def pipelined_of(trainer: Trainer) -> Pipelined | None:
    """The pipeline behind the trainer's strategy, or None on ordinary strategies."""
    pipelined: Pipelined | None = getattr(trainer.strategy, "pipelined", None)
    return pipelined


def may_log(trainer: Trainer) -> bool:
    """Whether this rank logs: the loss rank of a pipeline, else global rank 0."""
    pipelined = pipelined_of(trainer)
    return trainer.is_global_zero if pipelined is None else pipelined.is_loss_rank


def derives_from(trainer: Trainer, *names: str) -> bool:
    """Whether the trainer's strategy is of one of these classes, of either copy of Lightning."""
    return any(base.__name__ in names for base in type(trainer.strategy).__mro__)


def refuse_sharding(trainer: Trainer, callback: str) -> None:
    """Refuse strategies that shard parameters.

    Raises:
        ConfigurationError: The trainer has one.
    """
    if derives_from(trainer, "FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"):
        raise ConfigurationError(
            f"{callback} does not work on {type(trainer.strategy).__name__}'s sharded "
            "parameters; use strategy='auto', 'ddp' or 'tspipe'"
        )


def is_over(trainer: Trainer) -> bool:
    """Whether no epoch follows, as when a finished run is resumed."""
    steps, epochs = trainer.max_steps, trainer.max_epochs
    return 0 <= steps <= trainer.global_step or 0 <= (epochs or -1) <= trainer.current_epoch


def log_at_epoch_end(
    trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
) -> None:
    """Log numbers that all ranks know at the end of an epoch, if there are any.

    Ranks of DDP agree already; in a pipeline one rank logs, which must not wait for the others.
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
        ConfigurationError: No names, or something else.

    >>> as_names("teacher")
    ('teacher',)
    """
    result = (names,) if isinstance(names, str) else tuple(names)
    if not result or not all(result):
        raise ConfigurationError(f"expected the dotted name of a submodule, or several: {names!r}")
    return result


def submodules(pl_module: LightningModule, names: Names, argument: str) -> dict[str, nn.Module]:
    """The submodules with these dotted names, in order.

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
