"""A step whose costs are known."""

from __future__ import annotations

from lightning_tspipe.planning.profile import AtomProfile, NetworkProfile
from lightning_tspipe.planning.step_profile import StepProfile

MB = 10**6


def step_profile(num_atoms: int = 8, *, teacher: bool = True) -> StepProfile:
    def atoms(*, trained: bool) -> NetworkProfile:
        sizes = (2, 4, 8, 16)
        forward = {size: 1e-3 * size for size in sizes}
        backward = {size: 2e-3 * size for size in sizes} if trained else {}
        return NetworkProfile(
            tuple(
                AtomProfile(
                    f"block{index}",
                    forward,
                    backward,
                    {size: seconds / 2 for size, seconds in backward.items()},
                    {size: seconds / 2 for size, seconds in backward.items()},
                    output_bytes_per_sample=1000,
                    activation_bytes_per_sample=4000,
                    parameter_bytes=MB,
                    trainable_bytes=MB * trained,
                )
                for index in range(num_atoms)
            )
        )

    networks = atoms(trained=True), atoms(trained=False) if teacher else None
    return StepProfile(*networks, (2, 2 * teacher), (16, 16), paired=teacher)
