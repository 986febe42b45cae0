"""What the planner tries where the user did not decide."""

from __future__ import annotations

from lightning_tspipe.planning.profile import AtomProfile, NetworkProfile
from lightning_tspipe.planning.step_profile import StepProfile


def test_plans_between_epochs_try_no_more_than_six_microbatches_for_each_rank() -> None:
    blocks = tuple(AtomProfile(f"{n}", {1: 1.0}, {1: 2.0}) for n in range(16))
    step = StepProfile(NetworkProfile(blocks), None, (1, 0), (256,), paired=False).freezing(4)
    most = {}
    for ranks in (1, 2, 8):
        most[ranks] = max(step.problem(ranks, split=False).microbatch_counts())
    # Three blocks that are trained for each frozen one would fill the bubbles of 8 ranks with 64.
    assert most == {1: 8, 2: 8, 8: 32}
