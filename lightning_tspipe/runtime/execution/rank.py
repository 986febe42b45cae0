"""One rank before anything is placed: the module, the other ranks, and how a step is captured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_tspipe.capture.replay import StepRunner
from lightning_tspipe.capture.trace import Networks, Step, Tracer
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.networks.compiling import Compiler
from lightning_tspipe.runtime.execution.mode import TrainingMode
from lightning_tspipe.runtime.faults.stopping import Stop
from lightning_tspipe.runtime.recording import Recorder
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.stages.network import ChainNetwork
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.replicas import Replicas
from lightning_tspipe.runtime.weights.averages import followed_tensors
from lightning_tspipe.runtime.weights.ownership import forget_graphs


@dataclass(frozen=True)
class Rank:
    """What one rank has, whatever lies on it.

    Attributes:
        module: The module that has the networks.
        networks: Their names.
        transport: How to reach the other ranks.
        device: Where this rank computes.
        mode: The way of training.
        seed: Seed of the steps' random streams, the same on all ranks.
        context: The precision plugin's forward context.
        replicas: The other pipelines that train the same networks on other batches.
        compiler: Compiles what stages run.
        stop: Whether the ranks were asked to stop.
        recorder: Notes what this rank does when.
    """

    module: nn.Module
    networks: Networks
    transport: Transport
    device: torch.device
    mode: TrainingMode
    seed: int = 0
    context: Callable[[], AbstractContextManager[None]] = nullcontext
    replicas: Replicas = field(default_factory=Replicas)
    compiler: Compiler | None = None
    stop: Stop = field(default_factory=Stop)
    recorder: Recorder = field(default_factory=Recorder)

    def capture(self, step: Step, batch: Any, *, training: bool = True) -> Captured:
        """Trace a step on its first batch; all ranks do it, with the same batch.

        Args:
            step: The step, a function of the batch.
            batch: The batch.
            training: Whether it takes part in a backward; without one, it may call parts of the
                networks too.

        Raises:
            CaptureError: The step can't be captured.
        """
        module, names = self.module, self.networks
        forget_graphs(module)  # before copies of attributes hold on to them
        tracer = Tracer(module, names, self.device, parts=not training)
        is_loss_rank = self.transport.rank == LOSS_RANK
        with self.mode.rehearsing(), nullcontext() if training else torch.no_grad():
            plan = tracer.trace(step, batch, self.seed)
            runner = StepRunner(module, names, plan, is_loss_rank=is_loss_rank)
            runner.late_effects(step, batch, self.seed, rehearsal=True)
        networks = {name: ChainNetwork.of(name, module, plan, self.device) for name in plan.chains}
        followed: dict[str, str] = {}
        if "teacher" not in networks:
            needs_all = plan.has_ema and self.transport.num_ranks > 1
            followed = followed_tensors(module, names, needs_all=needs_all)
        return Captured(plan, networks, self.mode.beside, followed)
