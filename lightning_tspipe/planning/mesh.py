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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.planning.cluster import Cluster, divisors
from lightning_tspipe.planning.constraints import Constraints
from lightning_tspipe.planning.evaluation import Evaluator
from lightning_tspipe.planning.failures import does_not_fit
from lightning_tspipe.planning.layout import Layout
from lightning_tspipe.planning.partition import too_few_atoms
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.planner import plan
from lightning_tspipe.planning.search import CutSpace, joined_atoms
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


@dataclass(frozen=True)
class Request:
    """A step to be planned for a cluster.

    Attributes:
        profile: The step; its batch is that of all replicas together.
        cluster: The devices.
        options: As for :meth:`.StepProfile.problem`.
    """

    profile: StepProfile
    cluster: Cluster
    options: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, num_replicas: int, *, thorough: bool = True) -> Plan:
        """The fastest plan of one division.

        Args:
            num_replicas: Replicas of the pipeline.
            thorough: Whether to search for seconds rather than for about one.

        Raises:
            PartitionError: Too few atoms, or no cut fits.
            ConfigurationError: Devices or samples cannot be divided so.
        """
        return plan(*self.problem(num_replicas), thorough=thorough)

    def problem(self, num_replicas: int) -> tuple[Workload, Constraints]:
        """One replica's work.

        Raises:
            ConfigurationError: Devices or samples cannot be divided so.
        """
        num_ranks = len(self.cluster.ranks(num_replicas).speeds)
        return self.profile.problem(
            num_ranks, cluster=self.cluster, num_replicas=num_replicas, **self.options
        )


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
    request = Request(profile, cluster, options)
    if num_replicas != "auto":
        return request.plan(num_replicas)
    return _fastest(request)


@dataclass(frozen=True)
class _Division:
    """A division of the devices into replicas.

    Attributes:
        num_replicas: Number of replicas.
        num_ranks: Ranks of each.
        layouts: The most even cuts, with choices of micro-batches and halves, best bound first.
        bound: Lower bound of the seconds per step.
        failure: Why the division is impossible; empty if it is possible.
    """

    num_replicas: int
    num_ranks: int
    layouts: tuple[Layout, ...] = field(default=(), repr=False, compare=False)
    bound: float = math.inf
    failure: str = ""

    def __str__(self) -> str:
        return f"{self.num_replicas} x {self.num_ranks}"


def _fastest(request: Request) -> Plan:
    """Bound all divisions, simulate some, plan the best."""
    num_devices = request.cluster.num_devices
    divisions = [
        _bounded(request, _Division(num_devices // num_ranks, num_ranks))
        for num_ranks in divisors(num_devices)
    ]
    failures = {one: one.failure for one in divisions if one.failure}
    waiting = sorted((one for one in divisions if not one.failure), key=_bound)
    times: dict[_Division, float] = {}
    while waiting and waiting[0].bound < min(times.values(), default=math.inf) * _NEAR:
        division = waiting.pop(0)
        try:
            times[division] = _estimate(request, division)
        except PartitionError as error:
            failures[division] = str(error)
    impossible = [f"{one} ({_short(text)})" for one, text in failures.items()]
    if not times:
        raise PartitionError(
            f"no division of {num_devices} devices into replicas x ranks is possible: "
            f"{', '.join(impossible)}"
        )
    best, plan = _planned(request, times)
    slower = [
        f"{one} about {_ms(times[one])}"
        for one in sorted(times, key=times.__getitem__)
        if one != best
    ]
    slower += [f"{one} at least {_ms(one.bound)}" for one in waiting]
    return replace(plan, reason=_reason(best, slower, impossible, plan))


def _planned(request: Request, times: dict[_Division, float]) -> tuple[_Division, Plan]:
    """The fastest of the best few, planned in full."""
    order = sorted(times, key=times.__getitem__)
    plans: dict[_Division, Plan] = {}
    fastest = math.inf
    for division in order[:_MAX_PLANNED]:
        if times[division] <= times[order[0]] * _NEAR and division.bound < fastest * _EQUAL:
            plans[division] = request.plan(division.num_replicas, thorough=False)
            fastest = min(fastest, plans[division].step_seconds)
    best = min(plans, key=lambda one: plans[one].step_seconds)
    return best, plans[best]


def _bounded(request: Request, division: _Division) -> _Division:
    """Bound a division, or say why it is impossible."""
    try:
        workload, constraints = request.problem(division.num_replicas)
        _check(workload)
    except (ConfigurationError, PartitionError) as error:
        return replace(division, failure=str(error))
    evaluator = Evaluator(constraints.schedule)
    layouts = sorted(_layouts(workload, constraints), key=evaluator.bound)
    return replace(
        division, layouts=tuple(layouts[:_NUM_ESTIMATES]), bound=evaluator.bound(layouts[0])
    )


def _layouts(workload: Workload, constraints: Constraints) -> Iterator[Layout]:
    """The most even cuts, for each number of micro-batches and choice of halves."""
    counts = constraints.microbatch_counts(workload)
    even = CutSpace(workload, workload.num_ranks, counts[0]).balanced()
    for count in counts:
        for split in constraints.splits(workload, workload.num_ranks):
            yield replace(even, num_microbatches=count, split=split)


def _estimate(request: Request, division: _Division) -> float:
    """Seconds per step, simulated.

    Raises:
        PartitionError: No cuts fit the memory.
    """
    fitting = [layout for layout in division.layouts if layout.fits]
    if not fitting:
        return request.plan(division.num_replicas, thorough=False).step_seconds
    evaluator = Evaluator(request.options.get("schedule", "tspipe"))
    return min(map(evaluator.estimate, fitting))


def _reason(best: _Division, slower: list[str], impossible: list[str], plan: Plan) -> str:
    text = f"{best.num_replicas} replicas x {best.num_ranks} ranks"
    if slower:
        text += f", faster than {', '.join(slower[:_MAX_NAMED])}"
    if impossible:
        text += f"; impossible: {', '.join(impossible[:_MAX_NAMED])}"
    return f"{text}\n{plan.reason}"


def _short(failure: str) -> str:
    """The problem, without the remedy."""
    return failure.partition(". ")[0]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _bound(division: _Division) -> float:
    return division.bound


def _check(workload: Workload) -> None:
    """Refuse a division that cannot be planned, before anything is cut.

    Raises:
        PartitionError: Too few atoms, units smaller than those that were measured, or too little
            memory on all ranks together.
    """
    num_pieces = workload.student.num_atoms - len(joined_atoms(workload))
    if num_pieces < workload.num_ranks:
        raise too_few_atoms(num_pieces, workload.num_ranks)
    smallest, _ = workload.measured_sizes
    if min(workload.batch_sizes) < smallest:
        raise PartitionError(
            f"a replica would get {min(workload.batch_sizes)} samples per call, and {smallest} "
            "are the fewest that were measured"
        )
    state = workload.state_sums[-1] + sum(workload.teacher_state_sums[-1:])
    needed = state + workload.activation_sums[-1]
    limits = workload.memory_limits
    if state > workload.state_limit * len(limits) or needed > sum(limits):
        raise does_not_fit(CutSpace(workload, workload.num_ranks, 1).balanced())
