"""Callback that spreads blockwise distillation over the devices of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from lightning_tspipe.callbacks.blockwise import BlockwiseDistillation
from lightning_tspipe.callbacks.common import Callback
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.planning.relay_modes import MODES, Mode

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


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
            By default ``~/.cache/lightning_tspipe`` (or in ``XDG_CACHE_HOME``).

    Raises:
        ConfigurationError: The arguments contradict each other.
    """

    def __init__(  # noqa: PLR0913 - what a user may choose
        self,
        mode: Mode = "dpu",
        *,
        run_ahead: int = 2,
        partition: Sequence[int] | None = None,
        widths: Sequence[int] | None = None,
        memory_limit: int | str | None = None,
        sync_batchnorm: Literal["auto"] | bool = "auto",
        profile_steps: int = 100,
        profile_cache: str | Path | None = "auto",
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise ConfigurationError(f"mode={mode!r}: choose one of {', '.join(MODES)}")
        if run_ahead < 0:
            raise ConfigurationError(f"run_ahead={run_ahead!r}: a number of steps, at least 0")
        if profile_steps < 1:
            raise ConfigurationError(f"profile_steps={profile_steps!r} must be at least 1")
        self.mode: Mode = mode
        self.run_ahead = run_ahead
        self.partition, self.widths = _by_hand(mode, partition, widths)
        self.memory_limit = memory_limit
        self.sync_batchnorm = sync_batchnorm
        self.profile_steps = profile_steps
        self.profile_cache = profile_cache
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
        pl_module.block_pairs  # noqa: B018 - refuses networks without blocks before anything runs


def _by_hand(
    mode: Mode, partition: Sequence[int] | None, widths: Sequence[int] | None
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    if partition is None:
        if widths is not None:
            raise ConfigurationError("widths without partition: give the blocks of each stage too")
        return None, None
    if mode in {"dp", "ir"}:
        raise ConfigurationError(f"mode={mode!r} shares all blocks: remove partition")
    widths = [1] * len(partition) if widths is None else widths
    if len(widths) != len(partition) or min((*partition, *widths), default=0) < 1:
        raise ConfigurationError(
            f"partition={list(partition)}, widths={list(widths)}: give each stage a number of "
            "blocks and a number of devices, both at least 1"
        )
    if mode != "ahd" and max(widths) > 1:
        raise ConfigurationError(f"mode={mode!r} shares no stages: use mode='ahd' with {widths=}")
    return tuple(partition), tuple(widths)
