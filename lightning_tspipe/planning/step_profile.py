"""Measured costs of a training step, which can be saved and planned elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.plain import Saved
from lightning_tspipe.planning.cluster import Cluster, Link
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.planner import TIE, plan
from lightning_tspipe.planning.profile import NetworkProfile, Step
from lightning_tspipe.planning.workload import Workload


@dataclass(frozen=True)
class StepProfile(Step, Saved):
    """A step with measured costs, which can be modified, planned and saved."""

    _origin = "profile", "`tspipe plan --save-profile` writes one"

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters of both networks, gradients and optimizer state, of one replica."""
        networks = (self.student, self.teacher)
        held = sum(each.parameter_sums[-1] for each in networks if each is not None)
        held += self.loss_parameter_bytes
        trained = self.student.gradient_sums[-1] + self.loss_trainable_bytes
        return held + int(trained * (1 + self.optimizer_bytes_per_parameter_byte))

    def recomputing(self, atoms: Collection[int]) -> StepProfile:
        """The same step with some atoms of the student recomputed in the backward."""
        return replace(self, student=self.student.recomputing(atoms))

    def freezing(self, num_atoms: int) -> StepProfile:
        """The same step after the student's first atoms have become a forward-only network."""
        if num_atoms == 0:
            return self
        frozen, trained = self.student.atoms[:num_atoms], self.student.atoms[num_atoms:]
        return replace(
            self,
            student=NetworkProfile(trained),
            teacher=NetworkProfile(tuple(replace(a, trainable_bytes=0) for a in frozen)),
            num_calls=(self.num_calls[0], self.num_calls[0]),
            paired=False,
            frozen=True,
            tied=tuple(each.freezing(num_atoms) for each in self.tied),
        )

    def dividing_state(self, num_replicas: int) -> StepProfile:
        """The same step with optimizer state that replicas hold once together (ZeRO, stage 1)."""
        rate = self.optimizer_bytes_per_parameter_byte / num_replicas
        return replace(self, optimizer_bytes_per_parameter_byte=rate)

    def plan(self, num_ranks: int, *, thorough: bool = True, **options: Any) -> Plan:  # noqa: ANN401 - as below
        """The fastest plan over ``num_ranks`` ranks.

        Args:
            num_ranks: Ranks of the pipeline.
            thorough: Whether to search for seconds rather than for about one.
            options: As for :meth:`problem`.

        Raises:
            PartitionError: Too few atoms, or no cut fits: names the atom and the amount.
            ConfigurationError: An impossible option.
        """
        return plan(self.problem(num_ranks, **options), thorough=thorough)

    def problem(  # noqa: PLR0913 - what is converted, and the rest
        self,
        num_ranks: int,
        *,
        num_replicas: int = 1,
        link: tuple[float, float] = (0.0, math.inf),
        cluster: Cluster | None = None,
        memory_limit: int | None = None,
        state_limit: int | None = None,
        zero_stage: int = 0,
        **options: Any,  # noqa: ANN401 - fields of a class
    ) -> Workload:
        """The problem to solve: one replica's work, and what the user decided.

        Args:
            num_ranks: Ranks of the pipeline.
            num_replicas: Number of data-parallel pipelines, of ``num_ranks`` each: each gets an
                equal part of the batch, and gradients are summed over them.
            link: Latency in seconds, and bytes per second.
            cluster: Devices that differ, or several nodes; replaces ``link``.
            memory_limit: Bytes per rank for state and activations.
            state_limit: Bytes per rank for parameters, gradients and optimizer state.
            zero_stage: 1: replicas hold the optimizer state once together.
            options: Other fields of :class:`~.workload.Workload`.

        Raises:
            ConfigurationError: The samples can't be divided evenly.
        """
        for size in self.batch_sizes:
            if num_replicas < 1 or size % num_replicas:
                raise ConfigurationError(
                    f"a batch of {size} samples cannot be divided evenly among {num_replicas} "
                    "replicas"
                )
        sizes = tuple(size // num_replicas for size in self.batch_sizes)
        own = self.dividing_state(num_replicas) if zero_stage else self
        return Workload(
            **(vars(own) | {"batch_sizes": sizes}),
            **options,
            num_ranks=num_ranks,
            num_replicas=num_replicas,
            cluster=cluster or Cluster(num_ranks * num_replicas, Link(*link)),
            memory_limit=math.inf if memory_limit is None else memory_limit,
            state_limit=math.inf if state_limit is None else state_limit,
        )

    def with_batch(self, samples: int) -> StepProfile:
        """The same step with ``samples`` in its largest calls, the others in proportion.

        Raises:
            ConfigurationError: A call would be empty.
        """
        largest = max(self.batch_sizes)
        sizes = tuple(size * samples // largest for size in self.batch_sizes)
        if min(sizes) < 1:
            raise ConfigurationError(f"a batch of {samples} samples leaves some calls without any")
        return replace(self, batch_sizes=sizes)


def keep_or_recompute(
    profile: StepProfile, plan: Callable[[StepProfile], Plan]
) -> tuple[StepProfile, Plan]:
    """The faster of two plans within the memory: all activations saved, or all recomputed.

    Recomputing costs additional forwards. That pays off if the memory otherwise rules out faster
    plans: more even cuts, or more micro-batches in flight.

    Args:
        profile: The step, with activations saved.
        plan: Plans a step.

    Returns:
        The profile of the chosen plan, and the plan; without recomputing if both are equally fast.

    Raises:
        PartitionError: Neither fits.
    """
    again = profile.recomputing(range(profile.student.num_atoms))
    found: list[tuple[StepProfile, Plan]] = []
    for way in (profile, again):
        try:
            found.append((way, plan(way)))
        except PartitionError:
            if way is again and not found:
                raise
    return min(found, key=lambda one: one[1].step_seconds * (TIE if one[0] is again else 1.0))
