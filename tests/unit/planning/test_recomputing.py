from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.profile import AtomProfile, NetworkProfile
from lightning_tspipe.planning.step_profile import StepProfile, keep_or_recompute
from tests.unit.cli.profiles import MB, step_profile

PROFILE = step_profile()
AGAIN = PROFILE.recomputing(range(8))


def test_running_again_costs_forwards_and_saves_activations() -> None:
    plain, again = PROFILE.plan(2, num_microbatches=4), AGAIN.plan(2, num_microbatches=4)
    assert again.recomputed == tuple(range(8))
    assert again.placement.recomputed == frozenset(range(8))
    assert plain.placement.recomputed == frozenset()
    assert not again.split
    for before, after in zip(plain.costs.student, again.costs.student, strict=True):
        assert after.forward == before.forward
        assert after.backward == pytest.approx(before.backward + before.forward)
    assert again.memory is not None
    assert plain.memory is not None
    # Rank 1 (stage 0): the activations of one unit of 4 samples; rank 0 has also what it received.
    unit, batch = 4 * 4000, 32 * 1000
    assert again.memory.activations == (4 * unit + batch, 4 * unit)
    assert plain.memory.activations == (4 * 32 * 4000 + batch, 4 * 32 * 4000)


def test_plans_that_run_again_are_saved() -> None:
    plan = AGAIN.plan(2)
    assert Plan.from_json(plan.to_json()) == plan
    assert "activations of 8 atoms recomputed" in str(plan)


def test_it_fits_where_nothing_fitted() -> None:
    limit = round(2 * 8 * MB + 4 * 8000)
    with pytest.raises(PartitionError, match="state and activations"):
        PROFILE.plan(2, memory_limit=limit)
    plan = AGAIN.plan(2, memory_limit=limit + 4 * 8000 + 32 * 1000)  # and messages
    assert max(plan.memory_bytes) <= limit + 4 * 8000 + 32 * 1000


# The first atom keeps much, so that with little memory it is alone on its rank.
HEAVY_FRONT = replace(
    step_profile(teacher=False),
    student=NetworkProfile(
        tuple(
            replace(
                atom,
                parameter_bytes=10 * MB,
                trainable_bytes=10 * MB,
                activation_bytes_per_sample=4000 if place else 8 * MB,
            )
            for place, atom in enumerate(PROFILE.student.atoms)
        )
    ),
)


@pytest.mark.parametrize(
    ("limit", "is_again"), [(400 * MB, False), (300 * MB, True), (240 * MB, True)]
)
def test_activations_are_kept_or_computed_again_by_what_is_faster(
    limit: int, is_again: bool
) -> None:
    def plan(profile: StepProfile) -> Plan:
        return profile.plan(2, num_microbatches=4, memory_limit=limit)

    profile, found = keep_or_recompute(HEAVY_FRONT, plan)
    assert bool(found.recomputed) == bool(profile.student.recomputed) == is_again
    assert max(found.memory_bytes) <= limit
    try:
        kept = plan(HEAVY_FRONT).step_seconds
    except PartitionError:  # the last of the limits
        kept = math.inf
    again = plan(HEAVY_FRONT.recomputing(range(8))).step_seconds
    assert found.step_seconds == min(kept, again)


def test_neither_fits() -> None:
    with pytest.raises(PartitionError, match=r"'block0' alone needs .* may hold 1\.0 MB"):
        keep_or_recompute(HEAVY_FRONT, lambda profile: profile.plan(2, memory_limit=MB))


def test_of_neighbours_only_what_the_first_got_is_kept() -> None:
    atoms = tuple(
        AtomProfile(f"a{n}", {1: 1.0}, {1: 2.0}, output_bytes_per_sample=10 + n,
                    activation_bytes_per_sample=100)
        for n in range(5)
    )  # fmt: skip
    network = NetworkProfile(atoms).recomputing({2, 3})
    assert network.saved_sums == (0, 100, 200, 211, 211, 311)
    assert network.recompute_sums == (0, 0, 0, 100, 200, 200)
    assert network.sums("backward", 1) == (0, 2, 4, 7, 10, 12)
