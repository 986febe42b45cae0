"""A layout: one way to cut the networks and place the stages, with its costs."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from lightning_tspipe.ir.pipeline import Coupling, NetworkLayout, Pipeline
from lightning_tspipe.planning.in_flight import num_batches, num_copies
from lightning_tspipe.planning.memory import MemoryUse
from lightning_tspipe.planning.placement import default_ranks
from lightning_tspipe.planning.profile import NetworkProfile
from lightning_tspipe.planning.workload import Workload
from lightning_tspipe.simulation.cost import CostTable, StageCost


@dataclass(frozen=True, slots=True)
class Cuts:
    """The cuts of both networks.

    Attributes:
        student: First atom of each stage, and the number of atoms. Stage s is on rank
            ``(P - 1 - s) % P``: the first one on the last rank, where the data is, and with more
            stages than ranks *folded* (for P = 2 and S = 3: stages 0 and 2 on rank 1, stage 1 on
            rank 0).
        teacher: The same for an independent teacher, whose parts on ranks P - 1, ..., 0 may be
            empty; () for a paired teacher, and without a teacher.
    """

    student: tuple[int, ...]
    teacher: tuple[int, ...] = ()

    @property
    def num_stages(self) -> int:
        """Number of student stages."""
        return len(self.student) - 1


@dataclass(frozen=True)
class Layout:
    """Cuts with a number of micro-batches and the stages whose backward is split; has costs."""

    workload: Workload
    cuts: Cuts
    num_microbatches: int
    split: frozenset[int] = frozenset()

    @property
    def student_ranks(self) -> tuple[int, ...]:
        """Rank of each student stage."""
        return default_ranks(self.cuts.num_stages, self.workload.num_ranks)

    @cached_property
    def student_parts(self) -> tuple[tuple[int, int, int], ...]:
        """First atom, end and rank of each student stage."""
        bounds = pairwise(self.cuts.student)
        return tuple(
            (start, stop, rank)
            for (start, stop), rank in zip(bounds, self.student_ranks, strict=True)
        )

    @property
    def teacher_parts(self) -> tuple[tuple[int, int, int], ...]:
        """First atom, end and rank of each teacher stage."""
        teacher = self.workload.teacher
        if teacher is None:
            return ()
        bounds, ranks = self.cuts.student, self.student_ranks
        if not self.workload.paired:
            bounds = self.cuts.teacher
            ranks = default_ranks(self.workload.num_ranks, self.workload.num_ranks)
        end = teacher.num_atoms
        return tuple(
            (start, min(stop, end), rank)
            for (start, stop), rank in zip(pairwise(bounds), ranks, strict=True)
            if start < min(stop, end)
        )

    @property
    def teacher_cuts(self) -> tuple[int, ...]:
        """First atom of each teacher stage, and the number of atoms; () without a teacher."""
        parts = self.teacher_parts
        return (*(start for start, _, _ in parts), parts[-1][1]) if parts else ()

    @cached_property
    def pipeline(self) -> Pipeline:
        """The pipeline that schedules are made for."""
        workload = self.workload
        ranks = self.student_ranks
        teacher = None
        if workload.teacher is not None:
            teacher = self._network(
                workload.teacher,
                self.teacher_cuts,
                tuple(rank for _, _, rank in self.teacher_parts),
                workload.num_calls[1],
            )
        student = self._network(workload.student, self.cuts.student, ranks, workload.num_calls[0])
        coupling = Coupling.PREFIX if workload.frozen else Coupling.CHAIN
        last = workload.num_ranks - 1
        return Pipeline(workload.num_ranks, student, teacher, last, coupling=coupling)

    def _network(
        self, network: NetworkProfile, cuts: tuple[int, ...], ranks: tuple[int, ...], num_calls: int
    ) -> NetworkLayout:
        outputs = {
            stage
            for stage, (start, stop) in enumerate(pairwise(cuts))
            if any(atom.result_bytes_per_sample for atom in network.atoms[start:stop])
        }
        if network is self.workload.student or not self.workload.frozen:
            outputs.add(len(ranks) - 1)
        return NetworkLayout(ranks, num_calls, self.num_microbatches, frozenset(outputs))

    @cached_property
    def costs(self) -> CostTable:
        """Costs for the simulator."""
        workload, units = self.workload, self.workload.units(self.num_microbatches)
        ranks = workload.ranks
        own, other = units.samples

        def seconds(sums: tuple[float, ...], start: int, stop: int, rank: int) -> float:
            return _part(sums, start, stop) / ranks.speeds[rank] + workload.action_overhead

        student = tuple(
            StageCost(
                forward=seconds(units.forward, start, stop, rank),
                backward=seconds(units.backward, start, stop, rank),
                input_backward=seconds(units.input_backward, start, stop, rank),
                weight_backward=seconds(units.weight_backward, start, stop, rank),
                output_bytes=_output_bytes(workload.student, stop, own),
                result_bytes=_result_bytes(workload.student, start, stop, own),
            )
            for start, stop, rank in self.student_parts
        )
        teacher = tuple(
            StageCost(
                forward=seconds(units.teacher, start, stop, rank),
                output_bytes=_output_bytes(
                    workload.teacher, stop, other, passed_on=workload.frozen
                ),
                result_bytes=0
                if workload.frozen
                else _result_bytes(workload.teacher, start, stop, other),
            )
            for start, stop, rank in self.teacher_parts
            if workload.teacher is not None
        )
        return CostTable(
            student=student,
            teacher=teacher,
            loss=workload.loss_seconds / ranks.speeds[0],
            optimizer=self._seconds_per_rank(workload.update_sums),
            effects=self._seconds_per_rank(workload.effect_sums),
            latency=ranks.link.latency,
            bandwidth=ranks.link.bandwidth,
            data=workload.data_seconds,
            input_bytes=round(workload.input_bytes_per_sample * own),
            nodes=ranks.nodes,
            inter_node_latency=ranks.inter_node_link.latency if ranks.nodes else 0.0,
            inter_node_bandwidth=ranks.inter_node_link.bandwidth if ranks.nodes else math.inf,
            reduction=self.reduction,
        )

    @property
    def reduction(self) -> tuple[float, ...]:
        """Seconds of each rank's gradient reduction over the replicas; () without replicas."""
        ranks = self.workload.ranks
        if ranks.num_replicas == 1:
            return ()
        gradients = self._per_rank(self.workload.gradient_sums)
        return tuple(ranks.reduction_seconds(rank, size) for rank, size in enumerate(gradients))

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank works in a step; the largest is a lower bound for any schedule."""
        workload, units = self.workload, self.workload.units(self.num_microbatches)
        overhead = workload.action_overhead
        speeds = workload.ranks.speeds
        own, other = (calls * self.num_microbatches for calls in workload.num_calls)
        sums = workload.update_sums, workload.effect_sums
        seconds = list(map(operator.add, *map(self._seconds_per_rank, sums)))
        seconds[0] += workload.loss_seconds / speeds[0]
        seconds[-1] += workload.data_seconds
        for stage, (start, stop, rank) in enumerate(self.student_parts):
            kinds = [units.forward, units.backward]
            if stage in self.split:
                kinds = [units.forward, units.input_backward, units.weight_backward]
            seconds[rank] += own * sum(
                _part(kind, start, stop) / speeds[rank] + overhead for kind in kinds
            )
        for start, stop, rank in self.teacher_parts:
            seconds[rank] += other * (_part(units.teacher, start, stop) / speeds[rank] + overhead)
        return tuple(seconds)

    @cached_property
    def state_bytes(self) -> tuple[int, ...]:
        """Bytes of parameters, gradients and optimizer state of both networks, per rank."""
        held = list(self._per_rank(self.workload.state_sums))
        if not self.workload.paired:
            for start, stop, rank in self.teacher_parts:
                held[rank] += _part(self.workload.teacher_state_sums, start, stop)
        return tuple(map(round, map(operator.add, held, self.version_bytes)))

    @cached_property
    def version_bytes(self) -> tuple[int, ...]:
        """Bytes of copies of the trained weights beside the current ones, per rank."""
        num_ranks, policy = self.workload.num_ranks, self.workload.weights
        if policy is None:
            return (0,) * num_ranks
        trained = self._per_rank(self.workload.gradient_sums)
        return tuple(
            round(size * num_copies(policy, rank, num_ranks)) for rank, size in enumerate(trained)
        )

    @cached_property
    def message_bytes(self) -> tuple[int, ...]:
        """Bytes of receive buffers per rank; the student's activations are counted elsewhere.

        Receives are posted when the step begins, each with a buffer of its own: for gradients, for
        the activations of teacher stages, and on rank 0 for the inputs of the loss.
        """
        calls = self.workload.num_calls
        room = [0] * self.workload.num_ranks
        for parts, costs, units, gives_gradients in (
            (self.student_parts, self.costs.student, calls[0], True),
            (self.teacher_parts, self.costs.teacher, calls[1], False),
        ):
            units *= self.num_microbatches  # noqa: PLW2901 - of all calls
            behind = [*(rank for _, _, rank in parts[1:]), 0]
            for (_, _, rank), following, cost in zip(parts, behind, costs, strict=False):
                if rank != following:
                    room[rank if gives_gradients else following] += units * cost.output_bytes
                if rank != 0:
                    room[0] += units * cost.result_bytes
                    room[rank] += units * cost.result_bytes * gives_gradients
        return tuple(room)

    @cached_property
    def memory_bytes(self) -> tuple[int, ...]:
        """Bytes of state, saved activations and receive buffers, per rank."""
        workload, samples = self.workload, sum(self.workload.samples())
        again, received = [0.0] * workload.num_ranks, [0.0] * workload.num_ranks
        for start, stop, rank in self.student_parts:
            again[rank] = max(
                again[rank], workload.recompute_bytes(start, stop, self.num_microbatches)
            )
            if start:  # what a stage received stays until its backward
                before = workload.student.atoms[start - 1]
                received[rank] += before.output_bytes_per_sample * samples
        parts = (
            self.state_bytes,
            self._in_flight(self._per_rank(workload.activation_sums)),
            again,
            self._in_flight(received),
            self.message_bytes,
        )
        return tuple(round(sum(amounts)) for amounts in zip(*parts, strict=True))

    def _in_flight(self, amounts: Sequence[float]) -> list[float]:
        """Amounts for all batches in flight on each rank, given those for one batch."""
        if self.workload.weights is None:
            return list(amounts)
        num_ranks = self.workload.num_ranks
        return [size * num_batches(rank, num_ranks) for rank, size in enumerate(amounts)]

    @cached_property
    def memory_use(self) -> MemoryUse:
        """Breakdown of the memory of each rank."""
        workload = self.workload
        trained = self._per_rank(workload.gradient_sums)
        teacher = [0] * workload.num_ranks
        if workload.teacher is not None:
            sums = workload.teacher.byte_sums("parameter_bytes")
            for start, stop, rank in self.teacher_parts:
                teacher[rank] += sums[stop] - sums[start]
        parameters = self._per_rank(tuple(map(float, workload.parameter_sums)))
        states = workload.optimizer_bytes_per_parameter_byte
        return MemoryUse(
            parameters=tuple(map(round, parameters)),
            gradients=tuple(map(round, trained)),
            optimizer=tuple(round(states * amount) for amount in trained),
            teacher=tuple(teacher),
            versions=self.version_bytes if workload.weights is not None else (),
            activations=tuple(
                held - state - messages
                for held, state, messages in zip(
                    self.memory_bytes, self.state_bytes, self.message_bytes, strict=True
                )
            ),
            messages=self.message_bytes,
        )

    @property
    def fits(self) -> bool:
        """Whether every rank stays within the memory limits."""
        workload = self.workload
        if max(self.state_bytes) > workload.state_limit:
            return False
        limits = workload.memory_limits
        return all(map(math.isinf, limits)) or all(map(operator.le, self.memory_bytes, limits))

    def _per_rank(self, sums: tuple[float, ...]) -> tuple[float, ...]:
        amounts = [0.0] * self.workload.num_ranks
        for start, stop, rank in self.student_parts:
            amounts[rank] += _part(sums, start, stop)
        return tuple(amounts)

    def _seconds_per_rank(self, sums: tuple[float, ...]) -> tuple[float, ...]:
        speeds = self.workload.ranks.speeds
        return tuple(map(operator.truediv, self._per_rank(sums), speeds))


def _part(sums: tuple[float, ...], start: int, stop: int) -> float:
    return sums[stop] - sums[start]


def _output_bytes(
    network: NetworkProfile | None, stop: int, samples: float, *, passed_on: bool = False
) -> int:
    """Bytes that a stage sends to the next one; the last stage only if it is a frozen prefix."""
    if network is None or (stop == network.num_atoms and not passed_on):
        return 0
    return round(network.atoms[stop - 1].output_bytes_per_sample * samples)


def _result_bytes(network: NetworkProfile | None, start: int, stop: int, samples: float) -> int:
    """Bytes that a stage sends to the loss; the network's output if its taps are unknown."""
    if network is None:
        return 0
    amount = sum(atom.result_bytes_per_sample for atom in network.atoms[start:stop])
    if not amount and stop == network.num_atoms:
        amount = network.atoms[-1].output_bytes_per_sample
    return round(amount * samples)
