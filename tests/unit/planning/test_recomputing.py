from __future__ import annotations

import pytest

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.profile import AtomProfile, NetworkProfile
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
    assert "activations of 8 atoms computed again" in str(plan)


def test_it_fits_where_nothing_fitted() -> None:
    limit = round(2 * 8 * MB + 4 * 8000)
    with pytest.raises(PartitionError, match="state and activations"):
        PROFILE.plan(2, memory_limit=limit)
    plan = AGAIN.plan(2, memory_limit=limit + 4 * 8000)
    assert max(plan.memory_bytes) <= limit + 4 * 8000


def test_of_neighbours_only_what_the_first_got_is_kept() -> None:
    atoms = tuple(
        AtomProfile(f"a{n}", {1: 1.0}, {1: 2.0}, output_bytes_per_sample=10 + n,
                    activation_bytes_per_sample=100)
        for n in range(5)
    )  # fmt: skip
    network = NetworkProfile(atoms).recomputing({2, 3})
    assert network.kept_sums() == (0, 100, 200, 211, 211, 311)
    assert network.again_sums() == (0, 0, 0, 100, 200, 200)
    assert network.sums("backward", 1) == (0, 2, 4, 7, 10, 12)
