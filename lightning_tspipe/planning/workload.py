"""Running sums over the profiles of a step, so that any cut is priced in a few additions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.planning.cluster import Cluster, Ranks
from lightning_tspipe.planning.profile import NetworkProfile
from lightning_tspipe.planning.step import Step


@dataclass(frozen=True, kw_only=True)
class Workload(Step):
    """A step of one replica, and the devices that have to do it.

    Attributes:
        num_ranks: Ranks of the pipeline.
        memory_limit: Bytes per rank for everything; a device may have less.
        state_limit: Bytes per rank for parameters, gradients and optimizer state of both networks.
        cluster: Devices and links; None for equal devices and links that cost nothing.
        num_replicas: Replicas of the pipeline: together they have the cluster's devices, and
            gradients are summed over them.
        loss_seconds: The loss of the whole batch.
        data_seconds: Reading a batch.
        action_overhead: Seconds that running any one action costs besides its computation.
        weights: The weight policy of an asynchronous schedule; else None.
    """

    num_ranks: int
    memory_limit: float = math.inf
    state_limit: float = math.inf
    cluster: Cluster | None = None
    num_replicas: int = 1
    loss_seconds: float = 0.0
    data_seconds: float = 0.0
    action_overhead: float = 0.0
    weights: str | None = None
    _units: dict[int, UnitSums] = field(default_factory=dict, repr=False, compare=False)

    def samples(self, *, teacher: bool = False) -> tuple[int, ...]:
        """Samples in each call of a network."""
        num_calls = self.num_calls[teacher]
        sizes = self.batch_sizes
        return (sizes * num_calls if len(sizes) == 1 else sizes)[:num_calls]

    @cached_property
    def ranks(self) -> Ranks:
        """The devices of the pipeline.

        Raises:
            ConfigurationError: The cluster has a different number of devices.
        """
        num_devices = self.num_ranks * self.num_replicas
        cluster = self.cluster or Cluster(num_devices)
        if cluster.num_devices != num_devices:
            raise ConfigurationError(
                f"{self.num_replicas} replicas of {self.num_ranks} ranks need {num_devices} "
                f"devices, and the cluster has {cluster.num_devices}"
            )
        return cluster.ranks(self.num_replicas)

    @cached_property
    def memory_limits(self) -> tuple[float, ...]:
        """Bytes that each rank may hold."""
        return tuple(min(self.memory_limit, memory) for memory in self.ranks.memories)

    @property
    def measured_sizes(self) -> tuple[int, int]:
        """The smallest and the largest unit that were measured for both networks."""
        networks = [n for n in (self.student, self.teacher) if n is not None and n.sizes]
        if not networks:
            return (1, 1)
        return max(n.sizes[0] for n in networks), min(n.sizes[-1] for n in networks)

    @property
    def independent_teacher(self) -> NetworkProfile | None:
        """The teacher, if it is cut independently of the student."""
        return None if self.paired else self.teacher

    def units(self, num_microbatches: int) -> UnitSums:
        """Running sums of the seconds of one unit."""
        if num_microbatches not in self._units:
            self._units[num_microbatches] = UnitSums.of(self, num_microbatches)
        return self._units[num_microbatches]

    @cached_property
    def parameter_sums(self) -> tuple[int, ...]:
        """Running sums over the student's atoms: bytes of its parameters and buffers."""
        return self.student.byte_sums("parameter_bytes")

    @cached_property
    def state_sums(self) -> tuple[float, ...]:
        """Running sums over the student's atoms: bytes of parameters, gradients, optimizer state.

        Includes the parameters of a paired teacher.
        """
        held, trained = self.parameter_sums, self.gradient_sums
        sums = [
            everything + (1 + self.optimizer_bytes_per_parameter_byte) * part
            for everything, part in zip(held, trained, strict=True)
        ]
        if self.paired and self.teacher is not None:
            copies = self.teacher.byte_sums("parameter_bytes")
            sums = [own + copies[min(atom, len(copies) - 1)] for atom, own in enumerate(sums)]
        return tuple(sums)

    @cached_property
    def teacher_state_sums(self) -> tuple[float, ...]:
        """Running sums over an independent teacher's atoms: bytes of its parameters."""
        teacher = self.independent_teacher
        return () if teacher is None else tuple(map(float, teacher.byte_sums("parameter_bytes")))

    @cached_property
    def activation_sums(self) -> tuple[float, ...]:
        """Running sums of the activations saved for the backward, of all units of a batch."""
        samples = sum(self.samples())
        return tuple(float(samples * amount) for amount in self.student.saved_sums())

    @cached_property
    def recompute_sums(self) -> tuple[int, ...]:
        """Running sums of the bytes needed to recompute atoms, per sample of one unit."""
        return self.student.recompute_sums()

    def recompute_bytes(self, start: int, stop: int, num_microbatches: int) -> float:
        """Bytes that the backward of one unit needs to recompute atoms."""
        samples = math.ceil(max(self.samples()) / num_microbatches)
        return float(samples * (self.recompute_sums[stop] - self.recompute_sums[start]))

    @cached_property
    def gradient_sums(self) -> tuple[float, ...]:
        """Running sums over the student's atoms: bytes of the gradients."""
        return tuple(map(float, self.student.byte_sums("trainable_bytes")))

    @cached_property
    def update_sums(self) -> tuple[float, ...]:
        """Running sums over the student's atoms: seconds of the optimizer step."""
        rate = self.update_seconds_per_byte
        return tuple(rate * amount for amount in self.student.byte_sums("trainable_bytes"))

    @cached_property
    def effect_sums(self) -> tuple[float, ...]:
        """Running sums over the student's atoms: seconds of a paired teacher's update."""
        if not self.paired or self.teacher is None:
            return (0.0,) * (self.student.num_atoms + 1)
        sums = self.teacher.byte_sums("parameter_bytes")
        rate = self.update_seconds_per_byte
        last = len(sums) - 1
        return tuple(rate * sums[min(atom, last)] for atom in range(self.student.num_atoms + 1))


@dataclass(frozen=True)
class UnitSums:
    """Running sums over atoms of the seconds that one unit takes.

    Attributes:
        forward: Over the student's atoms.
        backward: Whole backward.
        input_backward: First half.
        weight_backward: Second half.
        teacher: Forward, over the teacher's atoms; empty without a teacher.
        samples: Samples in a unit of the student and of the teacher, on average.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    input_backward: tuple[float, ...]
    weight_backward: tuple[float, ...]
    teacher: tuple[float, ...]
    samples: tuple[float, float]

    @classmethod
    def of(cls, workload: Workload, num_microbatches: int) -> UnitSums:
        """Price units of ``num_microbatches`` micro-batches per call, averaged over the calls."""
        student, teacher = workload.student, workload.teacher
        own = _unit_sizes(workload.samples(), num_microbatches)
        other = _unit_sizes(workload.samples(teacher=True), num_microbatches)
        backward = _mean_sums(student, "backward", own)
        half = tuple(amount / 2 for amount in backward)
        split = student.can_split
        return cls(
            forward=_mean_sums(student, "forward", own),
            backward=backward,
            input_backward=_mean_sums(student, "input_backward", own) if split else half,
            weight_backward=_mean_sums(student, "weight_backward", own) if split else half,
            teacher=() if teacher is None else _mean_sums(teacher, "forward", other),
            samples=(_mean(own), _mean(other)),
        )


def _unit_sizes(calls: Sequence[int], num_microbatches: int) -> list[int]:
    """Samples of every unit; where a batch doesn't divide, the first ones get one more."""
    return [
        max(1, size // num_microbatches + (place < size % num_microbatches))
        for size in calls
        for place in range(num_microbatches)
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _mean_sums(network: NetworkProfile, kind: str, sizes: Sequence[int]) -> tuple[float, ...]:
    by_size = {size: network.sums(kind, size) for size in set(sizes)}
    rows = [by_size[size] for size in sizes]
    return tuple(map(_mean, zip(*rows, strict=True)))
