"""Blockwise distillation in Lightning's hooks: every rank runs the step on its own blocks."""

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
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import rank_zero_info
from torch import Tensor

from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.ir.shares import largest_share
from lightning_tspipe.planning.relay import BlockProfile, RelayPlan, RelayProfile, described
from lightning_tspipe.planning.relay_modes import passes, plan_mode, within
from lightning_tspipe.runtime.relay.blocks import BlockPair, BlockShapes, infer_shapes
from lightning_tspipe.runtime.relay.engine import NETWORKS, RelayEngine, RelayOptions
from lightning_tspipe.runtime.relay.profiler import measure_block
from lightning_tspipe.runtime.replicas import Replicas
from lightning_tspipe.runtime.transport import Transport
from lightning_tspipe.runtime.weights import LOSS_RANK
from lightning_tspipe.strategy.deciding import HOST_LINK, memory_limit
from lightning_tspipe.strategy.optimizers import plain_optimizer
from lightning_tspipe.strategy.origin import Origin, share_weights
from lightning_tspipe.strategy.support import refuse_compiled

if TYPE_CHECKING:
    from lightning_tspipe.strategy.training import TrainingHooks


def relay_of(trainer: Any) -> Any:
    """The callback ``BlockwiseRelay``, if there is one."""
    callbacks = getattr(trainer, "callbacks", ())
    return next((c for c in callbacks if type(c).__name__ == "BlockwiseRelay"), None)


class Relaying:
    """What the strategy does instead, where blocks are relayed.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: TrainingHooks) -> None:
        self._strategy = strategy

    @property
    def is_on(self) -> bool:
        """Whether the user asked for it."""
        return relay_of(self._strategy._trainer) is not None  # noqa: SLF001 - a part of the strategy

    @property
    def _engine(self) -> RelayEngine:
        engine = self._strategy.engine  # type: ignore[attr-defined]
        assert isinstance(engine, RelayEngine)
        return engine

    def set_up(self, batch: Any) -> RelayEngine:
        """Measure, plan, and give every rank its blocks; all ranks have the same first batch."""
        strategy = self._strategy
        if strategy.num_replicas > 1:
            raise ConfigurationError(
                f"BlockwiseRelay with num_stages={strategy.num_ranks}: it divides all devices by "
                "itself. Leave num_stages out, and let devices share blocks with mode='ahd'"
            )
        if strategy.options.schedule != "tspipe":
            raise ConfigurationError(
                f"BlockwiseRelay with schedule={strategy.options.schedule!r}: it has an order of "
                "its own. Use Trainer(strategy='tspipe'), and BlockwiseRelay(mode=...)"
            )
        return set_up_relay(
            strategy._module,  # noqa: SLF001
            relay_of(strategy._trainer),  # noqa: SLF001
            strategy.transport,
            strategy.root_device,
            strategy.precision_plugin.forward_context,
            batch,
            [plain_optimizer(optimizer) for optimizer in strategy.optimizers],
            strategy._origin(),  # noqa: SLF001
            strategy.options.memory_limit,
        )

    def training_step(self, step: Callable[[Any], Any], batch: Any, batch_idx: int) -> Any:
        """One step of this rank.

        Args:
            step: The module's, a function of the batch.
            batch: The batch, on the data rank.
            batch_idx: Its number.
        """
        module: Any = self._strategy._module  # noqa: SLF001
        engine, module.rounds = self._engine, self
        engine.backwards.factor = self._factor
        names = ["weights"] if module.automatic_optimization else module.block_rounds(batch_idx)
        engine.begin(batch, lambda batch: [module.block_input(batch, name) for name in names])
        result = step(engine.batch)
        if not module.automatic_optimization:
            engine.finish()
        return result

    def _factor(self) -> float:
        """By what a loss will be multiplied before its backward."""
        strategy = self._strategy
        scaler = getattr(strategy.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        if not strategy._module.automatic_optimization:  # noqa: SLF001
            return scale
        return scale / strategy._trainer.accumulate_grad_batches  # noqa: SLF001

    def run_round(self, number: int) -> Any:
        """The losses of the blocks that this rank trains; the module asks."""
        return self._engine.run_round(number)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on all ranks; the module asks."""
        transport = self._strategy.transport
        gathered = transport.gather_object(value, LOSS_RANK)
        found: list[Any] = transport.broadcast_object(gathered, LOSS_RANK)
        return found

    def backward(
        self, loss: Tensor, optimizer: Any, reduce: bool, *args: Any, **kwargs: Any
    ) -> Tensor:
        """The backward of this rank's losses."""
        strategy, engine = self._strategy, self._engine
        plugin, module = strategy.precision_plugin, strategy._module  # noqa: SLF001
        strategy.pre_backward(loss)
        loss = plugin.pre_backward(loss, module)
        engine.backward(
            lambda: plugin.backward(loss, module, optimizer, *args, **kwargs), reduce=reduce
        )
        loss = plugin.post_backward(loss, module)
        strategy.post_backward(loss)
        if module.automatic_optimization:
            engine.finish()
        return loss

    def end(self) -> None:
        """The training is over: the module runs its blocks by itself again."""
        module: Any = self._strategy._module  # noqa: SLF001
        if getattr(module, "rounds", None) is self:
            module.rounds = None


def set_up_relay(  # noqa: PLR0913, PLR0917 - everything that decides who does what
    module: Any,
    options: Any,
    transport: Transport,
    device: torch.device,
    context: Callable[[], AbstractContextManager[None]],
    batch: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    origin: Origin,
    memory: int | str | None = None,
) -> RelayEngine:
    """Make this rank ready to train blocks.

    Raises:
        ConfigurationError: Blocks that don't fit together.
        PartitionError: They can't be distributed as wished, or don't fit the memory.
    """
    refuse_compiled(module, ("student", "teacher"))
    seed = transport.broadcast_object(torch.initial_seed() % 2**31, LOSS_RANK)
    engine = RelayEngine(module, NETWORKS, transport, device, seed, context)
    materializer = share_weights(module, NETWORKS, transport, Replicas(), origin)
    pairs = module.block_pairs
    x = module.block_input(batch, "weights")
    shapes = infer_shapes(pairs, module.block_loss, x, batch, context)
    captured = engine.capture_blocks(pairs, module.block_input, batch)
    memory = memory if options.memory_limit is None else options.memory_limit
    costs = _Costs(module, options, transport, device, context, memory)
    plan = costs.plan(pairs, shapes, batch, len(x), optimizers)
    options.plan = plan
    if transport.rank == LOSS_RANK:
        rank_zero_info(f"BlockwiseRelay, mode {options.mode!r}\n{plan}")
    walks = passes(options.mode, plan)
    shared = [pairs[i] for w in walks for s in w.stages if len(s.ranks) > 1 for i in s.trained]
    wished = options.sync_batchnorm
    syncs = any(p.has_batchnorm for p in shared) if wished == "auto" else bool(wished)
    engine.place_blocks(
        captured,
        pairs,
        shapes,
        walks,
        RelayOptions(options.run_ahead, options.mode == "tr", syncs),
        materializer,
    )
    if materializer is not None:
        materializer.done()
    engine.shards.stays_spread |= origin.placement is not None
    for optimizer in optimizers:
        engine.shards.forget_optimizer_state(optimizer)
    return engine


class _Costs:
    """Finds out what blocks cost, and who gets them."""

    def __init__(  # noqa: PLR0913, PLR0917 - what blocks need to run, and where
        self,
        module: Any,
        options: Any,
        transport: Transport,
        device: torch.device,
        context: Callable[[], AbstractContextManager[None]],
        memory: int | str | None,
    ) -> None:
        self._module = module
        self._options = options
        self._transport = transport
        self._device = device
        self._context = context
        self._memory = memory

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
        profile = self._profile(pairs, shapes, batch, samples, optimizers, widths)
        limit = memory_limit(self._memory, self._device)
        if plan is not None:
            return within(limit, described(plan, profile))
        return plan_mode(options.mode, profile, num_ranks, limit)

    def _profile(  # noqa: PLR0913, PLR0917 - what is measured, and how often
        self,
        pairs: Sequence[BlockPair],
        shapes: BlockShapes,
        batch: Any,
        samples: int,
        optimizers: Sequence[torch.optim.Optimizer],
        widths: Sequence[int],
    ) -> RelayProfile:
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
        latency, bandwidth = HOST_LINK
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
        if where is None:
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
