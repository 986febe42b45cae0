"""A step to be planned: what it costs on which devices, and what the user decided.

Costs are running sums over the atoms, so that any cut is priced in a few additions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, combinations
from typing import Literal

from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.planning.cluster import Cluster, Ranks
from lightning_tspipe.planning.profile import NetworkProfile, Step
from lightning_tspipe.schedules.window_steps import When
from lightning_tspipe.schedules.windows import ACROSS_STEPS, WINDOWS, halves_of

KINDS = ("forward", "backward", "input_backward", "weight_backward")
"""The student's work on a unit."""

_LEAST_TRIED = 8
"""Numbers of micro-batches up to at least this one are tried; deep pipelines need more."""

_MOST_PER_RANK = 6
"""Most micro-batches per rank between two epochs: as many as PipeTransformer tries."""

_MAX_ACTIONS = 12_000
"""Most actions of a step: its schedule must be found in seconds, and run in Python."""

LOSS_ACTIONS = 10
"""A loss is the step once more, in Python: it takes about as long as running so many actions that
compute nothing (1.2 ms, where these take 0.1 ms each, on two cores of an EPYC)."""

_MAX_SUBSETS = 3
"""Most stages of which all subsets are tried as those whose backward is split."""


@dataclass(frozen=True, kw_only=True)
class Workload(Step):
    """A step of one replica, the devices that have to do it, and the user's decisions.

    Attributes:
        num_ranks: Ranks of the pipeline.
        memory_limit: Bytes per rank for everything; a device may have less.
        state_limit: Bytes per rank for parameters, gradients and optimizer state of both networks.
        cluster: Devices and links; None for equal devices and links that cost nothing.
        num_replicas: Replicas of the pipeline: together they have the cluster's devices, and
            gradients are summed over them.
        action_overhead: Seconds that running any one action costs besides its computation.
        weights: The weight policy, for schedule "1f1b".
        window: Batches of which all are in the pipeline between two updates, for the schedules in
            ``windows.WINDOWS``; 0: others, and asynchronous "1f1b", which is never drained.
        teacher_runs: When a teacher does so in windows: ``"ahead"`` of updates as one that does
            not change, ``"late"``, or ``"now"``, right before its student.
        schedule: Name of the schedule.
        num_microbatches: Micro-batches per call; "auto" leaves it to the planner, here and below.
        partition: Number of atoms in each stage of the student.
        split: Whether backwards run in halves; "auto" decides by cost, for "tspipe" only.
        num_stages: Stages of the student; None: one for each rank, or, behind a frozen part, fewer
            if it has not as many atoms.
    """

    num_ranks: int
    memory_limit: float = math.inf
    state_limit: float = math.inf
    cluster: Cluster | None = None
    num_replicas: int = 1
    action_overhead: float = 0.0
    weights: str = "pipeoptim"
    window: int = 0
    teacher_runs: When = "ahead"
    schedule: str = "tspipe"
    num_microbatches: int | Literal["auto"] = "auto"
    partition: Sequence[int] | Literal["auto"] = "auto"
    split: bool | Literal["auto"] = "auto"
    num_stages: int | None = None
    _units: dict[int, dict[str, tuple[float, ...]]] = field(
        default_factory=dict, repr=False, compare=False
    )

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

    @cached_property
    def loss_seconds(self) -> float:
        """Seconds of a loss, of the whole batch."""
        seconds = self.loss_seconds_per_sample * max(self.samples())
        return seconds / self.ranks.speeds[LOSS_RANK] + LOSS_ACTIONS * self.action_overhead

    @property
    def loss_bytes(self) -> int:
        """Bytes that the loss of a whole batch needs while it runs."""
        each = self.loss_working_bytes_per_sample
        return self.loss_working_bytes + each * max(self.samples())

    @property
    def loss_state_bytes(self) -> float:
        """Bytes of the parameters beside the loss, their gradients and optimizer state."""
        rate = 1 + self.optimizer_bytes_per_parameter_byte
        return self.loss_parameter_bytes + rate * self.loss_trainable_bytes

    @cached_property
    def alone(self) -> Workload:
        """The step of the student without a teacher."""
        return replace(self, teacher=None, frozen=False, is_fed=False)

    @property
    def independent_teacher(self) -> NetworkProfile | None:
        """The teacher, if it is cut independently of the student."""
        return None if self.paired else self.teacher

    def unit_samples(self, num_microbatches: int) -> tuple[float, float]:
        """Samples in a unit of the student and of the teacher, on average."""
        own, other = self._unit_sizes(num_microbatches)
        return _mean(own), _mean(other)

    def units(self, num_microbatches: int) -> Mapping[str, tuple[float, ...]]:
        """Running sums over atoms of the seconds that one unit takes, averaged over the calls.

        Returns:
            By kind: ``forward``, ``backward`` (whole), ``input_backward`` and ``weight_backward``
            (its halves) over the student's atoms; ``teacher``, the forward over the teacher's, is
            empty without one.
        """
        sums = self._units.get(num_microbatches)
        if sums is None:
            own, other = self._unit_sizes(num_microbatches)
            sums = {kind: _mean_sums(self.student, kind, own) for kind in KINDS}
            if not self.student.can_split:
                half = tuple(amount / 2 for amount in sums["backward"])
                sums |= {"input_backward": half, "weight_backward": half}
            teacher = self.teacher
            sums["teacher"] = () if teacher is None else _mean_sums(teacher, "forward", other)
            self._units[num_microbatches] = sums
        return sums

    def _unit_sizes(self, num_microbatches: int) -> list[list[int]]:
        """Samples of every unit, where a batch doesn't divide one more in the first ones."""
        return [
            [
                max(1, size // num_microbatches + (place < size % num_microbatches))
                for size in self.samples(teacher=teacher)
                for place in range(num_microbatches)
            ]
            for teacher in (False, True)
        ]

    @cached_property
    def teacher_sums(self) -> tuple[int, ...]:
        """Running sums over the teacher's atoms: bytes of its parameters; () without one."""
        return () if self.teacher is None else self.teacher.parameter_sums

    @cached_property
    def state_sums(self) -> tuple[float, ...]:
        """Running sums over the student's atoms: bytes of parameters, gradients, optimizer state.

        Includes the parameters of a paired teacher.
        """
        rate = 1 + self.optimizer_bytes_per_parameter_byte
        copies = self.teacher_sums if self.paired and self.teacher_sums else (0,)
        sums = zip(self.student.parameter_sums, self.student.gradient_sums, strict=True)
        return tuple(
            own + rate * trained + copies[min(atom, len(copies) - 1)]
            for atom, (own, trained) in enumerate(sums)
        )

    @cached_property
    def activation_sums(self) -> tuple[float, ...]:
        """Running sums of the activations saved for the backward, of all units of a batch."""
        samples = sum(self.samples())
        return tuple(float(samples * amount) for amount in self.student.saved_sums)

    def recompute_bytes(self, start: int, stop: int, num_microbatches: int) -> float:
        """Bytes that the backward of one unit needs to recompute atoms."""
        samples = math.ceil(max(self.samples()) / num_microbatches)
        sums = self.student.recompute_sums
        return float(samples * (sums[stop] - sums[start]))

    @cached_property
    def joined(self) -> frozenset[int]:
        """Atoms of the student that must stay with the next one, as must their paired atoms."""
        if self.teacher is None or not self.paired:
            return self.student.joined
        return self.student.joined | self.teacher.joined

    @cached_property
    def positions(self) -> list[int]:
        """Positions where the student may be cut."""
        return [n for n in range(1, self.student.num_atoms) if n - 1 not in self.joined]

    @property
    def num_pieces(self) -> int:
        """The largest number of stages that the student can be cut into."""
        return self.student.num_atoms - len(self.joined)

    # What the user decided, and what is left to try

    def given_cuts(self) -> tuple[int, ...] | None:
        """First atom of each student stage, and the number of atoms; None to choose.

        Raises:
            ConfigurationError: A rank without a stage, or a stage without an atom.
            PartitionError: The numbers don't add up to the student's atoms; names them.
        """
        if self.partition == "auto":
            return None
        counts, num_atoms = list(self.partition), self.student.num_atoms
        if any(count < 1 for count in counts) or len(counts) < self.num_ranks:
            raise ConfigurationError(
                f"partition={counts}: give at least one atom to each stage, and at least "
                f"{self.num_ranks} stages, one for each device"
            )
        if sum(counts) != num_atoms:
            names = ", ".join(atom.name for atom in self.student.atoms)
            raise PartitionError(
                f"partition={counts} cuts {sum(counts)} atoms, but the student has {num_atoms}: "
                f"{names}"
            )
        return tuple(accumulate(counts, initial=0))

    def microbatch_counts(self) -> tuple[int, ...]:
        """Numbers of micro-batches to try, whose units were measured.

        Deep pipelines and fast teachers, which must fill the bubble, need more.
        """
        if self.num_microbatches != "auto":
            return (self.num_microbatches,)
        if self.schedule in {"sequential", *WINDOWS}:
            return (1,)
        smallest, _ = self.measured_sizes
        samples = min(self.batch_sizes)
        actions = self.num_ranks * (3 * self.num_calls[0] + self.num_calls[1])
        most = max(1, min(samples // smallest, _MAX_ACTIONS // actions))
        if self.frozen:  # all ranks wait for this plan
            most = min(most, max(_LEAST_TRIED, _MOST_PER_RANK * self.num_ranks))
        wanted = min(most, max(_LEAST_TRIED, self._filling()))
        powers = (2**power for power in range(most.bit_length()))
        return tuple(n for n in powers if n < 2 * wanted)

    def splits(self, num_stages: int) -> tuple[frozenset[int], ...]:
        """Sets of stages whose backward is split; never stage 0, for which nobody waits."""
        later = frozenset(range(1, num_stages))
        if self.schedule in ACROSS_STEPS:
            return (halves_of(self.schedule, num_stages),)
        if self.student.recomputed:
            return (frozenset(),)  # each half would run the stage again
        if self.split != "auto":
            return (later if self.split else frozenset(),)
        if self.schedule != "tspipe" or not self.student.can_split:
            return (frozenset(),)
        if len(later) <= _MAX_SUBSETS:
            subsets = (combinations(sorted(later), size) for size in range(num_stages))
            return tuple(map(frozenset, chain.from_iterable(subsets)))
        odd = frozenset(range(1, num_stages, 2))
        return frozenset(), frozenset({num_stages - 1}), odd, later

    def _filling(self) -> int:
        """The number of micro-batches with which the teacher fills the bubble of the first stage.

        ``V u t_T >= (P - 1) (t_S + t_B)``, in seconds of all stages and with whole backwards, which
        need the most (TSPipe, section 3.2); in whole units, and with a teacher forward instead of
        ``t_S`` if that is longer, since a slow teacher reaches the next stage later. Without a
        teacher, four times as many units as ranks leave a bubble of a fifth.
        """
        sums = self.units(1)
        teacher = sums["teacher"][-1] if sums["teacher"] else 0.0
        if not teacher or not self.num_calls[1]:
            return 4 * self.num_ranks // self.num_calls[0]
        units = (max(sums["forward"][-1], teacher) + sums["backward"][-1]) / teacher
        needed = (self.num_ranks - 1) * math.ceil(min(units, _MAX_ACTIONS))
        return math.ceil(needed / self.num_calls[1])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _mean_sums(network: NetworkProfile, kind: str, sizes: Sequence[int]) -> tuple[float, ...]:
    by_size = {size: network.sums(kind, size) for size in set(sizes)}
    rows = [by_size[size] for size in sizes]
    return tuple(map(_mean, zip(*rows, strict=True)))
