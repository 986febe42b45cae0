"""``tspipe plan --schedule relay``: distribute blocks over devices, and compare the modes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_tspipe.callbacks.blockwise import BlockwiseDistillation, BlockwiseRelay
from lightning_tspipe.cli import modules
from lightning_tspipe.cli.quantities import format_seconds
from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.planning.cluster import Link
from lightning_tspipe.planning.relay import (
    MODES,
    Mode,
    RelayPlan,
    RelayProfile,
    plan_mode,
    seconds_per_batch,
)
from lightning_tspipe.planning.table import aligned
from lightning_tspipe.runtime.execution.engine import Rank
from lightning_tspipe.runtime.modes.relay.engine import NETWORKS
from lightning_tspipe.runtime.transport.base import Alone
from lightning_tspipe.strategy.setup.block_costs import BlockPlanner
from lightning_tspipe.strategy.setup.options import SetupOptions
from lightning_tspipe.strategy.training.optimizers import plain_optimizer

_STEPS = 10


def run(
    target: str, devices: int, memory: int | None, accelerator: str, link: Callable[[], Link]
) -> None:
    """Measure each block, distribute the blocks in each mode, and print a comparison.

    Args:
        target: The file, and its function.
        devices: All devices.
        memory: Bytes of one device.
        accelerator: Where to measure.
        link: Returns the link between two devices.

    Raises:
        ConfigurationError: The module has no blocks.
        PartitionError: The blocks fit in no mode.
    """
    module, data = modules.load(target)
    if not isinstance(module, BlockwiseDistillation):
        raise ConfigurationError(
            f"--schedule relay needs a module of blocks: class {type(module).__name__}("
            "BlockwiseDistillation, LightningModule)"
        )
    between = link()

    def measured(trainer: Trainer, batch: Tensor) -> RelayProfile:
        device = module.block_input(batch).device
        context = trainer.strategy.precision_plugin.forward_context
        here = Rank(module, NETWORKS, Alone(), device, context=context)
        callback, options = BlockwiseRelay(profile_steps=_STEPS), SetupOptions(costs="measured")
        optimizers = list(map(plain_optimizer, trainer.optimizers))
        planner = BlockPlanner(here, callback, options, batch, optimizers)
        found = planner.profile(range(1, devices + 1))
        return replace(found, latency=between.latency, bandwidth=between.bandwidth)

    profile = modules.after_one_step(module, data, measured, accelerator=accelerator)
    print(explained(profile, devices, memory))  # noqa: T201


def explained(profile: RelayProfile, num_devices: int, memory: int | None) -> str:
    """Compare all modes, and describe the distribution of the best mode that relays.

    Raises:
        PartitionError: The blocks fit in no mode.
    """
    rows = [("", "mode", "step", "samples/s", "devices of each stage")]
    plans, failures = {}, {}
    for mode in MODES:
        try:
            plans[mode] = plan_mode(mode, profile, num_devices, memory)
        except PartitionError as error:
            failures[mode] = str(error)
    relayed: list[Mode] = [mode for mode in plans if mode in {"dpu", "ahd", "ir"}]
    if not relayed:
        raise PartitionError("; ".join(dict.fromkeys(failures.values())))
    seconds = {mode: seconds_per_batch(mode, plan, profile) for mode, plan in plans.items()}
    best: Mode = min((seconds[mode], mode) for mode in relayed)[1]
    for mode, plan in plans.items():
        each = " ".join(map(str, plan.widths))
        rate = profile.batch_size / seconds[mode]
        mark = "*" if mode == best else ""
        rows.append((mark, mode, format_seconds(seconds[mode]), f"{rate:.1f}", each))
    lines = [*aligned(rows), *(f"{mode}: {failure}" for mode, failure in failures.items())]
    blocks = [("block", "teacher", "student", "gradients")] + [
        (
            block.name,
            format_seconds(block.teacher[profile.batch_size]),
            format_seconds(block.student[profile.batch_size]),
            f"{block.gradient_bytes / 1e6:.2f} MB",
        )
        for block in profile.blocks
    ]
    return "\n".join(
        [*lines, "", *aligned(blocks), "", str(plans[best]), _reason(best, plans[best], profile)]
    )


def _reason(mode: Mode, plan: RelayPlan, profile: RelayProfile) -> str:
    """The reason for the time of a step."""
    longest = max(range(plan.num_stages), key=lambda stage: plan.stage_seconds[stage])
    work = sum(block.seconds(profile.batch_size) + block.update for block in profile.blocks)
    return (
        f"mode={mode!r} is the fastest that relays. Its step takes as long as its slowest stage, "
        f"{longest}; the work of all blocks on whole batches, divided evenly, would take "
        f"{format_seconds(work / plan.num_devices)}."
    )
