"""Costs of a captured step: measured on a device, or calculated for one that is not here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_tspipe.capture.plan import CallPlan, NetworkName, StepPlan, TensorSpec
from lightning_tspipe.planning.profile import AtomProfile, NetworkProfile
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.planning.ties import Tied
from lightning_tspipe.profiling.atoms import profile_atoms
from lightning_tspipe.profiling.costs import Costs
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.stages.network import ChainNetwork, is_paired
from lightning_tspipe.runtime.stages.routes import RouteChain

_PROFILE_SECONDS = 30.0
UPDATE_SECONDS_PER_BYTE = 2.5e-10
_UPDATE_FLOPS_PER_BYTE = 500.0
"""An optimizer step moves about five bytes per byte of parameters (it reads weight, gradient and
momentum, and writes two of them); an accelerator computes about a hundred operations per byte."""


def profile_step(  # noqa: PLR0913 - what is measured, and for what
    captured: Captured,
    device: torch.device,
    optimizers: Sequence[torch.optim.Optimizer],
    microbatch_counts: Sequence[int],
    flops_per_second: float | None = None,
    *,
    ties: bool = True,
    beside: Sequence[Tensor] = (),
    costs: Costs | None = None,
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
        ties: Whether stages on several ranks may read one parameter.
        beside: The parameters that lie with the loss.
        costs: What is known of the networks; None: what is in a file from earlier runs.
    """
    plan, networks = captured.plan, captured.networks
    update = UPDATE_SECONDS_PER_BYTE
    if flops_per_second is not None:
        update = _UPDATE_FLOPS_PER_BYTE / flops_per_second
    profiles = profile_forwards(captured, device, microbatch_counts, flops_per_second, costs)
    student, teacher = networks["student"], networks.get("teacher")
    groups = [group for optimizer in optimizers[:1] for group in optimizer.param_groups[:1]]
    averaged = set(captured.followed.values())
    held = [student.num_bytes(atom, averaged) for atom in range(len(student.atoms))]
    return StepProfile(
        student=profiles["student"].holding(held).joining(student.joined(ties=ties)),
        teacher=profiles.get("teacher"),
        num_calls=(len(plan.calls_of("student")), len(plan.calls_of("teacher"))),
        batch_sizes=tuple(plan.calls[i].batch_size for i in plan.calls_of("student")),
        paired=teacher is not None and is_paired(student, teacher),
        optimizer_bytes_per_parameter_byte=float(max(map(moments, groups), default=0)),
        input_bytes_per_sample=sum(spec.num_bytes for spec in plan.calls[0].inputs)
        // max(1, plan.calls[0].batch_size),
        update_seconds_per_byte=update,
        is_fed=bool(plan.fed_at),
        loss_seconds_per_sample=_loss_seconds(plan, profiles, flops_per_second),
        loss_parameter_bytes=sum(own.nbytes for own in beside),
        loss_trainable_bytes=sum(own.nbytes for own in beside if own.requires_grad),
        tied=tuple(_tied(captured, beside)),
    )


def _tied(captured: Captured, beside: Sequence[Tensor]) -> Iterator[Tied]:
    """What several atoms read, or one that the loss has, too."""
    readers: dict[Tensor, dict[NetworkName, list[int]]] = {}
    names: dict[Tensor, str] = {}
    for network, held in captured.networks.items():
        for place, atom in enumerate(held.atoms):
            for name, tensor in zip(atom.tensor_names, atom.tensors(), strict=True):
                names.setdefault(tensor, name)
                readers.setdefault(tensor, {}).setdefault(network, []).append(place)
    with_loss = set(beside)
    for tensor, places in readers.items():
        if sum(map(len, places.values())) + (tensor in with_loss) > 1:
            atoms = {network: tuple(each) for network, each in places.items()}
            trained = tensor.nbytes * tensor.requires_grad
            yield Tied(
                names[tensor], tensor.nbytes, trained, **atoms, with_loss=tensor in with_loss
            )


def _loss_seconds(
    plan: StepPlan, profiles: Mapping[NetworkName, NetworkProfile], rate: float | None
) -> float:
    """Seconds for what the loss multiplies, of a sample: at the rate of what was measured."""
    if rate is None:
        flops = seconds = 0.0
        for name, profile in profiles.items():
            trained, size = name == "student", profile.sizes[-1]
            flops += (1 + 2 * trained) * sum(a.flops_per_sample * size for a in profile.atoms)
            kinds = ("forward", "backward") if trained else ("forward",)
            seconds += sum(profile.sums(kind, size)[-1] for kind in kinds)
        rate = flops / seconds if flops else math.inf
    return plan.flops / rate / max(call.batch_size for call in plan.calls)


def costs_of(captured: Captured, device: torch.device, rate: float | None = None) -> Costs:
    """What is known of the costs of a step's networks, from earlier runs on this machine.

    Args:
        captured: The step.
        device: Where it runs.
        rate: Speed of a device by which costs are calculated: then nothing is measured or kept.
    """
    if rate is not None:
        return Costs()
    atoms = [atom for network in captured.networks.values() for atom in network.atoms]
    return Costs.of((tensor for atom in atoms for tensor in atom.tensors()), device)


def profile_forwards(
    captured: Captured,
    device: torch.device,
    microbatch_counts: Sequence[int] = (1,),
    flops_per_second: float | None = None,
    costs: Costs | None = None,
) -> dict[NetworkName, NetworkProfile]:
    """Measure the networks of a step, by default for the whole batch.

    What a step does not train is measured without a backward.

    Args:
        captured: The step.
        device: Device to measure on; networks that are elsewhere are copied there atom by atom.
        microbatch_counts: Numbers of micro-batches per call whose sizes are measured.
        flops_per_second: Speed of a device, to calculate costs instead of measuring.
        costs: As for :func:`profile_step`.
    """
    plan = captured.plan
    costs = costs_of(captured, device, flops_per_second) if costs is None else costs
    profiles: dict[NetworkName, NetworkProfile] = {}
    for name, network in captured.networks.items():
        calls = [plan.calls[index] for index in plan.calls_of(name)]
        found = [
            _profile_route(
                chain, [c for c in calls if c.route == route], microbatch_counts, device,
                flops_per_second, costs,
            )
            for route, chain in enumerate(network.routes)
        ]  # fmt: skip
        is_one = network.follows_one_route and len(found) == 1
        whole = found[0] if is_one else _together(network, calls, found)
        profiles[name] = whole.joining(network.joined(ties=True))
    costs.keep()
    return profiles


def _profile_route(  # noqa: PLR0913, PLR0917 - what to measure, and where
    chain: RouteChain,
    calls: Sequence[CallPlan],
    microbatch_counts: Sequence[int],
    device: torch.device,
    rate: float | None,
    costs: Costs,
) -> NetworkProfile:
    largest = max(calls, key=lambda call: sum(math.prod(spec.shape) for spec in call.inputs))
    sizes = sorted({max(1, math.ceil(largest.batch_size / n)) for n in microbatch_counts})
    trainable, number = any(call.grad for call in calls), len(chain.atoms)
    found = _costs(chain, number, largest.inputs, sizes, device, rate, trainable, costs)
    return NetworkProfile(tuple(found))


def _together(
    network: ChainNetwork, calls: Sequence[CallPlan], found: Sequence[NetworkProfile]
) -> NetworkProfile:
    """What a network's atoms cost in a call, on average over calls that take different ways.

    Sizes are those of the largest call; of the others, as many samples are meant as they have then.
    """
    whole = max(call.batch_size for call in calls)
    parts = [
        (call.batch_size / whole, found[call.route], network.routes[call.route].positions)
        for call in calls
    ]
    sizes = {size for share, profile, _ in parts if share == 1 for size in profile.sizes}

    def mean(kind: str, atom: int, size: int) -> float:
        return math.fsum(
            sums[begin[atom + 1]] - sums[begin[atom]]
            for share, profile, begin in parts
            if (sums := profile.sums(kind, max(1, round(size * share))))
        ) / len(parts)

    def record(atom: int) -> AtomProfile:
        own = [p.atoms[begin[atom] : begin[atom + 1]] for _, p, begin in parts]
        whole, last = (
            [each for atoms in own for each in atoms],
            [atoms[-1] for atoms in own if atoms],
        )
        times = {
            kind: {size: mean(kind, atom, size) for size in sizes}
            for kind in ("forward", "backward", "input_backward", "weight_backward")
            if all(getattr(each, kind) for profile in found for each in profile.atoms)
        }
        sums = {
            kind: sum(getattr(each, kind) for each in whole) // len(parts)
            for kind in (
                "activation_bytes_per_sample",
                "result_bytes_per_sample",
                "flops_per_sample",
            )
        }
        values: dict[str, Any] = {**times, **sums}
        return AtomProfile(
            name=network.atoms[atom].name,
            output_bytes_per_sample=max((a.output_bytes_per_sample for a in last), default=0),
            parameter_bytes=sum(tensor.nbytes for tensor in network.atoms[atom].tensors()),
            trainable_bytes=sum(t.nbytes for t in network.atoms[atom].tensors() if t.requires_grad),
            **values,
        )

    return NetworkProfile(tuple(map(record, range(len(network.atoms)))))


def seconds_of_forward(
    chain: RouteChain, num_atoms: int, call: CallPlan, device: torch.device
) -> float:
    """Measure the forward of the first atoms of a route, for a call."""
    size = call.batch_size
    records = _costs(chain, num_atoms, call.inputs, [size], device, None, trainable=False)
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
        chain = captured.networks[call.network].routes[call.route]
        number, nowhere = len(chain.atoms), torch.device("meta")
        records = _costs(chain, number, call.inputs, (), nowhere, 1.0, call.grad)
        size = call.batch_size
        total += sum(record.forward[size] + record.backward.get(size, 0.0) for record in records)
    return (total + plan.flops) / max(call.batch_size for call in plan.calls)


def _costs(  # noqa: PLR0913, PLR0917 - what to measure, and where
    chain: RouteChain,
    num_atoms: int,
    inputs: Sequence[TensorSpec],
    sizes: Sequence[int],
    device: torch.device,
    rate: float | None,
    trainable: bool,
    costs: Costs | None = None,
) -> list[AtomProfile]:
    """Costs of the first atoms of a route: measured on a device, or by operations per second."""
    generator = torch.Generator().manual_seed(0)
    return profile_atoms(
        chain.program,
        tuple(s.random(generator, device) if rate is None else s.empty("meta") for s in inputs),
        sizes,
        trainable=trainable,
        num_atoms=num_atoms,
        flops_per_second=rate,
        max_seconds=_PROFILE_SECONDS,
        costs=costs,
    )


def moments(group: Mapping[str, Any]) -> int:
    """Tensors of the size of a parameter that an optimizer keeps for each of a group."""
    return 2 if "betas" in group else int(bool(group.get("momentum", 1)))
