"""Blockwise distillation in Lightning's hooks: every rank runs the step on its own blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Any, cast, final

import torch
from lightning.fabric.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_tspipe.capture.trace import Step
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.planning.relay import RelayPlan
from lightning_tspipe.planning.relay_modes import passes
from lightning_tspipe.planning.run_plan import RunPlan, Source, plain
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.execution.rank import Rank
from lightning_tspipe.runtime.faults.stopping import Stop
from lightning_tspipe.runtime.modes.chain import Chain
from lightning_tspipe.runtime.modes.relay.blocks import BlockPair, BlockShapes, infer_shapes
from lightning_tspipe.runtime.modes.relay.engine import (
    NETWORKS,
    RelayEngine,
    RelayOptions,
    capture_blocks,
)
from lightning_tspipe.runtime.recording import Recorder
from lightning_tspipe.runtime.stages.randomness import draws
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.replicas import Replicas
from lightning_tspipe.strategy.setup.block_costs import BlockCosts
from lightning_tspipe.strategy.setup.declared import relay_of
from lightning_tspipe.strategy.setup.options import SetupOptions
from lightning_tspipe.strategy.setup.plan_of_run import PlanOfRun
from lightning_tspipe.strategy.setup.refusals import refuse_compiled
from lightning_tspipe.strategy.setup.weight_source import InitialWeights, share_weights
from lightning_tspipe.strategy.training.driving import Driver, Parts, PipelineDriver
from lightning_tspipe.strategy.training.optimizers import plain_optimizer


def driver_of(parts: Parts) -> Driver:
    """Choose the driver of a fit: blocks are relayed if the user asked for it."""
    callback = relay_of(parts.run.trainer)
    return PipelineDriver(parts) if callback is None else RelayDriver(parts, callback)


@final
class RelayDriver(Driver):
    """Drives a relay of blocks.

    Args:
        parts: What a step meets.
        callback: ``BlockwiseRelay``, with its options.
    """

    def __init__(self, parts: Parts, callback: Any) -> None:
        self._parts = parts
        self._run = parts.run
        self._callback = callback

    @property
    def _engine(self) -> RelayEngine:
        return cast("RelayEngine", self._run.engine)  # which this driver has made

    @override
    def set_up(self, batch: Any, step: Step) -> Engine:
        run = self._run
        if run.num_replicas > 1:
            raise ConfigurationError(
                f"BlockwiseRelay with num_stages={run.num_ranks}: it divides all devices by "
                "itself. Leave num_stages out, and let devices share blocks with mode='ahd'"
            )
        if run.options.schedule != "tspipe":
            raise ConfigurationError(
                f"BlockwiseRelay with schedule={run.options.schedule!r}: it has an order of "
                "its own. Use Trainer(strategy='tspipe'), and BlockwiseRelay(mode=...)"
            )
        return set_up_relay(
            run.module,
            self._callback,
            run.transport,
            run.root_device,
            run.precision_plugin.forward_context,
            batch,
            [plain_optimizer(optimizer) for optimizer in run.optimizers],
            self._parts.weights.initial,
            run.options,
            run.plan,
            run.stop,
            run.recorder,
        )

    @override
    def begin(self) -> None:
        pass  # each rank runs its optimizers itself

    @override
    def training_step(self, batch: Any, rest: Sequence[Any], batch_idx: int) -> Any:
        run, engine = self._run, self._engine
        module: Any = run.module
        module.rounds = self
        engine.backwards.factor = self._factor
        names = ["weights"] if module.automatic_optimization else module.block_rounds(batch_idx)
        engine.begin(batch, lambda batch: [module.block_input(batch, name) for name in names])
        result = self._parts.data.step("training_step", rest, batch_idx)(engine.batch)
        if not module.automatic_optimization:
            engine.finish()
        self._parts.pipelined.stepped(engine)
        if not module.automatic_optimization:
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

    def run_round(self, number: int) -> Any:
        """The losses of the blocks that this rank trains; the module asks."""
        return self._engine.run_round(number)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on all ranks; the module asks."""
        transport = self._run.transport
        gathered = transport.gather_object(value, LOSS_RANK)
        found: list[Any] = transport.broadcast_object(gathered, LOSS_RANK)
        return found

    @override
    def backward(self, loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        run, engine = self._run, self._engine
        plugin, module = run.precision_plugin, run.module
        run.lightning.pre_backward(loss)
        loss = plugin.pre_backward(loss, module)
        engine.backward(
            lambda: plugin.backward(loss, module, optimizer, *args, **kwargs),
            reduce=run.reduces,
        )
        loss = plugin.post_backward(loss, module)
        run.lightning.post_backward(loss)
        if module.automatic_optimization:
            engine.finish()
        return loss

    @override
    def end(self) -> None:
        """The training is over: the module runs its blocks by itself again."""
        module: Any = self._run.module
        if getattr(module, "rounds", None) is self:
            module.rounds = None


def _made_for(
    options: Any, memory: Any, pairs: Sequence[BlockPair], num_ranks: int
) -> dict[str, Any]:
    """What runs must have in common to give each rank the same blocks."""
    chosen = (options.mode, options.partition, options.widths, memory)
    names = ("mode", "partition", "widths", "memory_limit")
    return {
        "devices": num_ranks,
        "devices per pipeline": num_ranks,
        "blocks": len(pairs),
        **dict(zip(names, map(plain, chosen), strict=True)),
    }


def _source(chosen: SetupOptions, blocks: RelayPlan) -> Source:
    if not blocks.stage_seconds:
        return "given"
    return "flops" if chosen.plans_by_flops else "times"


def _changes(
    found: RunPlan,
    plan: RelayPlan,
    pairs: Sequence[BlockPair],
    is_random: Callable[[BlockPair], bool],
    *,
    syncs: bool | str,
) -> list[str]:
    """What is computed differently where blocks lie otherwise than in the run that was stopped."""
    before = found.blocks
    if before is None:
        return ["its blocks were not relayed"]
    told = {
        "BatchNorm in blocks that devices share normalises by the samples of each "
        "(sync_batchnorm=False)": syncs is False
        and _shares(before) != _shares(plan)
        and any(pair.has_batchnorm for pair in pairs),
        "dropout, or whatever else in the blocks is random, draws from the generator of the rank "
        "that runs it": any(map(is_random, pairs)),
    }
    return [text for text, is_so in told.items() if is_so]


def _shares(plan: RelayPlan) -> list[int]:
    """For each block, how many devices share it."""
    stages = zip(pairwise(plan.cuts), plan.widths, strict=True)
    return [width for (first, last), width in stages for _ in range(first, last)]


def _draws(pair: BlockPair, shapes: BlockShapes, samples: int) -> bool:
    """Whether a block draws random numbers."""
    spec = shapes.input_spec(pair.index, samples)
    blocks: tuple[nn.Module, ...] = (pair.teacher, pair.student)
    return any(draws(block.modules(), block, spec) for block in blocks)


def set_up_relay(  # noqa: PLR0913, PLR0917 - everything that decides who does what
    module: Any,
    options: Any,
    transport: Transport,
    device: torch.device,
    context: Callable[[], AbstractContextManager[None]],
    batch: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    initial: InitialWeights,
    chosen: SetupOptions,
    run: PlanOfRun,
    stop: Stop,
    recorder: Recorder,
) -> RelayEngine:
    """Make this rank ready to train blocks.

    ``options`` is the callback, ``chosen`` the strategy's; ``run`` knows the plan of a checkpoint.

    Raises:
        ConfigurationError: Blocks that don't fit together.
        PartitionError: They can't be distributed as wished, or don't fit the memory.
    """
    refuse_compiled(module, ("student", "teacher"))
    seed = transport.broadcast_object(torch.initial_seed() % 2**31, LOSS_RANK)
    here = Rank(
        module, NETWORKS, transport, device, Chain(), seed, context, stop=stop, recorder=recorder
    )
    materializer = share_weights(module, NETWORKS, transport, Replicas(), initial)
    pairs = module.block_pairs
    x = module.block_input(batch, "weights")
    shapes = infer_shapes(pairs, module.block_loss, x, batch, context)
    captured = capture_blocks(here, pairs, module.block_input, batch)
    memory = chosen.memory_limit if options.memory_limit is None else options.memory_limit
    costs = BlockCosts(
        module, options, transport, device, context, memory,
        by_flops=chosen.plans_by_flops, ranks_per_device=chosen.ranks_per_device,
    )  # fmt: skip
    wanted = _made_for(options, memory, pairs, transport.num_ranks)
    found = run.reuse(wanted)
    if found is None or found.blocks is None:
        blocks = costs.plan(pairs, shapes, batch, len(x), optimizers)
        found = RunPlan(wanted, _source(chosen, blocks), blocks=blocks)
    plan = found.blocks
    assert plan is not None
    options.plan = plan
    is_random = partial(_draws, shapes=shapes, samples=len(x))
    tell = partial(
        _changes, plan=plan, pairs=pairs, is_random=is_random, syncs=options.sync_batchnorm
    )
    run.place(found, tell if transport.rank == LOSS_RANK else None)
    if transport.rank == LOSS_RANK:
        rank_zero_info(f"BlockwiseRelay, mode {options.mode!r}\n{plan}")
    walks = passes(options.mode, plan)
    shared = [pairs[i] for w in walks for s in w.stages if len(s.ranks) > 1 for i in s.trained]
    wished = options.sync_batchnorm
    syncs = any(p.has_batchnorm for p in shared) if wished == "auto" else bool(wished)
    engine = RelayEngine(
        here,
        captured,
        pairs,
        shapes,
        walks,
        RelayOptions(options.run_ahead, options.mode == "tr", syncs),
        materializer,
    )
    if materializer is not None:
        materializer.done()
    engine.shards.stays_spread |= initial.placement is not None
    for optimizer in optimizers:
        engine.shards.forget_optimizer_state(optimizer)
    return engine
