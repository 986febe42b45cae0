"""Base classes of the callbacks, and their view of the trainer and its strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import lightning.pytorch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import override

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.strategy.training.pipelined import Pipelined

if TYPE_CHECKING or find_spec("pytorch_lightning") is None:
    Callback = lightning.pytorch.Callback
else:
    from pytorch_lightning import Callback as OtherCallback

    class Callback(lightning.pytorch.Callback, OtherCallback):
        """Base class of callbacks for both Lightning namespaces.

        ``lightning.pytorch`` and ``pytorch_lightning`` are separate: each Trainer asks whether a
        callback is an instance of *its* base class, so callbacks derive from both.
        """


Names = str | Sequence[str]
T = TypeVar("T")


@dataclass(eq=False, repr=False)
class Restoring(Callback):
    """A callback that replaces things while a fit lasts, and puts them back however it ends.

    Attributes:
        undo: What puts things back; the last one first.
    """

    undo: ExitStack = field(default_factory=ExitStack, init=False)

    def restore(self) -> None:
        """Put everything back; twice is fine."""
        self.undo.close()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.restore()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.restore()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.restore()


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


def decided_on(trainer: Trainer, decide: Callable[[], T], rank: int = 0) -> T:
    """What a function returns or raises on one rank, on all ranks; every rank calls it."""
    box: Any = None
    if trainer.global_rank == rank:
        try:
            box = decide()
        except Exception as error:  # noqa: BLE001 - all ranks are to know it
            box = error
    found: T | Exception = trainer.strategy.broadcast(box, rank)
    if isinstance(found, Exception):
        raise found
    return found


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
        raise ConfigurationError(f"expected one or more dotted names of submodules, not {names!r}")
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


class Place(NamedTuple):
    """A tensor by its module and name, since it may be replaced: a repacked pipeline has others."""

    module: nn.Module
    key: str

    @property
    def tensor(self) -> Tensor:
        """The current tensor."""
        tensor: Tensor = getattr(self.module, self.key)
        return tensor


def places_of(
    module: nn.Module, *, is_buffer: bool = False, remove_duplicate: bool = True
) -> Iterator[tuple[str, Place]]:
    """The parameters of a module by name, or its buffers."""
    named: Callable[..., Iterator[tuple[str, Tensor]]]
    named = module.named_buffers if is_buffer else module.named_parameters
    for name, _ in named(remove_duplicate=remove_duplicate):
        path, _, key = name.rpartition(".")
        yield name, Place(module.get_submodule(path), key)
