"""Measure what blocks cost, cache it for the next run, and divide the blocks among the ranks."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.utilities import rank_zero_info
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.ir.shares import largest_share
from lightning_tspipe.networks import swap
from lightning_tspipe.plain import from_plain, plain, to_plain
from lightning_tspipe.planning.plan import RunPlan
from lightning_tspipe.planning.relay import BlockProfile, RelayPlan, RelayProfile, plan_mode
from lightning_tspipe.profiling.atoms import seconds_of
from lightning_tspipe.profiling.costs import cache_folder, checksum, machine, write_whole
from lightning_tspipe.profiling.steps import moments
from lightning_tspipe.runtime.execution.engine import Rank
from lightning_tspipe.runtime.modes.relay.blocks import BlockPair, infer_shapes
from lightning_tspipe.runtime.stages.network import draws
from lightning_tspipe.strategy.setup.options import SetupOptions
from lightning_tspipe.strategy.setup.resumption import Resumption


class BlockPlanner:
    """Finds out what blocks cost, and who gets them.

    Args:
        here: This rank; the module has the blocks.
        callback: ``BlockwiseRelay``, with its options.
        options: The strategy's.
        batch: A batch, the same on all ranks.
        optimizers: What updates the blocks.

    Attributes:
        pairs: The blocks.
        shapes: What flows between them.
    """

    def __init__(
        self,
        here: Rank,
        callback: Any,
        options: SetupOptions,
        batch: Any,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        module: Any = here.module
        x = module.block_input(batch, "weights")
        self.pairs: Sequence[BlockPair] = module.block_pairs(x)
        self.shapes = infer_shapes(self.pairs, module.block_loss, x, batch, here.context)
        self._here, self._callback, self._options = here, callback, options
        self._batch, self._samples, self._optimizers = batch, len(x), optimizers

    def plan(self, run: Resumption) -> RelayPlan:
        """Who gets which blocks: as in the checkpoint that the run goes on from, or a new plan.

        Args:
            run: Knows that plan, and gets this one, the same on all ranks.

        Raises:
            PartitionError: The blocks can't be distributed as wished, or don't fit the memory.
        """
        wished, transport = self._callback, self._here.transport
        wanted = {
            "devices": transport.num_ranks,
            "devices per pipeline": transport.num_ranks,
            "blocks": len(self.pairs),
            **{name: plain(getattr(wished, name)) for name in ("mode", "partition", "widths")},
            "memory_limit": plain(self._options.memory_limit),
        }
        found = run.reuse(wanted)
        if found is None or found.blocks is None:
            made = self._distribute()
            source = self._options.source if made.stage_seconds else "given"
            found = RunPlan(wanted, source, blocks=made)
        blocks = found.blocks
        assert blocks is not None

        is_first = transport.rank == LOSS_RANK
        run.place(found, partial(self._changes, now=blocks) if is_first else None)
        if is_first:
            rank_zero_info(f"BlockwiseRelay, mode {wished.mode!r}\n{blocks}")
        return blocks

    def _distribute(self) -> RelayPlan:
        """The distribution of the blocks by what they cost; every rank calls it."""
        wished, num_ranks = self._callback, self._here.transport.num_ranks
        names = tuple(pair.name for pair in self.pairs)
        widths: Sequence[int] = (1,)
        plan = None
        if wished.partition is not None:
            if sum(wished.partition) != len(names) or sum(wished.widths) != num_ranks:
                raise PartitionError(
                    f"partition={list(wished.partition)}, widths={list(wished.widths)}: there are "
                    f"{len(names)} blocks and {num_ranks} devices, which these numbers must add "
                    "up to"
                )
            plan = RelayPlan((0, *accumulate(wished.partition)), wished.widths, names=names)
        elif num_ranks == 1 or wished.mode in {"ir", "dp"}:
            # There is nothing to choose.
            plan = RelayPlan((0, len(names)), (num_ranks,), names=names)
        elif wished.mode == "ahd":
            widths = range(1, num_ranks + 1)
        if plan is not None and self._options.memory_limit is None:
            return plan
        profile = self.profile(widths if plan is None else plan.widths)
        limit = self._options.bytes_on(self._here.device)
        if plan is not None:
            return profile.priced(plan, limit)
        return plan_mode(wished.mode, profile, num_ranks, limit)

    def _changes(self, found: RunPlan, now: RelayPlan) -> list[str]:
        """What is computed differently where blocks lie otherwise than in the run before."""
        before = found.blocks
        if before is None:
            return ["its blocks were not relayed"]
        is_apart = self._callback.sync_batchnorm is False and _shares(before) != _shares(now)
        told = {
            "BatchNorm in blocks that devices share normalises by the samples of each "
            "(sync_batchnorm=False)": is_apart and any(pair.has_batchnorm for pair in self.pairs),
            "dropout, or whatever else in the blocks is random, draws from the generator of the "
            "rank that runs it": any(map(self._draws, self.pairs)),
        }
        return [text for text, is_so in told.items() if is_so]

    def _draws(self, pair: BlockPair) -> bool:
        """Whether a block draws random numbers."""
        spec = self.shapes.input_spec(pair.index, self._samples)
        return any(draws(block.modules(), block, spec) for block in (pair.teacher, pair.student))

    # What blocks cost

    def profile(self, widths: Sequence[int]) -> RelayProfile:
        """What the blocks cost: measured by all ranks, or known from an earlier run.

        Args:
            widths: How many devices may share a block.
        """
        transport = self._here.transport
        sizes = sorted({largest_share(width, self._samples) for width in widths})
        file = self._cache_file(sizes)
        text = None
        if transport.rank == LOSS_RANK and file is not None and file.is_file():
            text = file.read_text(encoding="utf-8")
        text = transport.broadcast_object(text, LOSS_RANK)
        if text is not None:
            rank_zero_info(f"BlockwiseRelay: costs of blocks are read from {file}")
        else:
            # Each rank measures some of them, so that it takes less time.
            mine = self.pairs[transport.rank :: transport.num_ranks]
            own = {pair.index: self._measured(pair, sizes) for pair in mine}
            gathered = transport.gather_object(own, LOSS_RANK)
            blocks = {i: b for part in gathered or () for i, b in part.items()}
            text = json.dumps([to_plain(blocks[i]) for i in sorted(blocks)])
            text = transport.broadcast_object(text, LOSS_RANK)
            if transport.rank == LOSS_RANK and file is not None:
                write_whole(file, text)
        found = from_plain(tuple[BlockProfile, ...], json.loads(text))
        return RelayProfile(found, self._samples, *self._options.link(transport))

    def _measured(self, pair: BlockPair, sizes: Sequence[int]) -> BlockProfile:
        started = time.perf_counter()
        pair.teacher.to(self._here.device)
        pair.student.to(self._here.device)
        found = self._costs_of(pair, sizes)
        took = time.perf_counter() - started
        rank_zero_info(
            f"BlockwiseRelay: measured block {pair.index + 1} of {len(self.shapes.fields)} "
            f"({pair.name}), with {sizes} samples, in {took:.1f} s"
        )
        return found

    def _costs_of(self, pair: BlockPair, sizes: Sequence[int]) -> BlockProfile:
        """Run a block as a training would, for each number of samples; nothing of it changes."""
        here, shapes, module = self._here, self.shapes, cast("Any", self._here.module)
        blocks = (pair.teacher, pair.student)
        trained = [parameter for parameter in pair.student.parameters() if parameter.requires_grad]
        teacher: dict[int, float] = {}
        student: dict[int, float] = {}
        activations = 0

        def forward(x: Tensor) -> Tensor:
            with torch.no_grad(), here.context():
                target: Tensor = pair.teacher(x)
            return target

        def train(x: Tensor, target: Tensor, part: Any) -> None:
            with here.context():
                loss = module.block_loss(pair.student(x), target, pair.index, part)
            if loss.requires_grad:
                loss.backward()

        rate = self._options.rate(here.device)
        steps = self._callback.profile_steps
        seconds = partial(seconds_of, device=here.device, steps=steps, rate=rate)
        parts = [part for block in blocks for part in block.modules()]
        with swap.attributes_restored(parts, tensors=True):
            for samples in sizes:
                spec = shapes.input_spec(pair.index, samples)
                x = torch.zeros(spec.shape, dtype=spec.dtype, device=here.device)
                if spec.dtype.is_floating_point:
                    x.normal_()
                cut = partial(_first, samples=samples)
                work = partial(train, x, forward(x), pytree.tree_map_only(Tensor, cut, self._batch))
                teacher[samples] = seconds(partial(forward, x))
                student[samples] = seconds(work)
                activations = max(activations, math.ceil(_bytes_kept(work) / samples))
            update = seconds(partial(_touch, trained))
        for parameter in trained:
            parameter.grad = None
        gradients = sum(p.nbytes for p in trained)
        held = sum(t.nbytes for block in blocks for t in (*block.parameters(), *block.buffers()))
        kept = max((moments(optimizer.defaults) for optimizer in self._optimizers), default=0)
        return BlockProfile(
            pair.name, teacher, student, update, shapes.input_spec(pair.index, 1).num_bytes,
            gradients, held + (2 + kept) * gradients, activations,
        )  # fmt: skip

    def _cache_file(self, sizes: Sequence[int]) -> Path | None:
        where, device = self._callback.profile_cache, self._here.device
        if where is None or self._options.plans_by_flops:
            return None
        folder = cache_folder() if where == "auto" else Path(where)
        if folder is None:
            return None
        known = [
            *(f"{pair.teacher}{pair.student}" for pair in self.pairs), self.shapes, sizes,
            *machine(device), self._callback.profile_steps,
        ]  # fmt: skip
        return folder / f"relay-{checksum(known)[:20]}.json"


def _shares(plan: RelayPlan) -> list[int]:
    """For each block, how many devices share it."""
    stages = zip(pairwise(plan.cuts), plan.widths, strict=True)
    return [width for (first, last), width in stages for _ in range(first, last)]


def _first(leaf: Tensor, samples: int) -> Tensor:
    """The beginning of a tensor of the batch, if it is as long."""
    return leaf[:samples] if leaf.dim() and len(leaf) >= samples else leaf


@torch.no_grad()
def _touch(parameters: Sequence[nn.Parameter]) -> None:
    """About what an optimizer reads and writes, without a change."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.add_(parameter.grad, alpha=0.0)


def _bytes_kept(run: Callable[[], Any]) -> int:
    """Bytes that the forwards of a run keep for their backwards, beside parameters."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.nbytes)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(kept.values())
