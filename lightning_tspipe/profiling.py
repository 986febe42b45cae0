"""Costs of a captured step: measured on a device, or calculated for one that is not here."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_tspipe.capture.plan import NetworkName, TensorSpec
from lightning_tspipe.networks.profiler import profile_atoms
from lightning_tspipe.planning.profile import AtomProfile, NetworkProfile
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.stages.network import ChainNetwork

log = logging.getLogger("lightning_tspipe")

_PROFILE_SECONDS = 30.0
UPDATE_SECONDS_PER_BYTE = 2.5e-10
_UPDATE_FLOPS_PER_BYTE = 500.0
"""An optimizer step moves about five bytes per byte of parameters (it reads weight, gradient and
momentum, and writes two of them); an accelerator computes about a hundred operations per byte."""


def profile_step(
    captured: Captured,
    device: torch.device,
    optimizers: Sequence[torch.optim.Optimizer],
    microbatch_counts: Sequence[int],
    flops_per_second: float | None = None,
) -> StepProfile:
    """Measure the networks of a step on this device.

    Args:
        captured: The captured step.
        device: Device to measure on; networks that are elsewhere are copied there atom by atom.
        optimizers: Optimizers of the module.
        microbatch_counts: Numbers of micro-batches per call whose sizes are measured. Calculated
            costs are for these too, so that the network can run each of them, or without any for
            all sizes.
        flops_per_second: Speed of a device that is not here, to calculate costs instead of
            measuring.
    """
    plan, networks = captured.plan, captured.networks
    update = UPDATE_SECONDS_PER_BYTE
    if flops_per_second is not None:
        update = _UPDATE_FLOPS_PER_BYTE / flops_per_second
    profiles = profile_forwards(captured, device, microbatch_counts, flops_per_second)
    student, teacher = networks["student"], networks.get("teacher")
    groups = [group for optimizer in optimizers[:1] for group in optimizer.param_groups[:1]]
    averaged = set(captured.followed.values())
    held = [student.num_bytes(atom, averaged) for atom in range(len(student.atoms))]
    return StepProfile(
        student=profiles["student"].holding(held),
        teacher=profiles.get("teacher"),
        num_calls=(len(plan.calls_of("student")), len(plan.calls_of("teacher"))),
        batch_sizes=tuple(plan.calls[i].input.shape[0] for i in plan.calls_of("student")),
        paired=teacher is not None and is_paired(student, teacher),
        optimizer_bytes_per_parameter_byte=float(max(map(moments, groups), default=0)),
        input_bytes_per_sample=plan.calls[0].input.num_bytes
        // max(1, plan.calls[0].input.shape[0]),
        update_seconds_per_byte=update,
    )


def profile_forwards(
    captured: Captured,
    device: torch.device,
    microbatch_counts: Sequence[int] = (1,),
    flops_per_second: float | None = None,
) -> dict[NetworkName, NetworkProfile]:
    """Measure the networks of a step, by default for the whole batch.

    What a step does not train is measured without a backward.

    Args:
        captured: The step.
        device: Device to measure on; networks that are elsewhere are copied there atom by atom.
        microbatch_counts: Numbers of micro-batches per call whose sizes are measured.
        flops_per_second: Speed of a device, to calculate costs instead of measuring.
    """
    plan = captured.plan
    profiles: dict[NetworkName, NetworkProfile] = {}
    for name, network in captured.networks.items():
        calls = [plan.calls[index] for index in plan.calls_of(name)]
        spec = max((call.input for call in calls), key=lambda spec: math.prod(spec.shape))
        sizes = sorted({max(1, math.ceil(spec.shape[0] / count)) for count in microbatch_counts})
        if flops_per_second is None:
            log.info("measuring the %s at %s samples", name, sizes)
        trainable, number = any(call.grad for call in calls), len(network.atoms)
        records = _costs(network, number, spec, sizes, device, flops_per_second, trainable)
        profiles[name] = NetworkProfile(tuple(records))
    return profiles


def seconds_of_forward(
    network: ChainNetwork, num_atoms: int, spec: TensorSpec, device: torch.device
) -> float:
    """Measure the forward of the first atoms of a network, for an input of the given spec."""
    size = spec.shape[0]
    records = _costs(network, num_atoms, spec, [size], device, None, trainable=False)
    return sum(record.forward[size] for record in records)


def flops_per_sample(captured: Captured) -> float:
    """Floating-point operations of one sample in a training step, of all calls together.

    An addition and a multiplication count as two. Only matrix products and convolutions count, and
    not what activation checkpointing recomputes.

    Args:
        captured: The captured step; its networks may be on any device.
    """
    plan = captured.plan
    total = 0.0
    for call in plan.calls:
        network = captured.networks[call.network]
        number, nowhere = network.end_of(call.num_links), torch.device("meta")
        records = _costs(network, number, call.input, (), nowhere, 1.0, call.grad)
        size = call.input.shape[0]
        total += sum(record.forward[size] + record.backward.get(size, 0.0) for record in records)
    return total / max(call.input.shape[0] for call in plan.calls)


def is_paired(student: ChainNetwork, teacher: ChainNetwork) -> bool:
    """Whether the teacher is built like the beginning of the student, atom by atom."""
    number = len(teacher.atoms)
    return number <= len(student.atoms) and all(
        teacher.parameter_shapes(atom) == student.parameter_shapes(atom) for atom in range(number)
    )


def _costs(  # noqa: PLR0913, PLR0917 - what to measure, and where
    network: ChainNetwork,
    num_atoms: int,
    spec: TensorSpec,
    sizes: Sequence[int],
    device: torch.device,
    rate: float | None,
    trainable: bool,
) -> list[AtomProfile]:
    """Costs of the first atoms of a network: measured on a device, or by operations per second."""
    if rate is None:
        inputs = spec.random(torch.Generator().manual_seed(0), device)
    else:
        inputs = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    return profile_atoms(
        network.atoms[:num_atoms],
        inputs,
        sizes,
        trainable=trainable,
        wanted=network.wanted,
        flops_per_second=rate,
        max_seconds=_PROFILE_SECONDS,
    )


def moments(group: Mapping[str, Any]) -> int:
    """Tensors of the size of a parameter that an optimizer keeps for each of a group."""
    return 2 if "betas" in group else int(bool(group.get("momentum", 1)))
