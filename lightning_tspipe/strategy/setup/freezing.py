"""Plan where the frozen beginning of a student runs, and how many devices the rest needs."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, get_type_hints

from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.plain import from_plain, to_plain
from lightning_tspipe.planning.cluster import divisors
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.profile import NetworkProfile
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.profiling.steps import seconds_of_forward
from lightning_tspipe.runtime.execution.engine import Rank
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.stages.frozen import Front, FrozenPart

log = logging.getLogger("lightning_tspipe")

_EQUAL = 1.03
"""A plan this close to one in which no device waits is good enough: each takes a second to find."""


@dataclass
class Freezing:
    """What is frozen, and what is known about the step.

    Attributes:
        is_on: Whether layers may freeze in this fit.
        names: Parameters that are frozen.
        parameters: For each atom of the student, the names of its parameters, once it is known.
        num_known: Behind so many atoms something was known when it was chosen last.
        num_joined: So many batches of the loader are a global batch: replicas at the start.
        is_shared: Whether each replica reads its part of every global batch, and the mesh may
            change.
        profile: Of the whole step, as it was measured for the first plan; its batch is that of one
            replica then. None if nothing was measured.
        num_replicas: Replicas then.
        memory: Bytes that the fullest rank needed then; None if there was no plan.
        num_stages: Stages of what is trained, if the user says so.
        plan: For the mesh that was chosen.
        front: Knows what the frozen part returned for a sample before.
    """

    is_on: bool = False
    names: frozenset[str] = frozenset()
    parameters: tuple[tuple[str, ...], ...] = ()
    num_known: int = 0
    num_joined: int = 1
    is_shared: bool = False
    profile: StepProfile | None = None
    num_replicas: int = 1
    memory: int | None = None
    num_stages: int | None = None
    plan: Plan | None = None
    front: Front | None = None

    def learn(self, profile: StepProfile, plan: Plan, num_replicas: int) -> None:
        """Keep what the first plan was made from."""
        if self.profile is None:
            self.profile, self.num_replicas = profile, num_replicas
            self.memory = max(plan.memory_bytes)

    def to_json(self) -> str | None:
        """For a checkpoint, what batches and the next plan follow; None if nothing freezes."""
        if not self.is_on:
            return None
        kept = {name: getattr(self, name) for name in _KEPT}
        if self.front is not None:
            kept["num_known"] = max(self.num_known, self.front.num_known)
        return json.dumps(to_plain(kept))

    def read(self, text: str | None) -> None:
        """Know what another run did, from :meth:`to_json`."""
        types = get_type_hints(Freezing)
        for name, value in json.loads(text or "{}").items():
            setattr(self, name, from_plain(types[name], value))


_KEPT = (
    "num_joined", "is_shared", "profile", "num_replicas", "memory", "parameters", "num_known",
)  # fmt: skip


def possible_meshes(
    num_devices: int, num_ranks: int, fewest_samples: int, num_stages: int | None
) -> tuple[int, ...]:
    """Ranks of a pipeline that may be from now on, fewest first.

    Args:
        num_devices: Devices of the job.
        num_ranks: Ranks of a pipeline now: it never gets longer.
        fewest_samples: Of the batches of an epoch; each replica needs one.
        num_stages: Stages of what is trained, if the user says so; what is frozen gets the ranks
            that are left over.

    >>> possible_meshes(8, 8, 64, None), possible_meshes(8, 8, 2, None)
    ((1, 2, 4, 8), (4, 8))
    >>> possible_meshes(8, 8, 64, 3)
    (4,)
    """
    found = [
        ranks
        for ranks in divisors(num_devices)
        if ranks <= num_ranks and num_devices // ranks <= fewest_samples
    ]
    if num_stages is not None:
        found = [ranks for ranks in found if ranks >= num_stages][:1]
    return tuple(found) or (num_ranks,)


def choose(
    freezing: Freezing,
    num_frozen: int,
    num_devices: int,
    meshes: Sequence[int],
    constraints: Mapping[str, Any],
) -> Plan | None:
    """The fastest plan whose fullest rank needs no more memory than at the start.

    Args:
        freezing: What is known.
        num_frozen: Atoms of the student that are frozen.
        num_devices: Devices of the job.
        meshes: Ranks of a pipeline that may be, fewest first.
        constraints: Further arguments of :meth:`StepProfile.plan`.

    Returns:
        A plan of what is trained and, as its teacher, what is frozen; None if nothing is known, or
        nothing fits.
    """
    if freezing.profile is None or num_frozen == 0:
        return None
    profile = freezing.profile.freezing(num_frozen)
    profile = profile.with_batch(max(profile.batch_sizes) * freezing.num_replicas)
    profile = _known(profile, freezing)
    # If no device ever waited, nor did anything twice.
    samples, kinds = max(profile.batch_sizes), ("forward", "backward")
    seconds = sum(profile.student.sums(kind, samples)[-1] for kind in kinds)
    if profile.teacher is not None:
        seconds += profile.teacher.sums("forward", samples)[-1]
    fastest = profile.num_calls[0] * seconds / num_devices
    limits = dict(constraints)
    if freezing.num_stages is None and freezing.memory is not None:
        limits["memory_limit"] = min(freezing.memory, limits.get("memory_limit") or math.inf)
    best: Plan | None = None
    for ranks in meshes:
        if best is not None and best.step_seconds <= _EQUAL * fastest:
            break
        replicas = num_devices // ranks
        # Samples that can't be divided evenly cost as much as if there were a few more.
        step = profile.with_batch(-(-samples // replicas) * replicas)
        try:
            plan = step.plan(
                ranks,
                num_replicas=replicas,
                num_stages=freezing.num_stages,
                thorough=False,
                **limits,
            )
        except (PartitionError, ConfigurationError) as error:
            log.debug("%d ranks: %s", ranks, error)
            continue
        best = plan if best is None else min(best, plan, key=attrgetter("step_seconds"))
    return best


def _known(profile: StepProfile, freezing: Freezing) -> StepProfile:
    """The step in the epoch that follows: what is known is read, which takes no time.

    Behind it are the layers that have frozen just now.
    """
    if freezing.front is None or profile.teacher is None:
        return profile
    freezing.num_known = max(freezing.num_known, freezing.front.num_known)
    atoms = profile.teacher.atoms
    read = [replace(atom, forward=dict.fromkeys(atom.forward, 0.0)) for atom in atoms]
    known = freezing.num_known
    return replace(profile, teacher=NetworkProfile((*read[:known], *atoms[known:])))


def ask_front(part: FrozenPart, here: Rank, captured: Captured, freezing: Freezing) -> None:
    """Put the front before the part if it is going to know anything; every rank calls it.

    Args:
        part: The frozen part.
        here: This rank.
        captured: The step; all values of its networks are here.
        freezing: What is known.
    """
    front, number, profile = freezing.front, part.num_frozen, freezing.profile
    # Perhaps the step uses something in its middle.
    if front is None or any(chain.outputs_between(0, number) for chain in part.routes):
        return
    calls = [captured.plan.calls[index] for index in captured.plan.calls_of("student")]
    first = calls[0]

    def seconds() -> float:
        if profile is not None:
            return profile.student.sums("forward", first.batch_size)[number]
        return seconds_of_forward(part.routes[first.route], number, first, here.device)

    if front.placed(part, calls, seconds):
        part.front = front


def place_frozen(
    freezing: Freezing, num_atoms: int, num_frozen: int, num_ranks: int, num_microbatches: int
) -> tuple[Placement, Plan | None]:
    """The placement as planned or, where nothing was measured, with as many atoms for each rank.

    Args:
        freezing: What is known.
        num_atoms: Atoms of the whole student.
        num_frozen: The first of them, which are frozen.
        num_ranks: Ranks of the pipeline.
        num_microbatches: Micro-batches per call, if nothing was planned.

    Raises:
        PartitionError: More stages than atoms that are trained.
    """
    plan = freezing.plan
    if plan is not None and plan.pipeline.num_ranks == num_ranks:
        return of_plan(plan, num_frozen), plan
    number = min(freezing.num_stages or num_ranks, num_atoms - num_frozen)
    if freezing.num_stages is not None and number < freezing.num_stages:
        raise PartitionError(
            f"{num_atoms - num_frozen} atoms are trained: too few for {freezing.num_stages} "
            "stages. Use fewer in FreezeAndRepack(repack=...)"
        )
    student = _even_cuts(num_frozen, num_atoms, number)
    teacher = _even_cuts(0, num_frozen, min(num_ranks, num_frozen))
    return Placement.of(num_ranks, student, teacher, num_microbatches), None


def _even_cuts(start: int, stop: int, parts: int) -> tuple[int, ...]:
    return tuple(start + (stop - start) * part // parts for part in range(parts + 1))


def of_plan(plan: Plan, num_frozen: int) -> Placement:
    """A plan of the frozen and the trained part, in the numbers of the whole student's atoms."""
    placement = plan.placement
    return replace(
        placement,
        student_cuts=tuple(cut + num_frozen for cut in placement.student_cuts),
        recomputed=frozenset(atom + num_frozen for atom in placement.recomputed),
    )
