"""Blockwise distillation: what blocks cost, who gets them, and each rank's step on its own."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, cast, final

import torch
from lightning.fabric.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_tspipe.capture.trace import Step
from lightning_tspipe.errors import PartitionError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.ir.shares import largest_share
from lightning_tspipe.planning import relay
from lightning_tspipe.planning.plain import from_plain, plain, to_plain
from lightning_tspipe.planning.plan import RunPlan
from lightning_tspipe.profiling import moments
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.execution.rank import Rank
from lightning_tspipe.runtime.modes.relay.blocks import BlockPair, infer_shapes
from lightning_tspipe.runtime.modes.relay.engine import (
    NETWORKS,
    RelayEngine,
    RelayOptions,
    capture_blocks,
)
from lightning_tspipe.runtime.modes.relay.profiler import measure_block
from lightning_tspipe.runtime.stages.randomness import draws
from lightning_tspipe.strategy.setup.options import SetupOptions
from lightning_tspipe.strategy.setup.refusals import refuse, refuse_compiled
from lightning_tspipe.strategy.setup.resumption import Resumption
from lightning_tspipe.strategy.training.optimizers import plain_optimizer
from lightning_tspipe.strategy.training.steps import Parts, Training


@dataclass(eq=False)
class BlockPlanner:
    """Finds out what blocks cost, and who gets them.

    Attributes:
        here: This rank; the module has the blocks.
        callback: ``BlockwiseRelay``, with its options.
        options: The strategy's.
        batch: A batch, the same on all ranks.
        optimizers: What updates the blocks.
        pairs: The blocks.
        shapes: What flows between them.
    """

    here: Rank
    callback: Any
    options: SetupOptions
    batch: Any
    optimizers: Sequence[torch.optim.Optimizer]

    def __post_init__(self) -> None:
        module: Any = self.here.module
        x = module.block_input(self.batch, "weights")
        self.pairs: Sequence[BlockPair] = module.block_pairs
        self.shapes = infer_shapes(self.pairs, module.block_loss, x, self.batch, self.here.context)
        self._samples = len(x)

    def plan(self, run: Resumption) -> relay.RelayPlan:
        """Who gets which blocks: as in the checkpoint that the run goes on from, or a new plan.

        Args:
            run: Knows that plan, and gets this one, the same on all ranks.

        Raises:
            PartitionError: The blocks can't be distributed as wished, or don't fit the memory.
        """
        wished, transport = self.callback, self.here.transport
        wanted = {
            "devices": transport.num_ranks,
            "devices per pipeline": transport.num_ranks,
            "blocks": len(self.pairs),
            **{name: plain(getattr(wished, name)) for name in ("mode", "partition", "widths")},
            "memory_limit": plain(self.options.memory_limit),
        }
        found = run.reuse(wanted)
        if found is None or found.blocks is None:
            made = self._distribute()
            source = self.options.source if made.stage_seconds else "given"
            found = RunPlan(wanted, source, blocks=made)
        blocks = found.blocks
        assert blocks is not None

        is_first = transport.rank == LOSS_RANK
        run.place(found, partial(self._changes, now=blocks) if is_first else None)
        if is_first:
            rank_zero_info(f"BlockwiseRelay, mode {wished.mode!r}\n{blocks}")
        return blocks

    def _distribute(self) -> relay.RelayPlan:
        """The distribution of the blocks by what they cost; every rank calls it."""
        wished, num_ranks = self.callback, self.here.transport.num_ranks
        names = tuple(pair.name for pair in self.pairs)
        widths: Sequence[int] = (1,)
        plan = None
        if wished.partition is not None:
            if sum(wished.partition) != len(names) or sum(wished.widths) != num_ranks:
                raise PartitionError(
                    f"partition={list(wished.partition)}, widths={list(wished.widths)}: there are "
                    f"{len(names)} blocks and {num_ranks} devices, and the numbers must add up to "
                    "them"
                )
            plan = relay.RelayPlan((0, *accumulate(wished.partition)), wished.widths, names=names)
        elif num_ranks == 1 or wished.mode in {"ir", "dp"}:
            # There is nothing to choose.
            plan = relay.RelayPlan((0, len(names)), (num_ranks,), names=names)
        elif wished.mode == "ahd":
            widths = range(1, num_ranks + 1)
        if plan is not None and self.options.memory_limit is None:
            return plan
        profile = self.profile(widths if plan is None else plan.widths)
        limit = self.options.bytes_on(self.here.device)
        if plan is not None:
            return profile.priced(plan, limit)
        return relay.plan_mode(wished.mode, profile, num_ranks, limit)

    def _changes(self, found: RunPlan, now: relay.RelayPlan) -> list[str]:
        """What is computed differently where blocks lie otherwise than in the run before."""
        before = found.blocks
        if before is None:
            return ["its blocks were not relayed"]
        is_apart = self.callback.sync_batchnorm is False and _shares(before) != _shares(now)
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

    def profile(self, widths: Sequence[int]) -> relay.RelayProfile:
        """What the blocks cost: measured by all ranks, or known from an earlier run.

        Args:
            widths: How many devices may share a block.
        """
        transport = self.here.transport
        sizes = sorted({largest_share(width, self._samples) for width in widths})
        file = self._cache_file(sizes)
        text = None
        if transport.rank == LOSS_RANK and file is not None and file.is_file():
            text = file.read_text(encoding="utf-8")
        text = transport.broadcast_object(text, LOSS_RANK)
        if text is not None:
            rank_zero_info(f"BlockwiseRelay: what blocks cost is known from {file}")
        else:
            # Each rank measures some of them, so that it takes less time.
            mine = self.pairs[transport.rank :: transport.num_ranks]
            own = {pair.index: self._measured(pair, sizes) for pair in mine}
            gathered = transport.gather_object(own, LOSS_RANK)
            blocks = {i: b for part in gathered or () for i, b in part.items()}
            text = json.dumps([to_plain(blocks[i]) for i in sorted(blocks)])
            text = transport.broadcast_object(text, LOSS_RANK)
            if transport.rank == LOSS_RANK and file is not None:
                _write(file, text)
        found = from_plain(tuple[relay.BlockProfile, ...], json.loads(text))
        return relay.RelayProfile(found, self._samples, *self.options.link(transport))

    def _measured(self, pair: BlockPair, sizes: Sequence[int]) -> relay.BlockProfile:
        started = time.perf_counter()
        device = self.here.device
        module: Any = self.here.module
        pair.teacher.to(device)
        pair.student.to(device)
        found = measure_block(
            pair,
            module.block_loss,
            self.shapes,
            sizes,
            self.batch,
            device,
            steps=self.callback.profile_steps,
            moments=max((moments(o.defaults) for o in self.optimizers), default=0),
            context=self.here.context,
            flops_per_second=self.options.rate(device),
        )
        took = time.perf_counter() - started
        rank_zero_info(
            f"BlockwiseRelay: measured block {pair.index + 1} of {len(self.shapes.fields)} "
            f"({pair.name}), with {sizes} samples, in {took:.1f} s"
        )
        return found

    def _cache_file(self, sizes: Sequence[int]) -> Path | None:
        where, device = self.callback.profile_cache, self.here.device
        if where is None or self.options.plans_by_flops:
            return None
        if where == "auto":
            home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            where = Path(home) / "lightning_tspipe"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        known = [
            *(f"{pair.teacher}{pair.student}" for pair in self.pairs), self.shapes, sizes, name,
            torch.__version__, torch.get_num_threads(), self.callback.profile_steps,
        ]  # fmt: skip
        key = hashlib.sha256(repr(known).encode()).hexdigest()[:20]
        return Path(where) / f"relay-{key}.json"


def _shares(plan: relay.RelayPlan) -> list[int]:
    """For each block, how many devices share it."""
    stages = zip(pairwise(plan.cuts), plan.widths, strict=True)
    return [width for (first, last), width in stages for _ in range(first, last)]


def _write(file: Path, text: str) -> None:
    """Whole or not at all; a cache that can't be written is none."""
    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    except OSError as error:
        rank_zero_info(f"BlockwiseRelay: the measured costs are not kept: {error}")


@final
class RelayTraining(Training):
    """Runs the training steps of blocks that are relayed.

    Args:
        parts: What a step meets.
        callback: ``BlockwiseRelay``, with its options.
    """

    def __init__(self, parts: Parts, callback: Any) -> None:
        super().__init__(parts)
        self._callback = callback

    @property
    def _engine(self) -> RelayEngine:
        return cast("RelayEngine", self._run.engine)  # as it was set up here

    @override
    def _set_up(self, batch: Any, step: Step) -> Engine:
        """Make this rank ready to train blocks.

        Raises:
            ConfigurationError: Blocks that don't fit together, or options that don't.
            PartitionError: They can't be distributed as wished, or don't fit the memory.
        """
        run, options = self._run, self._callback
        self._refuse()
        module: Any = run.module
        here = run.rank(NETWORKS)
        materializer = self._parts.weights.share(here)
        memory = run.options.memory_limit if options.memory_limit is None else options.memory_limit
        optimizers = [plain_optimizer(optimizer) for optimizer in run.optimizers]
        chosen = replace(run.options, memory_limit=memory)
        planner = BlockPlanner(here, options, chosen, batch, optimizers)
        pairs = planner.pairs
        captured = capture_blocks(here, pairs, module.block_input, batch)
        options.plan = planner.plan(run.resumption)
        walks = relay.passes(options.mode, options.plan)
        shared = [pairs[i] for w in walks for s in w.stages if len(s.ranks) > 1 for i in s.trained]
        wished = options.sync_batchnorm
        syncs = any(p.has_batchnorm for p in shared) if wished == "auto" else bool(wished)
        together = RelayOptions(options.run_ahead, options.mode == "tr", syncs)
        return RelayEngine(here, captured, pairs, planner.shapes, walks, together, materializer)

    def _refuse(self) -> None:
        run = self._run
        refuse({
            f"BlockwiseRelay with num_stages={run.num_ranks}: it divides all devices by itself. "
            "Leave num_stages out, and let devices share blocks with mode='ahd'":
            run.num_replicas > 1,
            f"BlockwiseRelay with schedule={run.options.schedule!r}: it has an order of its own. "
            "Use Trainer(strategy='tspipe'), and BlockwiseRelay(mode=...)":
            run.options.schedule != "tspipe",
        })  # fmt: skip
        refuse_compiled(run.module, ("student", "teacher"))

    @override
    def _training_step(self, batch: Any, rest: Sequence[Any], batch_idx: int) -> Any:
        run, engine = self._run, self._engine
        module: Any = run.module
        module.rounds = engine
        engine.backwards.factor = self._factor
        names = ["weights"] if module.automatic_optimization else module.block_rounds(batch_idx)
        engine.begin(batch, lambda batch: [module.block_input(batch, name) for name in names])
        result = self._parts.data.step("training_step", rest, batch_idx)(engine.batch)
        self._parts.pipelined.stepped(engine)
        if not module.automatic_optimization:
            engine.finish()
            self._parts.pipelined.step_done()
        return result

    def _factor(self) -> float | Tensor:
        """By what a loss will be multiplied before its backward."""
        run = self._run
        scaler = getattr(run.precision_plugin, "scaler", None)
        # A scale stays on the device: the host would wait for it.
        one = torch.ones((), device=run.root_device)
        scale = 1.0 if scaler is None else scaler.scale(one)
        if not run.module.automatic_optimization:
            return scale
        return scale / run.trainer.accumulate_grad_batches

    @override
    def backward(self, loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        return self._hooked_backward(loss, optimizer, *args, **kwargs)

    @override
    def _run_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        run = self._run
        self._engine.backward(
            lambda: run.precision_plugin.backward(loss, run.module, *args, **kwargs),
            reduce=run.reduces,
        )
        if run.module.automatic_optimization:
            self._engine.finish()

    @override
    def end(self) -> None:
        """The training is over: the module runs its blocks by itself again."""
        super().end()
        module: Any = self._run.module
        module.rounds = None
