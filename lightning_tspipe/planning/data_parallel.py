"""Plain data parallelism, to compare pipelines with: DDP and FSDP2.

Every device runs the whole step on its part of the batch. What a device holds of N::

                        parameters  gradients  optimizer  teacher  beside
    ddp                 all         all        all        all      all gradients again, in buckets
    fsdp2               1/N         1/N        1/N        1/N      two blocks, gradients of one

Where samples of an update (those of a batch, or of a window of batches) are too many for a device's
memory at once, they go through it in several passes, whose gradients are accumulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Literal

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.planning.cluster import Cluster, divisors
from lightning_tspipe.planning.overlap import (
    Block,
    Collectives,
    Ready,
    gathered_by_block,
    reduced_in_buckets,
)
from lightning_tspipe.planning.profile import AtomProfile, NetworkProfile
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.planning.ties import held_twice
from lightning_tspipe.planning.workload import Workload

Method = Literal["ddp", "fsdp2"]
METHODS: tuple[Method, ...] = ("ddp", "fsdp2")

_EQUAL = 1.01
"""As fast is what takes no longer than this; then the plainest counts."""

_STATE = ("parameters", "gradients", "optimizer", "teacher")


@dataclass(frozen=True)
class DataParallelPlan:
    """What data parallelism takes, in time and in memory.

    Attributes:
        method: ``"ddp"`` or ``"fsdp2"``.
        num_devices: Devices, each with an equal part of the samples.
        step_seconds: Seconds per batch of all devices together; of a window its share.
        samples_per_second: Samples of all devices together.
        computing_seconds: Seconds per batch of these that a device computes.
        samples: Samples of a device's largest call in one pass.
        num_passes: Passes of an update, whose gradients are accumulated.
        memory: Bytes of a device, by what they are needed for.
        memory_limit: Bytes that it may hold.
        excess: Bytes above the limits; 0 if it fits.
        has_views: Whether gradients are views of DDP's buckets, which then take no memory.
        recomputed: Whether activations are computed again in the backward.
        is_extrapolated: Whether such small calls were not measured.
    """

    method: Method
    num_devices: int
    step_seconds: float
    samples_per_second: float
    computing_seconds: float
    samples: int
    num_passes: int
    memory: Mapping[str, int]
    memory_limit: float
    excess: float
    has_views: bool = False
    recomputed: bool = False
    is_extrapolated: bool = False

    @property
    def memory_bytes(self) -> int:
        """Bytes of a device."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether each device can hold it."""
        return not self.excess


def plan_data_parallel(  # noqa: PLR0913 - what is divided, over what, within which limits
    profile: StepProfile,
    cluster: Cluster,
    method: Method,
    *,
    window: int = 1,
    collectives: Collectives | None = None,
    memory_limit: int | None = None,
    state_limit: int | None = None,
    may_recompute: bool = False,
) -> DataParallelPlan:
    """The fastest way that fits to train a step by data parallelism; else that with least memory.

    Args:
        profile: The step; its batch is that of all devices together.
        cluster: The devices. The slowest one and the one with the least memory count.
        method: DDP or FSDP2.
        window: Batches of an update.
        collectives: Speed of communication; None: as ``cluster`` says of its links.
        memory_limit: Bytes per device, for everything.
        state_limit: Bytes per device, for parameters, gradients, optimizer state and teacher.
        may_recompute: Whether activations may be computed again where they don't fit.

    Raises:
        ConfigurationError: The samples of an update cannot be divided evenly among the devices.
    """
    number = cluster.num_devices
    links = collectives or Collectives.over(cluster.ranks(number).ring_links[0], number)
    ways = [profile]
    if may_recompute and not profile.student.recomputed:
        ways.append(profile.recomputing(range(profile.student.num_atoms)))
    found = []
    for way in ways:
        for passes, sizes in _divisions(profile, number, window):
            workload = replace(way, batch_sizes=sizes).problem(
                1, num_replicas=number, cluster=cluster,
                memory_limit=memory_limit, state_limit=state_limit,
            )  # fmt: skip
            share = _Share(workload, method, passes, window, links)
            views = (False, True) if method == "ddp" else (False,)
            found += [share.plan(has_views=has_views) for has_views in views]
    fitting = [plan for plan in found if plan.fits]
    if fitting:
        fastest = min(plan.step_seconds for plan in fitting)
        return next(plan for plan in fitting if plan.step_seconds <= fastest * _EQUAL)
    return min(found, key=lambda plan: plan.excess)


def _divisions(
    profile: StepProfile, number: int, window: int
) -> Sequence[tuple[int, tuple[int, ...]]]:
    """Numbers of passes of an update, and samples of each call then, on all devices together.

    Passes are no larger than a batch; nor smaller than what was measured, if they needn't be.

    Raises:
        ConfigurationError: There is none.
    """
    own = [size * window for size in profile.batch_sizes]
    counts = divisors(math.gcd(*own))
    passes = [count for count in counts if count % number == 0 and count >= window]
    if not passes:
        raise ConfigurationError(
            f"the samples of an update, {max(own)}, cannot be divided evenly among {number} "
            "devices: take a larger batch, or a window of several"
        )
    smallest, _ = profile.problem(1).measured_sizes
    measured = [n for n in passes if min(own) // n >= smallest]
    return [
        (count // number, tuple(size // count * number for size in own))
        for count in measured or passes[:1]
    ]


@dataclass(frozen=True)
class _Share:
    """A device's part of an update.

    Attributes:
        workload: One pass of it.
        method: DDP or FSDP2.
        num_passes: Number of passes.
        window: Batches of the update.
        links: Speed of communication.
    """

    workload: Workload
    method: Method
    num_passes: int
    window: int
    links: Collectives

    def plan(self, *, has_views: bool) -> DataParallelPlan:
        """What it takes."""
        work, number = self.workload, self.links.num_devices
        is_sharded = self.method == "fsdp2"
        memory = _sharded(work, number) if is_sharded else _whole(work)
        if has_views:
            del memory["buckets"]
        alone = self._computing + self._update_seconds / (number if is_sharded else 1)
        seconds = (self._sharded_seconds if is_sharded else self._ddp_seconds) / self.window
        samples = max(work.batch_sizes)
        limit = work.memory_limits[0]
        state = sum(memory[name] for name in _STATE)
        excess = max(0.0, sum(memory.values()) - limit, state - work.state_limit)
        total = samples * number * self.num_passes / self.window
        return DataParallelPlan(
            method=self.method,
            num_devices=number,
            step_seconds=seconds,
            samples_per_second=total / seconds if seconds else 0.0,
            computing_seconds=alone / self.window,
            samples=samples,
            num_passes=self.num_passes,
            memory=memory,
            memory_limit=limit,
            excess=excess,
            has_views=has_views,
            recomputed=bool(work.student.recomputed),
            is_extrapolated=min(work.batch_sizes) < work.measured_sizes[0],
        )

    @property
    def _speed(self) -> float:
        return self.workload.ranks.speeds[0]

    def _sums(self, kind: str) -> list[float]:
        """Running sums over atoms: seconds of one call on a device."""
        return [seconds / self._speed for seconds in self.workload.units(1)[kind]]

    @property
    def _computing(self) -> float:
        """Seconds of all passes."""
        work = self.workload
        own, other = work.num_calls
        seconds = own * (self._sums("forward")[-1] + self._sums("backward")[-1])
        seconds += other * sum(self._sums("teacher")[-1:])
        return self.num_passes * (seconds + work.loss_seconds)

    @property
    def _update_seconds(self) -> float:
        """Seconds of an optimizer step of everything, and of a teacher that follows it."""
        work = self.workload
        held = work.student.gradient_sums[-1] + work.loss_trainable_bytes
        held += sum(work.teacher_sums[-1:]) * work.paired
        return work.update_seconds_per_byte * held / self._speed

    @property
    def _ddp_seconds(self) -> float:
        """Seconds of an update: gradients are summed in the backward of the last pass."""
        work, one = self.workload, self._computing / self.num_passes
        done, sizes = self._sums("backward"), work.student.gradient_sums
        # Calls run backwards one after another; gradients are complete in the last one.
        gradients = [Ready(one - work.num_calls[0] * done[-1], work.loss_trainable_bytes)]
        gradients += [
            Ready(one - done[atom], sizes[atom + 1] - sizes[atom])
            for atom in reversed(range(work.student.num_atoms))
        ]
        last = reduced_in_buckets(one, gradients, self.links)
        return (self.num_passes - 1) * one + last + self._update_seconds

    @property
    def _sharded_seconds(self) -> float:
        """Seconds of an update: each pass gathers parameters and divides gradients."""
        one = gathered_by_block(self._blocks(), self.links)
        return self.num_passes * one + self._update_seconds / self.links.num_devices

    def _blocks(self) -> Iterator[Block]:
        """A pass, block by block: forwards of the teacher and the student, the loss, backwards."""
        work = self.workload
        own, other = work.num_calls
        if work.teacher is not None:
            yield from list(_forwards(work.teacher, self._sums("teacher"))) * other
        forwards = list(_forwards(work.student, self._sums("forward")))
        yield from forwards * own
        yield Block(work.loss_seconds, work.loss_parameter_bytes, work.loss_trainable_bytes)
        done, sizes = self._sums("backward"), work.student.gradient_sums
        backwards = [
            Block(done[stop] - done[start], forward.gathered, sizes[stop] - sizes[start])
            for forward, (start, stop) in zip(forwards, blocks_of(work.student), strict=True)
        ]
        yield from backwards[::-1] * own


def _forwards(network: NetworkProfile, sums: Sequence[float]) -> Iterator[Block]:
    held = network.parameter_sums
    for start, stop in blocks_of(network):
        yield Block(sums[stop] - sums[start], held[stop] - held[start])


def blocks_of(network: NetworkProfile) -> list[tuple[int, int]]:
    """First atom and end of each block that FSDP2 is told to divide: a layer of a network.

    Names say which atoms are one layer, up to their first number: ``layers.0.mlp`` and
    ``layers.0.norm`` are. What has no number is a block by itself.
    """
    names: list[str] = []
    for atom in network.atoms:
        name, is_numbered = _layer(atom)
        is_free = not atom.parameter_bytes and not is_numbered
        names.append(names[-1] if is_free and names else name)
    counts = [len(list(group)) for _, group in groupby(names)]
    ends = [sum(counts[:place]) for place in range(len(counts) + 1)]
    return list(pairwise(ends))


def _layer(atom: AtomProfile) -> tuple[str, bool]:
    """The name of an atom's layer, and whether it has a number (``3``, ``encoder_layer_3``)."""
    parts = atom.name.partition("..")[0].split(".")
    numbers = [n for n, part in enumerate(parts) if part.rpartition("_")[2].isdecimal()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts), bool(numbers)


# Memory


def _whole(work: Workload) -> dict[str, int]:
    """Bytes of a device that holds everything."""
    student, teacher = work.student, work.teacher
    own = ((0, student.num_atoms, 0),)
    others = () if teacher is None else ((0, teacher.num_atoms, 0),)
    parameters, gradients = held_twice(work.tied, 0, own, others, has_loss=True)
    trained = student.gradient_sums[-1] + work.loss_trainable_bytes - gradients
    return {
        "parameters": student.parameter_sums[-1] + work.loss_parameter_bytes - parameters,
        "gradients": trained,
        "optimizer": round(work.optimizer_bytes_per_parameter_byte * trained),
        "teacher": sum(work.teacher_sums[-1:]),
        "buckets": trained,
        "activations": _activation_bytes(work),
    }


def _sharded(work: Workload, number: int) -> dict[str, int]:
    """Bytes of a device that holds a part of everything, and whole what it needs just then."""
    whole = _whole(work)
    found = {name: math.ceil(whole[name] / number) for name in _STATE}
    networks = [work.student] if work.teacher is None else [work.student, work.teacher]
    gathered = largest = 0
    for network in networks:
        held, trained = network.parameter_sums, network.gradient_sums
        blocks = blocks_of(network)
        sizes = [held[stop] - held[start] for start, stop in blocks]
        sizes.append(work.loss_parameter_bytes * (network is work.student))
        gathered = max(gathered, *map(sum, pairwise(sizes)))
        largest = max(largest, *(trained[stop] - trained[start] for start, stop in blocks))
    found["gathered"] = gathered + max(largest, work.loss_trainable_bytes)
    found["activations"] = _activation_bytes(work)
    return found


def _activation_bytes(work: Workload) -> int:
    """Bytes that forwards save for the backward, and what the loss or a recomputed block needs."""
    student, samples = work.student, work.samples()
    kept = sum(a.activation_bytes_per_sample for a in student.atoms if not a.recomputed)
    again = 0
    for start, stop in blocks_of(student):
        recomputed = [atom for atom in student.atoms[start:stop] if atom.recomputed]
        needed = sum(atom.activation_bytes_per_sample for atom in recomputed)
        again = max(again, needed * max(samples))
        if recomputed and start:
            kept += student.atoms[start - 1].output_bytes_per_sample
    return kept * sum(samples) + max(again, work.loss_bytes) + work.loss_trainable_bytes
