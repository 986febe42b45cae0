"""Measure what blocks cost, cache it for the next run, and divide the blocks among the ranks."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_info

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.ir.shares import largest_share
from lightning_tspipe.planning.relay import BlockProfile, RelayPlan, RelayProfile, described
from lightning_tspipe.planning.relay_modes import plan_mode, within
from lightning_tspipe.runtime.modes.relay.blocks import BlockPair, BlockShapes
from lightning_tspipe.runtime.modes.relay.profiler import measure_block
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.strategy.setup.machine import link_of, memory_limit, nominal_rate


class BlockCosts:
    """Finds out what blocks cost, and who gets them.

    Args:
        module: Has the blocks.
        options: The callback ``BlockwiseRelay``.
        transport: How to reach the other ranks, which measure too.
        device: Where to measure.
        context: The precision plugin's forward context.
        memory: What a device may hold.
        by_flops: Whether costs are calculated from operations, instead of measured.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what blocks need to run, and where
        self,
        module: Any,
        options: Any,
        transport: Transport,
        device: torch.device,
        context: Callable[[], AbstractContextManager[None]],
        memory: int | str | None,
        *,
        by_flops: bool = False,
        ranks_per_device: int = 1,
    ) -> None:
        self._module = module
        self._options = options
        self._transport = transport
        self._device = device
        self._context = context
        self._memory = memory
        self._ranks_per_device = ranks_per_device
        self._rate = nominal_rate(device) if by_flops else None

    def plan(
        self,
        pairs: Sequence[BlockPair],
        shapes: BlockShapes,
        batch: Any,
        samples: int,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> RelayPlan:
        """The distribution of the blocks, the same on all ranks.

        Raises:
            PartitionError: There is none.
        """
        options, num_ranks = self._options, self._transport.num_ranks
        names = tuple(pair.name for pair in pairs)
        widths: Sequence[int] = (1,)
        plan = None
        if options.partition is not None:
            plan, widths = _by_hand(names, options, num_ranks), sorted(set(options.widths))
        elif num_ranks == 1 or options.mode in {"ir", "dp"}:
            # There is nothing to choose.
            plan, widths = RelayPlan((0, len(pairs)), (num_ranks,), names=names), (num_ranks,)
        elif options.mode == "ahd":
            widths = range(1, num_ranks + 1)
        if plan is not None and self._memory is None:
            return plan
        profile = self.profile(pairs, shapes, batch, samples, optimizers, widths)
        limit = memory_limit(
            self._memory, self._device,
            ranks_per_device=self._ranks_per_device, whatever_is_free=self._rate is not None,
        )  # fmt: skip
        if plan is not None:
            return within(limit, described(plan, profile))
        return plan_mode(options.mode, profile, num_ranks, limit)

    def profile(  # noqa: PLR0913, PLR0917 - what is measured, and how often
        self,
        pairs: Sequence[BlockPair],
        shapes: BlockShapes,
        batch: Any,
        samples: int,
        optimizers: Sequence[torch.optim.Optimizer],
        widths: Sequence[int],
    ) -> RelayProfile:
        """What the blocks cost: measured by all ranks, or known from an earlier run.

        Args:
            pairs: The blocks.
            shapes: What flows between them.
            batch: A batch.
            samples: Its samples.
            optimizers: What updates the blocks.
            widths: How many devices may share a block.
        """
        transport = self._transport
        sizes = sorted({largest_share(width, samples) for width in widths})
        file = self._cache_file(pairs, shapes, sizes)
        text = None
        if transport.rank == LOSS_RANK and file is not None and file.is_file():
            text = file.read_text(encoding="utf-8")
        text = transport.broadcast_object(text, LOSS_RANK)
        if text is not None:
            rank_zero_info(f"BlockwiseRelay: what blocks cost is known from {file}")
        else:
            # Each rank measures some of them, so that it takes less time.
            own = {
                pair.index: self._measured(pair, shapes, sizes, batch, optimizers)
                for pair in pairs[transport.rank :: transport.num_ranks]
            }
            gathered = transport.gather_object(own, LOSS_RANK)
            blocks = {i: b for part in gathered or () for i, b in part.items()}
            text = json.dumps([asdict(blocks[i]) for i in sorted(blocks)])
            text = transport.broadcast_object(text, LOSS_RANK)
            if transport.rank == LOSS_RANK and file is not None:
                _write(file, text)
        latency, bandwidth = link_of(transport, by_flops=self._rate is not None)
        return RelayProfile(tuple(map(_block, json.loads(text))), samples, latency, bandwidth)

    def _measured(
        self,
        pair: BlockPair,
        shapes: BlockShapes,
        sizes: Sequence[int],
        batch: Any,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> BlockProfile:
        started = time.perf_counter()
        pair.teacher.to(self._device)
        pair.student.to(self._device)
        found = measure_block(
            pair,
            self._module.block_loss,
            shapes,
            sizes,
            batch,
            self._device,
            steps=self._options.profile_steps,
            moments=max(map(_moments, optimizers), default=0),
            context=self._context,
            flops_per_second=self._rate,
        )
        took = time.perf_counter() - started
        rank_zero_info(
            f"BlockwiseRelay: measured block {pair.index + 1} of {len(shapes.fields)} "
            f"({pair.name}), with {sizes} samples, in {took:.1f} s"
        )
        return found

    def _cache_file(
        self, pairs: Sequence[BlockPair], shapes: BlockShapes, sizes: Sequence[int]
    ) -> Path | None:
        where = self._options.profile_cache
        if where is None or self._rate is not None:
            return None
        if where == "auto":
            home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            where = Path(home) / "lightning_tspipe"
        name = str(self._device)
        if self._device.type == "cuda":
            name = torch.cuda.get_device_name(self._device)
        known = [
            *(f"{pair.teacher}{pair.student}" for pair in pairs), shapes, sizes, name,
            torch.__version__, torch.get_num_threads(), self._options.profile_steps,
        ]  # fmt: skip
        key = hashlib.sha256(repr(known).encode()).hexdigest()[:20]
        return Path(where) / f"relay-{key}.json"


def _write(file: Path, text: str) -> None:
    """Whole or not at all; a cache that can't be written is none."""
    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    except OSError as error:
        rank_zero_info(f"BlockwiseRelay: the measured costs are not kept: {error}")


def _block(data: dict[str, Any]) -> BlockProfile:
    for kind in ("teacher", "student"):
        data[kind] = {int(size): seconds for size, seconds in data[kind].items()}
    return BlockProfile(**data)


def _moments(optimizer: torch.optim.Optimizer) -> int:
    """Tensors of the size of a parameter that the optimizer keeps for each."""
    if "betas" in optimizer.defaults:
        return 2
    return int(bool(optimizer.defaults.get("momentum", 0)))


def _by_hand(names: tuple[str, ...], options: Any, num_ranks: int) -> RelayPlan:
    if sum(options.partition) != len(names) or sum(options.widths) != num_ranks:
        raise PartitionError(
            f"partition={list(options.partition)}, widths={list(options.widths)}: there are "
            f"{len(names)} blocks and {num_ranks} devices, and the numbers must add up to them"
        )
    return RelayPlan((0, *accumulate(options.partition)), options.widths, names=names)
