"""Blockwise distillation as a LightningModule: one step, on one device or relayed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere
from typing_extensions import override

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.late import Late, after_backward
from lightning_tspipe.runtime.modes.relay.blocks import BlockPair, pair_blocks
from lightning_tspipe.runtime.modes.relay.step import BlockOutcome

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    _Base = LightningModule
else:
    _Base = object


class Rounds(Protocol):
    """Runs the rounds of a step on all ranks of a pipeline, instead of here."""

    def run_round(self, number: int) -> Mapping[int, BlockOutcome]:
        """The losses of the blocks that this rank trains."""

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on all ranks."""


@dataclass
class _Means:
    """Sums of losses since the epoch began, on the device: nobody waits for them.

    An object of its own, so that a pipeline leaves it on its rank.
    """

    sums: dict[int, Tensor] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    def add(self, block: int, total: Tensor, count: int) -> None:
        self.sums[block] = self.sums[block] + total if block in self.sums else total
        self.counts[block] = self.counts.get(block, 0) + count


@dataclass(eq=False)
class _Pairs:
    """The blocks that were found; not copied with the module, which finds its own."""

    pairs: tuple[BlockPair, ...]
    networks: tuple[Any, Any]

    def __deepcopy__(self, memo: Any) -> None:
        return None

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

    For networks that are not a list of their blocks. They are traced; a block may begin at any
    submodule with a single input tensor: ``{"teacher": ["layer2", "layer3"]}``.
    """
    rounds: Rounds | None = None
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

    @property
    def block_pairs(self) -> tuple[BlockPair, ...]:
        """Pairs of the teacher's and the student's blocks.

        Raises:
            ConfigurationError: The networks have no blocks, or different numbers of them.
        """
        known = self._known_pairs
        if known is None or known.networks != (self.teacher, self.student):
            pairs = pair_blocks(self, self.block_boundaries)
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
        means = self._means = self._means or _Means()
        for block, outcome in run.items():
            if name == "weights":
                means.add(block, outcome.value.double() * outcome.samples, outcome.samples)
        total = torch.stack([outcome.loss for outcome in run.values()]).sum()
        values = Late(torch.stack([outcome.value for outcome in run.values()]))
        after_backward(total, lambda: self._refuse_diverged(tuple(run), values))
        return total

    def _refuse_diverged(self, blocks: Sequence[int], values: Late) -> None:
        for block, value in zip(blocks, values.tolist(), strict=True):
            if not math.isfinite(value):
                raise ConfigurationError(
                    f"the loss of block {block} ({self.block_pairs[block].name}) is {value}: its "
                    "weights are lost, those of the other blocks are not. Lower its learning rate, "
                    "clip its gradients, or inspect the output of its teacher's block"
                )

    def run_blocks(self, round_name: str, batch: Any) -> dict[int, BlockOutcome]:
        """Run all blocks on this device, in order."""
        x = self.block_input(batch, round_name)
        found = {}
        for pair in self.block_pairs:
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
        own = {block: (float(total), means.counts[block]) for block, total in means.sums.items()}
        sums: dict[int, float] = {}
        counts: dict[int, int] = {}
        for told in [own] if self.rounds is None else self.rounds.gather(own):
            for block, (total, count) in told.items():
                sums[block] = sums.get(block, 0.0) + total
                counts[block] = counts.get(block, 0) + count
        values = {
            f"train_loss/block_{block}": sums[block] / max(1, counts[block])
            for block in sorted(sums)
        }
        if values:
            self.log_dict({"train_loss": sum(values.values()), **values})
        if not self.automatic_optimization:
            self._step_schedulers()

    def _step_schedulers(self) -> None:
        """Step the schedulers, as Lightning does not with manual optimization."""
        schedulers: Any = self.lr_schedulers()
        if schedulers is None:
            return
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
            scheduler.step()
