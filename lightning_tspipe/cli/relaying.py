"""``tspipe plan --schedule relay``: distribute blocks over devices, and compare the modes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, Trainer
from typing_extensions import override

from lightning_tspipe.callbacks.blockwise import BlockwiseDistillation
from lightning_tspipe.callbacks.blockwise_relay import BlockwiseRelay
from lightning_tspipe.cli import modules
from lightning_tspipe.cli.quantities import format_seconds
from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.planning.cluster import Link
from lightning_tspipe.planning.relay import RelayPlan, RelayProfile
from lightning_tspipe.planning.relay_modes import MODES, Mode, plan_mode, seconds_per_batch
from lightning_tspipe.planning.table import aligned
from lightning_tspipe.runtime.modes.relay.blocks import infer_shapes
from lightning_tspipe.runtime.transport.base import LocalNetwork, LocalTransport
from lightning_tspipe.strategy.setup.block_costs import BlockCosts
from lightning_tspipe.strategy.setup.options import parse_bytes
from lightning_tspipe.strategy.training.optimizers import plain_optimizer

_STEPS = 10


def run(options: argparse.Namespace, link: Callable[[], Link]) -> None:
    """Measure each block, distribute the blocks in each mode, and print a comparison.

    Args:
        options: Options of the command.
        link: Returns the link between two devices.

    Raises:
        ConfigurationError: The module has no blocks.
        PartitionError: The blocks fit in no mode.
    """
    module, data = modules.load(options.target)
    if not isinstance(module, BlockwiseDistillation):
        raise ConfigurationError(
            f"--schedule relay needs a module of blocks: class {type(module).__name__}("
            "BlockwiseDistillation, LightningModule)"
        )
    measure = _Measure(options, link())
    trainer = Trainer(
        accelerator=options.accelerator, devices=1, max_steps=1, callbacks=[measure],
        **modules.QUIET,
    )  # fmt: skip
    trainer.fit(module, **modules.data_arguments(data))
    if measure.profile is None:
        raise ConfigurationError("the training data has no batch: there is nothing to measure")
    print(explained(measure.profile, options.devices, parse_bytes(options.memory)))  # noqa: T201


def explained(profile: RelayProfile, num_devices: int, memory: int | None) -> str:
    """Compare all modes, and describe the distribution of the best mode that relays.

    Raises:
        PartitionError: The blocks fit in no mode.
    """
    rows = [("", "mode", "step", "samples/s", "devices of each stage")]
    plans = {}
    failures = {}
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


class _Measure(Callback):
    """Measures all blocks on the first batch."""

    def __init__(self, options: argparse.Namespace, link: Link) -> None:
        self._options = options
        self._link = link
        self.profile: RelayProfile | None = None

    @override
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        pairs, x = pl_module.block_pairs, pl_module.block_input(batch)
        costs = BlockCosts(
            pl_module,
            BlockwiseRelay("ahd", profile_steps=_STEPS),
            LocalTransport(LocalNetwork(1), 0),
            x.device,
            trainer.precision_plugin.forward_context,
            None,
        )
        shapes = infer_shapes(pairs, pl_module.block_loss, x, batch)
        widths = range(1, self._options.devices + 1)
        optimizers = list(map(plain_optimizer, trainer.optimizers))
        self.profile = replace(
            costs.profile(pairs, shapes, batch, len(x), optimizers, widths),
            latency=self._link.latency,
            bandwidth=self._link.bandwidth,
        )
        trainer.should_stop = True
