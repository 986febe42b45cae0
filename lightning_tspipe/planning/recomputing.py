"""Activation checkpointing as a choice of the planner: keep activations, or recompute them."""

from __future__ import annotations

from collections.abc import Callable

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.reason import TIE
from lightning_tspipe.planning.step_profile import StepProfile

Planner = Callable[[StepProfile], Plan]


def keep_or_recompute(profile: StepProfile, plan: Planner) -> tuple[StepProfile, Plan]:
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
