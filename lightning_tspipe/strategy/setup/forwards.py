"""Evaluation without a training: cut the networks by what their forwards cost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lightning_tspipe.capture.plan import NetworkName
from lightning_tspipe.capture.trace import Step
from lightning_tspipe.errors import PartitionError
from lightning_tspipe.planning.cluster import Link
from lightning_tspipe.planning.partition import partition
from lightning_tspipe.planning.placement import Placement, default_ranks
from lightning_tspipe.planning.profile import NetworkProfile
from lightning_tspipe.profiling import profile_forwards
from lightning_tspipe.runtime.execution.mode import TrainingMode
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.runtime.execution.rank import Rank
from lightning_tspipe.runtime.faults.stopping import Stop
from lightning_tspipe.runtime.modes.chain import Chain
from lightning_tspipe.runtime.modes.fanout import Fanout
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.replicas import Replicas
from lightning_tspipe.strategy.setup.declared import find_networks
from lightning_tspipe.strategy.setup.fanout import heads_of, place_heads
from lightning_tspipe.strategy.setup.machine import link_of
from lightning_tspipe.strategy.setup.options import SetupOptions, parse_bytes
from lightning_tspipe.strategy.setup.weight_source import InitialWeights, share_weights

log = logging.getLogger("lightning_tspipe")


def set_up_forwards(  # noqa: PLR0913, PLR0917 - as for training, without optimizers
    module: nn.Module,
    options: SetupOptions,
    transport: Transport,
    device: torch.device,
    context: Callable[[], AbstractContextManager[None]],
    step: Step,
    batch: Any,
    replicas: Replicas,
    initial: InitialWeights,
    stop: Stop,
) -> PipelineEngine:
    """Make this rank ready to evaluate; all ranks of its pipeline have the same first batch.

    Raises:
        CaptureError: The step can't be captured.
        ConfigurationError: The networks are not found.
        PartitionError: They fit no memory. All three on every rank, and with the module untouched.
    """
    networks = find_networks(module, options)
    heads = heads_of(module, networks, device, replicas)
    mode: TrainingMode = Chain() if heads is None else Fanout(heads)
    here = Rank(module, networks, transport, device, mode, context=context, stop=stop)
    materializer = share_weights(module, networks, transport, replicas, initial)
    captured = here.capture(step, batch, training=False)
    if heads is not None:
        placement = place_heads(here, heads, captured, options, step, batch, None).placement
        assert placement is not None
        return PipelineEngine(here, captured, placement, "gpipe", None, materializer)
    planner = transport.num_ranks - 1
    decided: Placement | PartitionError | None = None
    if transport.rank == planner:
        limit, link = parse_bytes(options.memory_limit), link_of(transport, by_flops=False)
        decided = _decide(captured, transport.num_ranks, device, limit, link)
    decided = transport.broadcast_object(decided, planner)
    if isinstance(decided, PartitionError):
        raise decided
    assert decided is not None
    return PipelineEngine(here, captured, decided, "gpipe", None, materializer)


def _decide(
    captured: Captured, num_ranks: int, device: torch.device, limit: int | None, link: Link
) -> Placement | PartitionError:
    """The cuts with the least work on the busiest rank: batches follow each other."""
    busy = [0.0] * num_ranks
    cuts: dict[NetworkName, tuple[int, ...]] = {}
    ranks: dict[NetworkName, tuple[int, ...]] = {}
    for name, profile in profile_forwards(captured, device).items():
        calls = [captured.plan.calls[i].input for i in captured.plan.calls_of(name)]
        seconds = [sum(atom.forward[profile.sizes[-1]] for _ in calls) for atom in profile.atoms]
        samples = sum(spec.shape[0] for spec in calls)
        try:
            cuts[name], ranks[name] = _cut(profile, seconds, samples, busy, limit, link)
        except PartitionError as error:
            return error
        for stage, rank in enumerate(ranks[name]):
            busy[rank] += sum(seconds[cuts[name][stage] : cuts[name][stage + 1]])
    log.info("evaluation: stages start at atoms %s", {k: v[:-1] for k, v in cuts.items()})
    return Placement(
        num_ranks,
        cuts.get("student", ()), ranks.get("student", (0,)),
        cuts.get("teacher", ()), ranks.get("teacher", ()),
    )  # fmt: skip


def _cut(  # noqa: PLR0913, PLR0917 - what a cut depends on
    profile: NetworkProfile,
    seconds: list[float],
    samples: int,
    busy: list[float],
    limit: int | None,
    link: Link,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The cuts of one network beside what the ranks have already, and the ranks of its stages."""
    joined = [index for index, atom in enumerate(profile.atoms) if atom.joined]
    num_stages = min(len(busy), profile.num_atoms - len(joined))
    ranks = default_ranks(num_stages, len(busy))
    cuts = partition(
        seconds,
        num_stages,
        memory=[atom.parameter_bytes for atom in profile.atoms],
        memory_limits=[limit] * num_stages if limit is not None else None,
        transfers=[
            link.latency + samples * atom.output_bytes_per_sample / link.bandwidth
            for atom in profile.atoms
        ],
        loads=[busy[rank] for rank in ranks],
        joined=joined,
        names=[atom.name for atom in profile.atoms],
    )
    return cuts, ranks
