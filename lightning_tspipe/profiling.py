"""Costs of a captured step: measured on a device, or calculated for one that is not here."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_tspipe.capture.plan import NetworkName, StepPlan, TensorSpec
from lightning_tspipe.networks.flops import estimate_atoms
from lightning_tspipe.networks.profiler import profile_atoms
from lightning_tspipe.planning.profile import NetworkProfile
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.stages.network import ChainNetwork
from lightning_tspipe.runtime.weights.averages import with_averages

log = logging.getLogger("lightning_tspipe")

_PROFILE_SECONDS = 30.0
_UPDATE_SECONDS_PER_BYTE = 2.5e-10
_UPDATE_FLOPS_PER_BYTE = 500.0
"""An optimizer step moves about five bytes per byte of parameters (it reads weight, gradient and
momentum, and writes two of them); an accelerator computes about a hundred operations per byte."""


def profile_step(  # noqa: PLR0913 - what to measure, where, and how
    captured: Captured,
    device: torch.device,
    optimizers: Sequence[torch.optim.Optimizer],
    microbatch_counts: Sequence[int],
    flops_per_second: float | None = None,
    *,
    only_counts: bool = False,
) -> StepProfile:
    """Measure the networks of a step on this device.

    Args:
        captured: The captured step.
        device: Device to measure on; networks that are elsewhere are copied there atom by atom.
        optimizers: Optimizers of the module.
        microbatch_counts: Numbers of micro-batches per call whose sizes are measured.
        flops_per_second: Speed of a device that is not here, to calculate costs instead of
            measuring.
        only_counts: Whether to calculate only for these numbers of micro-batches, so that the
            network can run each of them; otherwise for any.
    """
    plan, networks = captured.plan, captured.networks
    if flops_per_second is None:
        profiles = _measure(plan, networks, microbatch_counts, device)
        update = _UPDATE_SECONDS_PER_BYTE
    else:
        counts = microbatch_counts if only_counts else ()
        profiles = _estimate(plan, networks, flops_per_second, counts)
        update = _UPDATE_FLOPS_PER_BYTE / flops_per_second
    teacher = networks.get("teacher")
    return StepProfile(
        student=with_averages(profiles["student"], networks["student"], captured.followed),
        teacher=profiles.get("teacher"),
        num_calls=(len(plan.calls_of("student")), len(plan.calls_of("teacher"))),
        batch_sizes=tuple(plan.calls[i].input.shape[0] for i in plan.calls_of("student")),
        paired=teacher is not None and is_paired(networks["student"], teacher),
        optimizer_bytes_per_parameter_byte=_optimizer_bytes(optimizers),
        input_bytes_per_sample=_bytes_per_sample(plan.calls[0].input),
        update_seconds_per_byte=update,
    )


def profile_forwards(
    captured: Captured,
    device: torch.device,
    microbatch_counts: Sequence[int] = (1,),
    flops_per_second: float | None = None,
) -> dict[NetworkName, NetworkProfile]:
    """Measure the forwards of a step that is not trained, by default for the whole batch.

    Args:
        captured: The step, captured without gradients.
        device: Device to measure on; networks that are elsewhere are copied there atom by atom.
        microbatch_counts: Numbers of micro-batches per call whose sizes are measured.
        flops_per_second: Speed of a device, to calculate costs instead of measuring.
    """
    if flops_per_second is not None:
        return _estimate(captured.plan, captured.networks, flops_per_second, microbatch_counts)
    return _measure(captured.plan, captured.networks, microbatch_counts, device)


def seconds_of_forward(
    network: ChainNetwork, num_atoms: int, spec: TensorSpec, device: torch.device
) -> float:
    """Measure the forward of the first atoms of a network, for an input of the given spec."""
    records = profile_atoms(
        network.atoms[:num_atoms],
        _example(spec, device),
        [spec.shape[0]],
        trainable=False,
        max_seconds=_PROFILE_SECONDS,
        lender=network if network.is_elsewhere else None,
    )
    return sum(record.forward[spec.shape[0]] for record in records)


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
        with network.on_meta():
            records = estimate_atoms(
                network.atoms[: network.end_of(call.num_links)],
                torch.empty(call.input.shape, dtype=call.input.dtype, device="meta"),
                flops_per_second=1.0,
                trainable=call.grad,
            )
        size = call.input.shape[0]
        total += sum(record.forward[size] + record.backward.get(size, 0.0) for record in records)
    return total / max(call.input.shape[0] for call in plan.calls)


def is_paired(student: ChainNetwork, teacher: ChainNetwork) -> bool:
    """Whether the teacher is built like the beginning of the student, atom by atom."""
    if len(teacher.atoms) > len(student.atoms):
        return False
    return all(
        teacher.parameter_shapes(atom) == student.parameter_shapes(atom)
        for atom in range(len(teacher.atoms))
    )


def _measure(
    plan: StepPlan,
    networks: Mapping[NetworkName, ChainNetwork],
    microbatch_counts: Sequence[int],
    device: torch.device,
) -> dict[NetworkName, NetworkProfile]:
    profiles: dict[NetworkName, NetworkProfile] = {}
    for name, network in networks.items():
        spec = _largest_input(plan, name)
        batch = spec.shape[0]
        sizes = _sizes(batch, microbatch_counts)
        log.info("measuring the %s at %s samples", name, sizes)
        records = profile_atoms(
            network.atoms,
            _example(spec, device),
            sizes,
            trainable=_is_trained(plan, name),
            wanted=network.wanted,
            max_seconds=_PROFILE_SECONDS,
            lender=network if network.is_elsewhere else None,
        )
        profiles[name] = NetworkProfile(tuple(records))
    return profiles


def _sizes(batch: int, microbatch_counts: Sequence[int]) -> list[int]:
    """Sizes of micro-batches, for given numbers of them."""
    return sorted({max(1, math.ceil(batch / number)) for number in microbatch_counts})


def _estimate(
    plan: StepPlan,
    networks: Mapping[NetworkName, ChainNetwork],
    flops_per_second: float,
    microbatch_counts: Sequence[int],
) -> dict[NetworkName, NetworkProfile]:
    profiles: dict[NetworkName, NetworkProfile] = {}
    for name, network in networks.items():
        spec = _largest_input(plan, name)
        with network.on_meta():
            records = estimate_atoms(
                network.atoms,
                torch.empty(spec.shape, dtype=spec.dtype, device="meta"),
                flops_per_second,
                trainable=_is_trained(plan, name),
                wanted=network.wanted,
                sizes=_sizes(spec.shape[0], microbatch_counts),
            )
        profiles[name] = NetworkProfile(tuple(records))
    return profiles


def _largest_input(plan: StepPlan, name: NetworkName) -> TensorSpec:
    inputs = (plan.calls[index].input for index in plan.calls_of(name))
    return max(inputs, key=lambda spec: math.prod(spec.shape))


def _is_trained(plan: StepPlan, name: NetworkName) -> bool:
    return any(plan.calls[index].grad for index in plan.calls_of(name))


def _example(spec: TensorSpec, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if spec.dtype.is_floating_point:
        values = torch.randn(spec.shape, generator=generator, dtype=torch.float32)
        return values.to(device, spec.dtype)
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device)


def _bytes_per_sample(spec: TensorSpec) -> int:
    return spec.num_bytes // max(1, spec.shape[0])


def _optimizer_bytes(optimizers: Sequence[torch.optim.Optimizer]) -> float:
    """Bytes of optimizer state per byte of parameters."""
    if not optimizers:
        return 0.0
    group = optimizers[0].param_groups[0]
    if "betas" in group:
        return 2.0
    return 1.0 if group.get("momentum", 1.0) else 0.0
