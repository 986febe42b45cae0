"""Which mesh a transition chooses."""

from __future__ import annotations

import pytest

from lightning_tspipe.planning.profile import AtomProfile, NetworkProfile
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.strategy.setup.freezing import Freezing, choose

NUM_ATOMS, SAMPLES, ATOM_BYTES = 8, 16, 1000
MESHES, LINK = (1, 2, 4), {"link": (0.0, 1e12)}


def profile() -> StepProfile:
    """Equal atoms, which keep nothing for their backward."""
    atoms = tuple(
        AtomProfile(
            f"block {n}", {1: 0.1, SAMPLES: 0.1 * SAMPLES}, {1: 0.2, SAMPLES: 0.2 * SAMPLES},
            parameter_bytes=ATOM_BYTES, trainable_bytes=ATOM_BYTES,
        )
        for n in range(NUM_ATOMS)
    )  # fmt: skip
    return StepProfile(NetworkProfile(atoms), None, (1, 0), (SAMPLES,), paired=False)


@pytest.mark.parametrize(
    ("memory", "num_ranks"),
    [
        # Parameters, gradients and momentum of four atoms, parameters of the four that are frozen.
        (16 * ATOM_BYTES, 1),
        (16 * ATOM_BYTES - 1, 2),
        (8 * ATOM_BYTES - 1, 4),
    ],
)
def test_no_device_needs_more_memory_than_the_fullest_did(memory: int, num_ranks: int) -> None:
    plan = choose(Freezing(profile=profile(), memory=memory), 4, 4, MESHES, LINK)
    assert plan is not None
    assert plan.pipeline.num_ranks == num_ranks
    assert max(plan.memory_bytes) <= memory


def test_a_limit_of_the_users_holds_too() -> None:
    limits = LINK | {"memory_limit": 8 * ATOM_BYTES}
    plan = choose(Freezing(profile=profile(), memory=16 * ATOM_BYTES), 4, 4, MESHES, limits)
    assert plan is not None
    assert plan.pipeline.num_ranks == 2


def test_nothing_fits_or_nothing_is_known() -> None:
    assert choose(Freezing(profile=profile(), memory=ATOM_BYTES), 4, 4, MESHES, LINK) is None
    assert choose(Freezing(), 4, 4, MESHES, LINK) is None
    assert choose(Freezing(profile=profile(), memory=16 * ATOM_BYTES), 0, 4, MESHES, LINK) is None
