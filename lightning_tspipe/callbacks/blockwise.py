"""Blockwise distillation: a module for one device, and a callback that relays its blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere
from typing_extensions import override

from lightning_tspipe.callbacks.common import Callback
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.late import Late, after_backward
from lightning_tspipe.planning.relay import MODES, Mode
from lightning_tspipe.runtime.modes.relay.blocks import BlockOutcome, BlockPair, pair_blocks
from lightning_tspipe.runtime.modes.relay.engine import RelayEngine

if TYPE_CHECKING:
    _Base = LightningModule
else:
    _Base = object


@dataclass
class _Means:
    """For each block, the sum of its losses since the epoch began and the number of samples.

    On the device: nobody waits for them. An object of its own, so that a pipeline leaves it on its
    rank.
    """

    sums: dict[int, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class _Pairs:
    """The blocks that were found; not copied with the module, which finds its own."""

    pairs: tuple[BlockPair, ...]
    networks: tuple[Any, Any]

    @override
    def __reduce__(self) -> Any:
        return type(None), ()


class BlockwiseDistillation(_Base):
    """Trains each block of ``student`` to reproduce the same block of ``teacher``.

    A mixin that is named before LightningModule in the class definition. The module has a
    ``teacher`` and a ``student`` with the same number of blocks (``nn.Sequential``,
    ``nn.ModuleList``, anything with a method ``pipeline_blocks()``, or a network whose
    ``block_boundaries`` are named), and ``configure_optimizers``. With several optimizers (one per
    block, or one for weights and one for an architecture) set ``automatic_optimization = False``,
    as Lightning requires; nothing else changes. The same module trains on one device, and with
    ``BlockwiseRelay`` on a pipeline.

    At the end of each epoch it logs the mean loss of each block, ``train_loss/block_0`` and so on,
    and their sum, ``train_loss``.
    """

    teacher: Any
    student: Any
    block_boundaries: Mapping[str, Sequence[str]] = MappingProxyType({})
    """For ``teacher``, ``student`` or both, the first submodule of each block except the first.

    For networks that are not a list of their blocks. They are recorded with the first batch; a
    block may begin at any submodule with a single input tensor:
    ``{"teacher": ["layer2", "layer3"]}``.
    """
    rounds: RelayEngine | None = None
    """Runs the rounds of a step on all ranks of a pipeline, instead of here, while it trains."""
    _means: _Means | None = None
    _known_pairs: _Pairs | None = None

    # What a module may override

    def block_input(self, batch: Any, round_name: str = "weights") -> Tensor:  # noqa: ARG002
        """The input of the first block: by default the first part of the batch.

        Args:
            batch: The batch.
            round_name: One of :meth:`block_rounds`.
        """
        x: Any = batch[0] if isinstance(batch, list | tuple) else batch
        if not isinstance(x, Tensor):
            raise ConfigurationError(
                f"the batch begins with {type(x).__name__}, not with a tensor. Override "
                "block_input(self, batch, round_name) to return the input of the first block"
            )
        return x

    def block_loss(
        self, student_out: Tensor, teacher_out: Tensor, block_idx: int, batch: Any
    ) -> Tensor:
        """The loss of one block, a mean over its samples: by default the mean squared error.

        Args:
            student_out: Output of the student's block.
            teacher_out: Output of the teacher's block.
            block_idx: Index of the block.
            batch: The batch; where ranks share a block, this rank's samples of it.
        """
        del block_idx, batch
        return F.mse_loss(student_out, teacher_out)

    def block_rounds(self, batch_idx: int) -> Sequence[str]:
        """Names of the rounds of a step, each of which relays an input and updates: by default one.

        Used only with ``automatic_optimization = False``. All ranks must return the same.
        """
        del batch_idx
        return ("weights",)

    def round_optimizers(self, round_name: str) -> Sequence[Any]:
        """The optimizers that update after a round: by default all."""
        del round_name
        return self.all_optimizers()

    # How it trains

    def block_pairs(self, x: Tensor) -> tuple[BlockPair, ...]:
        """Pairs of the teacher's and the student's blocks.

        Args:
            x: The input of the first block, of a batch.

        Raises:
            ConfigurationError: The networks have no blocks, or different numbers of them.
            PartitionError: A network with named boundaries can't be recorded.
        """
        known = self._known_pairs
        if known is None or known.networks != (self.teacher, self.student):
            pairs = pair_blocks(self, x, self.block_boundaries)
            known = self._known_pairs = _Pairs(pairs, (self.teacher, self.student))
        return known.pairs

    def all_optimizers(self) -> list[Any]:
        """``self.optimizers()``, always as a list."""
        found: Any = self.optimizers()
        return list(found) if isinstance(found, list | tuple) else [found]

    @override
    def train(self, mode: bool = True) -> Any:
        """Set the mode, except of the teacher, which stays in eval mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    @override
    def on_fit_start(self) -> None:
        """Freeze the teacher."""
        super().on_fit_start()
        self.teacher.requires_grad_(requires_grad=False)
        self.teacher.eval()

    @override
    def on_train_epoch_start(self) -> None:
        """Reset the mean losses."""
        super().on_train_epoch_start()
        self._means = _Means()

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        """The sum of the blocks' losses, whose gradients are independent of each other."""
        if self.automatic_optimization:
            return self._losses(0, "weights", batch)
        for number, name in enumerate(self.block_rounds(batch_idx)):
            for optimizer in self.all_optimizers():
                optimizer.zero_grad()
            self.manual_backward(self._losses(number, name, batch))
            for optimizer in self.round_optimizers(name):
                optimizer.step()
        return None

    def _losses(self, number: int, name: str, batch: Any) -> Tensor:
        """The sum of the losses of all blocks that are trained here."""
        run = self.run_blocks(name, batch) if self.rounds is None else self.rounds.run_round(number)
        self._means = self._means or _Means()
        for block, outcome in run.items() if name == "weights" else ():
            value = outcome.value.double()
            new = torch.stack([value, torch.ones_like(value)]) * outcome.samples
            self._means.sums[block] = self._means.sums.get(block, 0) + new
        total = torch.stack([outcome.loss for outcome in run.values()]).sum()
        values = Late(torch.stack([outcome.value for outcome in run.values()]))
        after_backward(total, lambda: self._refuse_diverged(tuple(run), values))
        return total

    def _refuse_diverged(self, blocks: Sequence[int], values: Late) -> None:
        assert self._known_pairs is not None  # they have run
        for block, value in zip(blocks, values.tolist(), strict=True):
            if not math.isfinite(value):
                name = self._known_pairs.pairs[block].name
                raise ConfigurationError(
                    f"the loss of block {block} ({name}) is {value}: its weights are lost, those "
                    "of the other blocks are not. Lower its learning rate, clip its gradients, or "
                    "inspect the output of its teacher's block"
                )

    def run_blocks(self, round_name: str, batch: Any) -> dict[int, BlockOutcome]:
        """Run all blocks on this device, in order."""
        x = self.block_input(batch, round_name)
        found = {}
        for pair in self.block_pairs(x):
            with torch.no_grad():
                target = pair.teacher(x)
            loss = self.block_loss(pair.student(x), target, pair.index, batch)
            found[pair.index] = BlockOutcome(loss, loss.detach(), len(x))
            x = target
        return found

    @override
    def on_train_epoch_end(self) -> None:
        """Log the mean losses of the epoch, the same on every rank."""
        super().on_train_epoch_end()
        means = self._means or _Means()
        own = {block: found.tolist() for block, found in means.sums.items()}
        sums: dict[int, Any] = {}
        for told in [own] if self.rounds is None else self.rounds.transport.gather_everywhere(own):
            for block, found in told.items():
                sums[block] = sums.get(block, 0) + np.array(found)
        values = {
            f"train_loss/block_{block}": float(total / max(1, count))
            for block, (total, count) in sorted(sums.items())
        }
        if values:
            self.log_dict({"train_loss": sum(values.values()), **values})
        if not self.automatic_optimization:  # where Lightning does not step the schedulers
            schedulers: Any = self.lr_schedulers() or []
            for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
                scheduler.step()


@dataclass(eq=False, repr=False)
class BlockwiseRelay(Callback):
    """Relays the teacher's activations from device to device, and trains the student's blocks.

    Each block of the teacher runs once per batch, on the device that also trains the student's
    block. With ``Trainer(strategy="tspipe")`` and a :class:`BlockwiseDistillation` module; on
    another strategy it changes nothing.

    Args:
        mode: ``"dpu"``: each device has contiguous blocks and updates as soon as it is done.
            ``"ahd"``: devices may also share blocks, dividing the batch, where that is faster.
            ``"ir"``: all devices share all blocks. ``"tr"``: as ``"dpu"``, but all devices wait for
            each other at the end of each step. Baselines are ``"dp"`` (block by block, all devices
            sharing each block, each time with the teacher from its first block) and ``"ls"`` (whole
            blocks for each device, which runs the teacher from its first block).
        run_ahead: How many steps a device may be ahead of the next one.
        partition: Number of blocks in each stage, instead of measuring; they add up to all blocks.
        widths: Number of devices that share each stage of ``partition``; by default one.
        memory_limit: Bytes that a device may hold, or a text such as ``"16GiB"``.
        sync_batchnorm: Whether devices that share a block normalise over the samples of all of
            them. ``"auto"``: where a shared block has BatchNorm, so that the mathematics is that of
            one device.
        profile_steps: How often each block is measured, for each share of a batch it may get.
        profile_cache: The folder where measured costs are stored for the next run; None: nowhere.
            By default ``~/.cache/lightning_tspipe`` (or in ``XDG_CACHE_HOME``), or the folder in
            the environment variable ``LIGHTNING_TSPIPE_CACHE`` ("off": nowhere).

    Raises:
        ConfigurationError: The arguments contradict each other.
    """

    mode: Mode = "dpu"
    _: KW_ONLY
    run_ahead: int = 2
    partition: Sequence[int] | None = None
    widths: Sequence[int] | None = None
    memory_limit: int | str | None = None
    sync_batchnorm: Literal["auto"] | bool = "auto"
    profile_steps: int = 100
    profile_cache: str | Path | None = "auto"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigurationError(f"mode={self.mode!r}: choose one of {', '.join(MODES)}")
        if self.run_ahead < 0:
            raise ConfigurationError(f"run_ahead={self.run_ahead!r} must be at least 0 (steps)")
        if self.profile_steps < 1:
            raise ConfigurationError(f"profile_steps={self.profile_steps!r} must be at least 1")
        self.partition, self.widths = _by_hand(self.mode, self.partition, self.widths)
        self.plan: Any = None
        """The blocks of each stage and its devices; None before the first batch."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        name = type(pl_module).__name__
        if not isinstance(pl_module, BlockwiseDistillation):
            raise ConfigurationError(
                f"BlockwiseRelay needs a module of blocks: class {name}(BlockwiseDistillation, "
                "LightningModule)"
            )
        if type(pl_module).training_step is not BlockwiseDistillation.training_step:
            raise ConfigurationError(
                f"{name} overrides training_step, which BlockwiseRelay does not run: override "
                "block_loss, block_input, block_rounds and round_optimizers instead"
            )


def _by_hand(
    mode: Mode, partition: Sequence[int] | None, widths: Sequence[int] | None
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    if partition is None:
        if widths is not None:
            raise ConfigurationError("widths without partition: give both, or neither")
        return None, None
    if mode in {"dp", "ir"}:
        raise ConfigurationError(f"mode={mode!r} puts all blocks on all devices: remove partition")
    widths = [1] * len(partition) if widths is None else widths
    if len(widths) != len(partition) or min((*partition, *widths), default=0) < 1:
        raise ConfigurationError(
            f"partition={list(partition)}, widths={list(widths)}: give each stage a number of "
            "blocks and a number of devices, both at least 1"
        )
    if mode != "ahd" and max(widths) > 1:
        raise ConfigurationError(f"mode={mode!r} has 1 device per stage: use mode='ahd', {widths=}")
    return tuple(partition), tuple(widths)
