"""A layout: one way to cut the networks and place the stages, with its costs and its memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain, pairwise
from operator import add, sub

from lightning_tspipe.ir.pipeline import LOSS_RANK, Coupling, NetworkLayout, Pipeline
from lightning_tspipe.planning.bounds import cycle_seconds
from lightning_tspipe.planning.cluster import FREE
from lightning_tspipe.planning.placement import Cuts, default_ranks
from lightning_tspipe.planning.profile import NetworkProfile
from lightning_tspipe.planning.ties import Parts, held_twice
from lightning_tspipe.planning.workload import KINDS, Workload
from lightning_tspipe.schedules.registry import ASYNCHRONOUS
from lightning_tspipe.schedules.windows import WINDOWS, most_in_flight
from lightning_tspipe.simulation.cost import CostTable, StageCost

_MOST_PIECES = 4
"""Most stages of a teacher on one rank: each is an action for each batch."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes by rank.

    Attributes:
        parameters: The student's parameters and buffers, and those that lie with the loss.
        gradients: Gradients of the trained parameters.
        optimizer: Optimizer state: momentum, moments.
        teacher: The teacher's parameters and buffers.
        activations: Activations that the student saves from forward to backward, and inputs that
            its stages received, of all units and of all batches in flight.
        versions: Copies of the trained weights beside the current ones; () if there are none.
        messages: Receive buffers other than those of the student's activations; () in a plan of an
            older version.
    """

    parameters: tuple[int, ...]
    gradients: tuple[int, ...]
    optimizer: tuple[int, ...]
    teacher: tuple[int, ...]
    activations: tuple[int, ...]
    versions: tuple[int, ...] = ()
    messages: tuple[int, ...] = ()

    def of_rank(self, rank: int) -> Iterator[tuple[str, int]]:
        """Names and bytes of each part, for one rank."""
        for part in fields(self):
            amounts = getattr(self, part.name)
            if amounts:
                yield part.name, amounts[rank]


@dataclass(frozen=True)
class Layout:
    """Cuts with a number of micro-batches and the stages whose backward is split; has costs.

    Attributes:
        workload: The step that is cut.
        student_cuts: First atom of each stage, and the number of atoms. Stage s is on rank
            ``(P - 1 - s) % P``: the first one on the last rank, where the data is, and with more
            stages than ranks *folded* (for P = 2 and S = 3: stages 0 and 2 on rank 1, stage 1 on
            rank 0).
        num_microbatches: Micro-batches per call.
        split: Student stages whose backward runs in two halves.
        teacher_bounds: As ``student_cuts``, of an independent teacher, whose parts on ranks P - 1,
            ..., 0 may be empty; () for a paired teacher, and without a teacher.
    """

    workload: Workload
    student_cuts: Cuts
    num_microbatches: int
    split: frozenset[int] = frozenset()
    teacher_bounds: Cuts = ()

    @property
    def num_stages(self) -> int:
        """Number of student stages."""
        return len(self.student_cuts) - 1

    @cached_property
    def student_parts(self) -> Parts:
        """First atom, end and rank of each student stage."""
        workload = self.workload
        ranks = default_ranks(self.num_stages, workload.num_ranks, workload.schedule)
        return _parts(self.student_cuts, ranks)

    @cached_property
    def teacher_parts(self) -> Parts:
        """First atom, end and rank of each teacher stage."""
        teacher, num_ranks = self.workload.teacher, self.workload.num_ranks
        if teacher is None:
            return ()
        parts = self.student_parts
        if not self.workload.paired:
            ranks = default_ranks(num_ranks, num_ranks, self.workload.schedule)
            parts = _parts(self.teacher_bounds, ranks)
        ends = ((start, min(stop, teacher.num_atoms), rank) for start, stop, rank in parts)
        held = (part for part in ends if part[0] < part[1])
        return tuple(chain.from_iterable(map(self._pieces, held)))

    def _pieces(self, part: tuple[int, int, int]) -> Iterator[tuple[int, int, int]]:
        """The stages of a rank's part of the teacher, which follow each other.

        In windows a forward of the teacher fills the time until one of the student comes, which
        then waits for it to end. So one that takes several times as long is several stages.
        """
        workload, (start, stop, rank) = self.workload, part
        sums = workload.units(self.num_microbatches)
        times, own = sums["teacher"], sums["forward"][-1] / self.num_stages
        number = 1
        fills = workload.window and not workload.paired and self.num_stages == workload.num_ranks
        if fills and workload.num_ranks > 1 and own:
            each = times[-1] / workload.num_ranks
            number = max(1, min(_MOST_PIECES, round(each / own)))
        teacher = workload.teacher
        assert teacher is not None
        step = (times[stop] - times[start]) / number
        places = [n for n in range(start + 1, stop) if n - 1 not in teacher.joined]
        found = {
            min(places, key=lambda n: abs(times[n] - times[start] - piece * step))
            for piece in range(1, number if places else 1)
        }
        for begin, end in pairwise([start, *sorted(found), stop]):
            yield begin, end, rank

    @property
    def teacher_cuts(self) -> Cuts:
        """First atom of each teacher stage, and the number of atoms; () without a teacher."""
        parts = self.teacher_parts
        return (*(start for start, _, _ in parts), parts[-1][1]) if parts else ()

    @cached_property
    def pipeline(self) -> Pipeline:
        """The pipeline that schedules are made for."""
        workload = self.workload
        own, other = workload.num_calls
        student = self._network(workload.student, self.student_parts, own)
        teacher = None
        if workload.teacher is not None:
            teacher = self._network(workload.teacher, self.teacher_parts, other)
        coupling = Coupling.PREFIX if workload.frozen else Coupling.CHAIN
        (reader,) = default_ranks(1, workload.num_ranks, workload.schedule)
        return Pipeline(
            workload.num_ranks, student, teacher, reader, coupling=coupling, is_fed=workload.is_fed
        )

    def _network(self, network: NetworkProfile, parts: Parts, num_calls: int) -> NetworkLayout:
        outputs = {
            stage
            for stage, (start, stop, _) in enumerate(parts)
            if any(atom.result_bytes_per_sample for atom in network.atoms[start:stop])
        }
        if network is self.workload.student or not self.workload.frozen:
            outputs.add(len(parts) - 1)
        ranks = tuple(rank for _, _, rank in parts)
        return NetworkLayout(ranks, num_calls, self.num_microbatches, frozenset(outputs))

    @cached_property
    def costs(self) -> CostTable:
        """Costs for the simulator."""
        workload, ranks = self.workload, self.workload.ranks
        own, other = workload.unit_samples(self.num_microbatches)
        kinds, forward = {kind: kind for kind in KINDS}, {"forward": "teacher"}
        student = self._stage_costs(workload.student, self.student_parts, own, kinds)
        teacher = self._stage_costs(workload.teacher, self.teacher_parts, other, forward)
        between = ranks.inter_node_link if ranks.nodes else FREE
        gradients = self._per_rank(workload.student.gradient_sums, self.student_parts)
        sums = [ranks.reduction_seconds(rank, size) for rank, size in enumerate(gradients)]
        followed = self._teacher_bytes if workload.paired else [0.0] * workload.num_ranks
        return CostTable(
            student=tuple(student),
            teacher=tuple(teacher),
            loss=workload.loss_seconds,
            optimizer=self._update_seconds(gradients),
            effects=self._update_seconds(followed),
            latency=ranks.link.latency,
            bandwidth=ranks.link.bandwidth,
            input_bytes=round(workload.input_bytes_per_sample * own),
            nodes=ranks.nodes,
            inter_node_latency=between.latency,
            inter_node_bandwidth=between.bandwidth,
            reduction=tuple(sums) if ranks.num_replicas > 1 else (),
        )

    def _stage_costs(
        self,
        network: NetworkProfile | None,
        parts: Parts,
        samples: float,
        kinds: Mapping[str, str],
    ) -> Iterator[StageCost]:
        """Costs of the stages of a network.

        Args:
            network: The network; None: it has no stages.
            parts: Atoms and rank of each stage.
            samples: Samples in a unit.
            kinds: The kind of work, as in ``Workload.units``, of each field with seconds.
        """
        workload, units = self.workload, self.workload.units(self.num_microbatches)
        is_prefix = workload.frozen and network is not workload.student
        for start, stop, rank in parts:
            assert network is not None
            atoms, speed = network.atoms[start:stop], workload.ranks.speeds[rank]
            last = atoms[-1].output_bytes_per_sample
            # The last stage sends nothing to another one, but to the loss: all if taps are unknown.
            is_end = stop == network.num_atoms and not is_prefix
            results = sum(atom.result_bytes_per_sample for atom in atoms) or last * is_end
            seconds = {
                field: (units[kind][stop] - units[kind][start]) / speed + workload.action_overhead
                for field, kind in kinds.items()
            }
            yield StageCost(
                **seconds,
                output_bytes=0 if is_end else round(last * samples),
                result_bytes=0 if is_prefix else round(results * samples),
            )

    def _update_seconds(self, num_bytes: Sequence[float]) -> tuple[float, ...]:
        """Seconds of each rank to update so many bytes."""
        rate, speeds = self.workload.update_seconds_per_byte, self.workload.ranks.speeds
        return tuple(rate * size / speed for size, speed in zip(num_bytes, speeds, strict=True))

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank works in a step; the largest is a lower bound for any schedule.

        As :func:`busy_seconds` finds by the costs, which take longer: a search asks for this of
        many times more layouts than for anything else.
        """
        workload, units = self.workload, self.workload.units(self.num_microbatches)
        speeds, overhead = workload.ranks.speeds, workload.action_overhead
        own, other = (calls * self.num_microbatches for calls in workload.num_calls)
        whole, halves = ("backward",), ("input_backward", "weight_backward")
        work = [
            (own, part, ("forward", *(halves if stage in self.split else whole)))
            for stage, part in enumerate(self.student_parts)
        ]
        work += [(other, part, ("teacher",)) for part in self.teacher_parts]
        gradients = self._per_rank(workload.student.gradient_sums, self.student_parts)
        seconds = list(self._update_seconds(gradients))
        if workload.paired:
            seconds = list(map(add, seconds, self._update_seconds(self._teacher_bytes)))
        seconds = [update / max(1, workload.window) for update in seconds]
        seconds[LOSS_RANK] += workload.loss_seconds
        for times, (start, stop, rank), kinds in work:
            each = sum(units[kind][stop] - units[kind][start] for kind in kinds) / speeds[rank]
            seconds[rank] += times * (each + len(kinds) * overhead)
        return tuple(seconds)

    @property
    def busiest(self) -> float:
        """Seconds that the busiest rank works: no schedule is faster."""
        return max(self.busy)

    @property
    def excess_and_bound(self) -> tuple[float, float, float]:
        """Bytes above the limits, seconds of the busiest rank, imbalance: to be minimised."""
        return self.excess, self.busiest, sum(time * time for time in self.busy)

    @cached_property
    def bound(self) -> float:
        """A lower bound of the seconds per step of this schedule, without a simulation."""
        name = self.workload.schedule
        if name in WINDOWS:
            return max(self.busy)  # batches follow each other
        if name == "sequential":
            return sum(self.busy)  # about: one rank works at a time, except in optimizer steps
        # In GPipe's order every rank runs the teacher first, so that it fills no bubble.
        first = name == "gpipe"
        cycles = cycle_seconds(self.pipeline, self.costs, self.split, teacher_first=first)
        return max(*self.busy, *cycles)

    @cached_property
    def memory(self) -> MemoryUse:
        """Bytes of each rank, by what they are needed for."""
        workload, ranks = self.workload, range(self.workload.num_ranks)
        student, parts = workload.student, self.student_parts
        parameters, gradients, kept = (
            self._per_rank(sums, parts)
            for sums in (student.parameter_sums, student.gradient_sums, workload.activation_sums)
        )
        samples = sum(workload.samples())
        again = [0.0] * workload.num_ranks
        for start, stop, rank in parts:
            one = workload.recompute_bytes(start, stop, self.num_microbatches)
            again[rank] = max(again[rank], one)
            if start:  # what a stage received stays until its backward
                kept[rank] += student.atoms[start - 1].output_bytes_per_sample * samples
        parameters[LOSS_RANK] += workload.loss_parameter_bytes
        gradients[LOSS_RANK] += workload.loss_trainable_bytes
        # The loss ends before a stage runs again; a gradient stays until it is added.
        again[LOSS_RANK] = max(again[LOSS_RANK], workload.loss_bytes)
        again[LOSS_RANK] += workload.loss_trainable_bytes
        for rank in ranks:
            has_loss = rank == LOSS_RANK
            twice = held_twice(workload.tied, rank, parts, self.teacher_parts, has_loss=has_loss)
            parameters[rank] -= twice[0]
            gradients[rank] -= twice[1]
        policy, versions = workload.weights, []
        if workload.window:
            name, number = workload.schedule, workload.window
            most = most_in_flight(name, self.pipeline, number, self.split)
            kept = [amount * batches for amount, batches in zip(kept, most, strict=True)]
        elif workload.schedule == ASYNCHRONOUS:
            kept = [kept[rank] * num_batches(rank, len(ranks)) for rank in ranks]
            versions = [gradients[rank] * num_copies(policy, rank, len(ranks)) for rank in ranks]
        states = workload.optimizer_bytes_per_parameter_byte
        return MemoryUse(
            parameters=_whole(parameters),
            gradients=_whole(gradients),
            optimizer=_whole(states * amount for amount in gradients),
            teacher=_whole(self._teacher_bytes),
            activations=_whole(map(add, kept, again)),
            versions=_whole(versions),
            messages=self._message_bytes(),
        )

    @cached_property
    def state_bytes(self) -> tuple[int, ...]:
        """Bytes of parameters, gradients and optimizer state of both networks, per rank."""
        use = self.memory
        parts = (use.parameters, use.gradients, use.optimizer, use.teacher, use.versions)
        return tuple(map(sum, zip(*filter(None, parts), strict=True)))

    @cached_property
    def memory_bytes(self) -> tuple[int, ...]:
        """Bytes of state, saved activations and receive buffers, per rank."""
        use = self.memory
        return tuple(map(sum, zip(self.state_bytes, use.activations, use.messages, strict=True)))

    def _message_bytes(self) -> tuple[int, ...]:
        """Bytes of receive buffers per rank; the student's activations are counted elsewhere.

        Receives are posted when the step begins, each with a buffer of its own: for gradients, for
        the activations of teacher stages, and on rank 0 for the inputs of the loss.
        """
        calls = self.workload.num_calls
        room = [0] * self.workload.num_ranks
        for parts, costs, num_calls, gives_gradients in (
            (self.student_parts, self.costs.student, calls[0], True),
            (self.teacher_parts, self.costs.teacher, calls[1], False),
        ):
            units = num_calls * self.num_microbatches
            behind = [*(rank for _, _, rank in parts[1:]), 0]
            for (_, _, rank), following, cost in zip(parts, behind, costs, strict=False):
                if rank != following:
                    room[rank if gives_gradients else following] += units * cost.output_bytes
                if rank != 0:
                    room[0] += units * cost.result_bytes
                    room[rank] += units * cost.result_bytes * gives_gradients
        return tuple(room)

    @property
    def excess(self) -> float:
        """Bytes above the limits, of all ranks together; 0 if the layout fits."""
        workload, limits = self.workload, self.workload.memory_limits
        if math.isinf(workload.state_limit) and all(map(math.isinf, limits)):
            return 0.0
        over = [held - workload.state_limit for held in self.state_bytes]
        over += map(sub, self.memory_bytes, limits)
        return sum(amount for amount in over if amount > 0)

    def _per_rank(self, sums: Sequence[float], parts: Parts) -> list[float]:
        """What the atoms of each rank have together, from running sums over a network's atoms."""
        amounts = [0.0] * self.workload.num_ranks
        for start, stop, rank in parts:
            amounts[rank] += sums[stop] - sums[start]
        return amounts

    @property
    def _teacher_bytes(self) -> list[float]:
        """Bytes of the teacher's parameters, per rank."""
        return self._per_rank(self.workload.teacher_sums, self.teacher_parts)


def _parts(cuts: Cuts, ranks: tuple[int, ...]) -> Parts:
    return tuple((*ends, rank) for ends, rank in zip(pairwise(cuts), ranks, strict=True))


def _whole(amounts: Iterable[float]) -> tuple[int, ...]:
    return tuple(map(round, amounts))


def num_batches(rank: int, num_ranks: int) -> int:
    """The most batches that a rank has between forward and backward, asynchronously.

    A rank that is w ranks before the loss has w + 1 of them, and as many versions of its weights
    as its weight policy reads. For three ranks (rank 0 has the loss)::

        copies beside the current weights  rank 0  rank 1  rank 2
        pipedream                               0       1       2  one for each batch ahead
        2bw                                     1       1       1  the version before
        pipeoptim                               0       1       1  a prediction, in a forward
        spectrain                               1       1       1  the last stage predicts too
        synchronous                             0       0       0  one version for a window
    """
    return rank + 1 if num_ranks > 1 else 1


def num_copies(policy: str, rank: int, num_ranks: int) -> int:
    """The most copies of a rank's trained weights, beside the current ones.

    Args:
        policy: Name of the weight policy.
        rank: The rank, which is also the number of ranks between it and the loss.
        num_ranks: Ranks of the pipeline.
    """
    if num_ranks == 1 or policy == "synchronous":
        return 0
    if policy == "pipedream":
        return rank
    if policy == "2bw":
        return 1
    predicts_backward = policy == "spectrain" and (num_ranks - 1 - rank) // 2 > 0
    return int(rank > 0 or predicts_backward)
