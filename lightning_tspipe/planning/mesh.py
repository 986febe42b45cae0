"""Division of many devices into replicas of a pipeline.

N devices are R replicas of a pipeline of P ranks, ``R * P = N``. With more replicas there are fewer
stages to wait for, but each has a smaller batch, more memory per device, and more gradients to
sum::

    R x P     8 x 1          4 x 2          2 x 4          1 x 8
    memory    whole model    half           quarter        an eighth
    waits     none           little         more           most
    sums      everything     half of it     a quarter      nothing

1. For every division, the lower bound of the step time is computed (see ``bounds``), with its most
   even cuts.
2. These cuts are simulated in the order of their bounds, until the next bound exceeds the best
   time.
3. The best division, and a second one that is about as good, is planned in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Any, Literal

from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.planning.cluster import Cluster, divisors
from lightning_tspipe.planning.layout import Layout
from lightning_tspipe.planning.partition import too_few_atoms
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.planner import Evaluator, plan
from lightning_tspipe.planning.search import CutSpace, does_not_fit
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.planning.workload import Workload

_MAX_PLANNED = 2
"""Most divisions that are planned in full: each takes seconds."""

_NEAR = 1.05
"""Estimates this close may be reordered when a division is planned in full."""

_EQUAL = 0.99
"""A division is planned only if it may be faster by this factor."""

_NUM_ESTIMATES = 3
"""Simulations of each division: the choices with the best bounds."""

_MAX_NAMED = 3
"""Other divisions that the reason names."""


def plan_cluster(
    profile: StepProfile,
    cluster: Cluster,
    *,
    num_replicas: int | Literal["auto"] = "auto",
    **options: Any,  # noqa: ANN401 - as in `StepProfile.problem`
) -> Plan:
    """The fastest plan for all devices of a cluster, and how it divides them.

    Args:
        profile: The step; its batch is that of all replicas together.
        cluster: The devices.
        num_replicas: Replicas of the pipeline; "auto" finds the fastest number.
        options: As for :meth:`.StepProfile.problem`.

    Raises:
        PartitionError: No division has enough atoms and fits the memory; says what each lacks.
        ConfigurationError: The devices or the batch cannot be divided as requested.
    """

    def problem(number: int) -> Workload:
        num_ranks = len(cluster.ranks(number).speeds)
        return profile.problem(num_ranks, cluster=cluster, num_replicas=number, **options)

    if num_replicas != "auto":
        return plan(problem(num_replicas))
    return _fastest(problem, cluster.num_devices)


@dataclass(frozen=True, eq=False)
class _Division:
    """A division of the devices into replicas.

    Attributes:
        workload: The work of one replica.
        layouts: The most even cuts, with choices of micro-batches and halves, best bound first.
    """

    workload: Workload
    layouts: tuple[Layout, ...]

    @classmethod
    def of(cls, workload: Workload) -> _Division:
        """Bound a division.

        Raises:
            PartitionError: It cannot be planned.
        """
        _check(workload)
        counts = workload.microbatch_counts()
        even = CutSpace(workload, workload.num_ranks, counts[0]).balanced()
        ways = product(counts, workload.splits(workload.num_ranks))
        choices = [replace(even, num_microbatches=count, split=split) for count, split in ways]
        return cls(workload, tuple(sorted(choices, key=attrgetter("bound"))[:_NUM_ESTIMATES]))

    @property
    def bound(self) -> float:
        """Lower bound of the seconds per step."""
        return self.layouts[0].bound

    def estimate(self) -> float:
        """Seconds per step, simulated.

        Raises:
            PartitionError: No cuts fit the memory.
        """
        fitting = [layout for layout in self.layouts if not layout.excess]
        if not fitting:
            return self.plan().step_seconds
        return min(map(Evaluator().estimate, fitting))

    def plan(self) -> Plan:
        """The plan of this division, searched quickly."""
        return plan(self.workload, thorough=False)

    def __str__(self) -> str:
        return f"{self.workload.num_replicas} x {self.workload.num_ranks}"


def _fastest(problem: Callable[[int], Workload], num_devices: int) -> Plan:
    """Bound all divisions, simulate some, plan the best."""
    waiting, failures = _bounded(problem, num_devices)
    times: dict[_Division, float] = {}
    while waiting and waiting[0].bound < min(times.values(), default=math.inf) * _NEAR:
        division = waiting.pop(0)
        try:
            times[division] = division.estimate()
        except PartitionError as error:
            failures.append(f"{division} ({_short(error)})")
    if not times:
        raise PartitionError(
            f"no division of {num_devices} devices into replicas x ranks is possible: "
            f"{', '.join(failures)}"
        )
    found = _best(times)
    best = f"{found.num_replicas} replicas x {found.pipeline.num_ranks} ranks"
    order = sorted(times, key=times.__getitem__)
    others = [one for one in order if one.workload.num_replicas != found.num_replicas]
    slower = [f"{one} about {_ms(times[one])}" for one in others]
    slower += [f"{one} at least {_ms(one.bound)}" for one in waiting]
    text = ", faster than ".join(filter(None, [best, ", ".join(slower[:_MAX_NAMED])]))
    if failures:
        text += f"; impossible: {', '.join(failures[:_MAX_NAMED])}"
    return replace(found, reason=f"{text}\n{found.reason}")


def _bounded(
    problem: Callable[[int], Workload], num_devices: int
) -> tuple[list[_Division], list[str]]:
    """All divisions, best bound first; and those that are impossible, with the problem."""
    possible: list[_Division] = []
    failures: list[str] = []
    for num_ranks in divisors(num_devices):
        number = num_devices // num_ranks
        try:
            possible.append(_Division.of(problem(number)))
        except (ConfigurationError, PartitionError) as error:
            failures.append(f"{number} x {num_ranks} ({_short(error)})")
    return sorted(possible, key=attrgetter("bound")), failures


def _best(times: dict[_Division, float]) -> Plan:
    """The fastest of the best few divisions, planned in full."""
    order = sorted(times, key=times.__getitem__)
    found = order[0].plan()
    for other in order[1:_MAX_PLANNED]:
        may_win = other.bound < found.step_seconds * _EQUAL
        if may_win and times[other] <= times[order[0]] * _NEAR:
            found = min(found, other.plan(), key=attrgetter("step_seconds"))
    return found


def _short(failure: Exception) -> str:
    """The problem, without the remedy."""
    return str(failure).partition(". ")[0]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _check(workload: Workload) -> None:
    """Refuse a division that cannot be planned, before anything is cut.

    Raises:
        PartitionError: Too few atoms, units smaller than those that were measured, or too little
            memory on all ranks together.
    """
    if workload.num_pieces < workload.num_ranks:
        raise too_few_atoms(workload.num_pieces, workload.num_ranks)
    smallest, _ = workload.measured_sizes
    if min(workload.batch_sizes) < smallest:
        raise PartitionError(
            f"a replica would get {min(workload.batch_sizes)} samples per call, but the smallest "
            f"measured call has {smallest}"
        )
    state = workload.state_sums[-1]
    if not workload.paired:
        state += sum(workload.teacher_sums[-1:])
    needed = state + workload.activation_sums[-1]
    limits = workload.memory_limits
    if state > workload.state_limit * len(limits) or needed > sum(limits):
        raise does_not_fit(CutSpace(workload, workload.num_ranks, 1).balanced())
