"""Blockwise distillation in Lightning's hooks: every rank runs the step on its own blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast, final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_tspipe.capture.trace import Step
from lightning_tspipe.planning.relay import passes
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.modes.relay.engine import (
    NETWORKS,
    RelayEngine,
    RelayOptions,
    capture_blocks,
)
from lightning_tspipe.strategy.setup.block_costs import BlockPlanner
from lightning_tspipe.strategy.setup.refusals import refuse, refuse_compiled
from lightning_tspipe.strategy.training.optimizers import plain_optimizer
from lightning_tspipe.strategy.training.steps import Parts, Training


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
        refuse({
            f"BlockwiseRelay with num_stages={run.num_ranks}: it divides all devices by itself. "
            "Leave num_stages out, and let devices share blocks with mode='ahd'":
            run.num_replicas > 1,
            f"BlockwiseRelay with schedule={run.options.schedule!r}: it has an order of its own. "
            "Use Trainer(strategy='tspipe'), and BlockwiseRelay(mode=...)":
            run.options.schedule != "tspipe",
        })  # fmt: skip
        module: Any = run.module
        refuse_compiled(module, ("student", "teacher"))
        here = run.rank(NETWORKS)
        materializer = self._parts.weights.share(here)
        memory = run.options.memory_limit if options.memory_limit is None else options.memory_limit
        optimizers = [plain_optimizer(optimizer) for optimizer in run.optimizers]
        chosen = replace(run.options, memory_limit=memory)
        planner = BlockPlanner(here, options, chosen, batch, optimizers)
        pairs = planner.pairs
        captured = capture_blocks(here, pairs, module.block_input, batch)
        options.plan = planner.plan(run.resumption)
        run.table = run.summary = str(options.plan)
        walks = passes(options.mode, options.plan)
        shared = [pairs[i] for w in walks for s in w.stages if len(s.ranks) > 1 for i in s.trained]
        wished = options.sync_batchnorm
        syncs = any(p.has_batchnorm for p in shared) if wished == "auto" else bool(wished)
        together = RelayOptions(options.run_ahead, options.mode == "tr", syncs)
        return RelayEngine(here, captured, pairs, planner.shapes, walks, together, materializer)

    @override
    def _training_step(self, batch: Any, rest: Sequence[Any], batch_idx: int) -> Any:
        run, engine = self._run, self._engine
        module: Any = run.module
        module.rounds = engine
        engine.backwards.factor = self._factor
        names = ["weights"] if module.automatic_optimization else module.block_rounds(batch_idx)
        engine.begin(batch, lambda batch: [module.block_input(batch, name) for name in names])
        result = self._parts.results.step("training_step", rest, batch_idx)(engine.batch)
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
