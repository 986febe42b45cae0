"""Heads on a frozen trunk in Lightning's hooks: who trains which, and how the ranks tell of it.

Every rank runs the step for its own heads, logs for them and updates them; nobody waits for rank 0.
At the ends of epochs the ranks exchange what they know::

    rank 0  a/loss  b/loss ──┐                            ┌──► all metrics, on every rank
    rank 1  c/loss         ──┴── metrics, stopped heads ──┴──► rank 0's loggers: c/loss of rank 1
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_tspipe.capture import swap
from lightning_tspipe.capture.plan import StepPlan, ValueRef
from lightning_tspipe.capture.replay import StepRunner, silenced
from lightning_tspipe.capture.trace import Networks, Step
from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.heads import FanoutTraining, StudentFanout
from lightning_tspipe.heads.training import refuse_trained_trunk
from lightning_tspipe.planning.heads import HeadCost, TrunkCost, spread
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.profiling import profile_forwards
from lightning_tspipe.runtime.engine import Engine
from lightning_tspipe.runtime.heads import Heads
from lightning_tspipe.runtime.programs import Captured
from lightning_tspipe.runtime.replicas import Replicas
from lightning_tspipe.runtime.weights import LOSS_RANK

if TYPE_CHECKING:
    from lightning_tspipe.strategy.options import SetupOptions
    from lightning_tspipe.strategy.strategy import PipelineHooks

log = logging.getLogger("lightning_tspipe")

BLOCK = "student"
_NUM_TIMED = 3
_UPDATE_SECONDS_PER_BYTE = 2.5e-10
_HOST_LINK = (1.5e-4, 4.0e9)


def fanout_of(module: nn.Module) -> StudentFanout | None:
    """The heads of a module; None if its student is something else."""
    student = getattr(module, BLOCK, None)
    return student if isinstance(student, StudentFanout) else None


def fanout_networks(module: nn.Module, options: SetupOptions) -> Networks:
    """The trunk goes through the pipeline; heads run where they are.

    Raises:
        ConfigurationError: No trunk, a trunk that is trained, or options that heads don't have.
    """
    name = type(module).__name__
    if not isinstance(module, FanoutTraining):
        raise ConfigurationError(
            f"{name}.student is a StudentFanout: derive {name} from FanoutTraining first, as in "
            "class Tasks(FanoutTraining, LightningModule), which runs its steps for each head"
        )
    trunk = getattr(module, "teacher", None)
    if not isinstance(trunk, nn.Module):
        raise ConfigurationError(f"{name} has heads and no trunk: give it a submodule `teacher`")
    refuse_trained_trunk(trunk)
    _refuse_options(module, options)
    return Networks((), ("teacher",), (BLOCK,))


def _refuse_options(module: Any, options: SetupOptions) -> None:
    refused = {
        f"schedule={options.schedule!r}": options.schedule == "1f1b",
        "plan": options.plan is not None,
        f"num_microbatches={options.num_microbatches}": options.num_microbatches not in {"auto", 1},
        "activation_checkpointing": options.activation_checkpointing not in {False, "auto"},
        "automatic_optimization=False": not getattr(module, "automatic_optimization", True),
    }
    for name, is_set in refused.items():
        if is_set:
            raise ConfigurationError(
                f"{name} has no meaning for heads on a trunk: each head reads the whole batch's "
                "features at once. Leave it out"
            )


def heads_of(
    module: nn.Module, networks: Networks, device: torch.device, replicas: Replicas
) -> Heads | None:
    """The heads of a module as stages; None if its student is something else.

    Raises:
        ConfigurationError: Several replicas of the pipeline.
    """
    if not networks.local:
        return None
    if replicas.number > 1:
        raise ConfigurationError(
            f"num_stages with {replicas.number} replicas: heads on a trunk are divided among all "
            "devices. Leave num_stages out"
        )
    return Heads(module, BLOCK, device)


def place_heads(  # noqa: PLR0913, PLR0917 - everything that decides who does what
    engine: Engine,
    captured: Captured,
    options: SetupOptions,
    step: Step,
    batch: Any,
    optimizers: Sequence[torch.optim.Optimizer] | None,
    memory_limit: int | None,
) -> Placement:
    """Measure trunk and heads on one rank, and agree on who gets what.

    Args:
        engine: The engine, not placed yet.
        captured: What it found.
        options: The user's.
        step: The step.
        batch: Its batch, on all ranks.
        optimizers: Of the heads; None where nothing is trained.
        memory_limit: Bytes that a rank may hold.

    Raises:
        PartitionError: Nothing fits the memory.
    """
    transport = engine.transport
    planner = transport.num_ranks - 1
    decided: Placement | PartitionError | None = None
    if transport.rank == planner:
        try:
            decided = _decide(engine, captured, options, step, batch, optimizers, memory_limit)
        except PartitionError as error:
            decided = error
    decided = transport.broadcast_object(decided, planner)
    if isinstance(decided, PartitionError):
        raise decided
    return decided


def _decide(  # noqa: PLR0913, PLR0917 - everything that decides who does what
    engine: Engine,
    captured: Captured,
    options: SetupOptions,
    step: Step,
    batch: Any,
    optimizers: Sequence[torch.optim.Optimizer] | None,
    memory_limit: int | None,
) -> Placement:
    num_ranks = engine.transport.num_ranks
    assert captured.heads is not None
    costs = [HeadCost(name, 1.0) for name in captured.heads.student.names]
    if num_ranks > 1:
        trunk = _trunk_cost(captured, engine.device)
        if optimizers is None:
            costs = [HeadCost(cost.name, sum(trunk.seconds) / 10) for cost in costs]
        else:
            costs = _measure(engine, captured.plan, step, batch, optimizers)
    else:
        number = len(captured.networks["teacher"].atoms)
        trunk = TrunkCost((0.0,) * number, (0,) * number, (0.0,) * number, ("",) * number)
    limit = math.inf if memory_limit is None else memory_limit
    found = spread(trunk, costs, num_ranks, limit, _given_cuts(options, trunk, num_ranks))
    if num_ranks > 1:
        log.info("heads on a trunk\n%s", found.describe(costs))
    depth = options.queue_depth
    return found.placement(len(found.ranks) if depth == "auto" else depth)


def _given_cuts(options: SetupOptions, trunk: TrunkCost, num_ranks: int) -> tuple[int, ...] | None:
    """Where the user cuts the trunk.

    Raises:
        PartitionError: Not all of it, or into more stages than there are ranks.
    """
    counts: Any = options.partition
    if isinstance(counts, Mapping):
        counts = counts.get("teacher", "auto")
    if isinstance(counts, str) or num_ranks == 1:
        return None
    number = len(trunk.seconds)
    if sum(counts) != number or min(counts) < 1 or len(counts) > num_ranks:
        raise PartitionError(
            f"partition={list(counts)}: the numbers of the trunk's atoms on each stage must add up "
            f"to {number}, for at most {num_ranks} stages"
        )
    return (0, *accumulate(counts))


def _trunk_cost(captured: Captured, device: torch.device) -> TrunkCost:
    profile = profile_forwards(captured, device)["teacher"]
    calls = [captured.plan.calls[i].input for i in captured.plan.calls_of("teacher")]
    samples = sum(spec.shape[0] for spec in calls)
    latency, bandwidth = _HOST_LINK
    return TrunkCost(
        tuple(len(calls) * atom.forward[profile.sizes[-1]] for atom in profile.atoms),
        tuple(atom.parameter_bytes for atom in profile.atoms),
        tuple(latency + samples * a.output_bytes_per_sample / bandwidth for a in profile.atoms),
        tuple(atom.name for atom in profile.atoms),
        frozenset(index for index, atom in enumerate(profile.atoms) if atom.joined),
    )


def _measure(
    engine: Engine,
    plan: StepPlan,
    step: Step,
    batch: Any,
    optimizers: Sequence[torch.optim.Optimizer],
) -> list[HeadCost]:
    """Time each head's own step on stand-ins for the features; nothing of it is left."""
    module, heads = engine.module, engine.heads
    assert heads is not None
    student = heads.student
    student.to(engine.device)
    features = _stand_ins(plan, engine.device)
    runner = StepRunner(module, engine.names, plan, is_loss_rank=True)
    costs = []
    with swap.attributes_restored(list(module.modules()), tensors=False), silenced(module):
        for name in student.names:
            head = student.heads[name]
            with swap.attributes_restored(list(head.modules()), tensors=True):
                seconds = []
                for _ in range(1 + _NUM_TIMED):
                    started = time.perf_counter()
                    with student.trains((name,), rehearses=True), engine.context():
                        loss = runner.replay(step, batch, 0, lambda c, r: features[c, r])
                    loss.backward()
                    if engine.device.type == "cuda":
                        torch.cuda.synchronize(engine.device)
                    seconds.append(time.perf_counter() - started)
            for parameter in head.parameters():
                parameter.grad = None
            size = sum(p.nbytes for p in head.parameters())
            held = round(size * (2 + _moments(head, optimizers)))
            update = held * _UPDATE_SECONDS_PER_BYTE
            costs.append(HeadCost(name, min(seconds[1:]) + update, held))
    return costs


def _stand_ins(plan: StepPlan, device: torch.device) -> dict[tuple[int, ValueRef], Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        (each.call, ValueRef(each.position, slot)): (
            torch.randn(spec.shape, generator=generator).to(device, spec.dtype)
            if spec.dtype.is_floating_point
            else torch.zeros(spec.shape, dtype=spec.dtype, device=device)
        )
        for each in plan.interceptions
        for slot, spec in enumerate(each.leaves)
        if spec is not None
    }


def _moments(head: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Tensors of the size of a parameter that its optimizer keeps."""
    own = {id(parameter) for parameter in head.parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(id(parameter) in own for parameter in group["params"]):
                return 2 if "betas" in group else int(bool(group.get("momentum", 0)))
    return 0


class HeadsHere:
    """What the strategy does beside, where the student is a fan-out.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: PipelineHooks) -> None:
        self._strategy = strategy
        self._unsent: list[tuple[dict[str, float], int]] = []
        self._restore: Callable[[], None] | None = None

    @property
    def student(self) -> StudentFanout | None:
        """The heads, once they are placed over several ranks; None without any."""
        engine = self._strategy.engine
        if engine is None or engine.heads is None or engine.transport.num_ranks == 1:
            return None
        return engine.heads.student

    def placed(self, engine: Engine) -> None:
        """Every rank has its heads: those it trains from now on."""
        heads = engine.heads
        if heads is None:
            return
        own = engine.pipeline.stages_of(engine.rank)
        heads.student.here = tuple(heads.student.names[stage] for stage in own)
        if engine.transport.num_ranks > 1:
            self._keep_logs()

    def ended(self, engine: Engine) -> None:
        """The training is over; whoever asks now means all heads."""
        if engine.heads is not None:
            engine.heads.student.here = engine.heads.student.names

    def release(self) -> None:
        """Logging is Lightning's again."""
        if self._restore is not None:
            self._restore()
            self._restore = None

    def _keep_logs(self) -> None:
        """What this rank logs is for rank 0's loggers, which get it when the ranks next meet."""
        strategy = self._strategy
        if strategy.is_loss_rank or self._restore is not None:
            return
        trainer = strategy._trainer  # noqa: SLF001 - a part of the strategy
        connector: Any = trainer._logger_connector  # noqa: SLF001 - no public way
        original = connector.log_metrics

        def log_metrics(metrics: dict[str, Any], step: int | None = None) -> None:
            if trainer.loggers and metrics:
                steps = trainer.fit_loop.epoch_loop._batches_that_stepped  # noqa: SLF001
                values = {k: float(v) for k, v in metrics.items() if "/" in k}
                self._unsent.append((values, steps if step is None else step))
            original(metrics, step)

        connector.log_metrics = log_metrics

        def restore() -> None:
            vars(connector).pop("log_metrics", None)

        self._restore = restore

    def exchange(self) -> None:
        """All ranks get to know metrics and stopped heads; rank 0 logs. Every rank calls it."""
        student = self.student
        if student is None:
            return
        strategy = self._strategy
        trainer = strategy._trainer  # noqa: SLF001
        transport = strategy.transport
        unsent, self._unsent = self._unsent, []
        known = {name: value.detach().cpu() for name, value in trainer.callback_metrics.items()}
        gathered = transport.gather_object((known, dict(student.stopped), unsent), LOSS_RANK)
        told = None
        if gathered is not None:
            metrics = {k: v for each, _, _ in reversed(gathered) for k, v in each.items()}
            for (own, _, _), rank in zip(gathered, range(len(gathered)), strict=True):
                metrics |= {k: v for k, v in own.items() if self._is_of(k, rank)}
            stopped = {k: v for _, each, _ in gathered for k, v in each.items()}
            told = metrics, stopped
            records = [record for _, _, each in gathered for record in each]
            for values, step in sorted(records, key=lambda record: record[1]):
                trainer._logger_connector.log_metrics(values, step)  # noqa: SLF001
        metrics, stopped = transport.broadcast_object(told, LOSS_RANK)
        trainer._logger_connector._callback_metrics.update(metrics)  # noqa: SLF001
        for name, reason in stopped.items():
            if name not in student.stopped and strategy.is_loss_rank:
                log.warning("head %s has stopped: %s", name, reason)
            student.stop(name, reason)
        if set(student.stopped) >= set(student.names):
            trainer.should_stop = True

    def _is_of(self, metric: str, rank: int) -> bool:
        """Whether a metric is one of a head on a rank."""
        engine, student = self._strategy.engine, self.student
        assert engine is not None
        assert student is not None
        head, _, rest = metric.partition("/")
        if not rest or head not in student.names:
            return False
        return engine.pipeline.student.ranks[student.names.index(head)] == rank
