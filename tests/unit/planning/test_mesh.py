from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.planning.cluster import Cluster, Link
from lightning_tspipe.planning.mesh import plan_cluster
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.profile import AtomProfile, NetworkProfile
from lightning_tspipe.planning.step_profile import StepProfile

MB = 1_000_000
SIZES = (1, 2, 4, 8, 16)


def profile(
    num_atoms: int = 8, *, batch: int = 64, megabytes: float = 1.0, fixed: float = 0.0
) -> StepProfile:
    """Atoms of a millisecond per sample, and ``fixed`` for any number of them."""

    def atoms(*, trained: bool) -> NetworkProfile:
        forward = {size: 1e-3 * (fixed + size) for size in SIZES}
        half = {size: 1e-3 * (fixed + size) for size in SIZES} if trained else {}
        backward = {size: 2 * seconds for size, seconds in half.items()}
        return NetworkProfile(
            tuple(
                AtomProfile(
                    f"block{index}",
                    forward,
                    backward,
                    half,
                    half,
                    output_bytes_per_sample=1000,
                    activation_bytes_per_sample=4000,
                    parameter_bytes=round(megabytes * MB),
                    trainable_bytes=round(megabytes * MB) * trained,
                )
                for index in range(num_atoms)
            )
        )

    networks = atoms(trained=True), atoms(trained=False)
    return StepProfile(*networks, (1, 1), (batch,), paired=True)


FAST, SLOW = Link(1e-6, 1e12), Link(1e-6, 1e8)


def mesh(plan: Plan) -> tuple[int, int]:
    return plan.num_replicas, plan.pipeline.num_ranks


def test_without_limits_replicas_have_no_bubble() -> None:
    plan = plan_cluster(profile(), Cluster(8, FAST))
    assert mesh(plan) == (8, 1)
    # An eighth of the batch each: 8 samples, 8 atoms, 4 milliseconds per sample.
    assert plan.step_seconds == pytest.approx(8 * 8 * 4e-3, rel=1e-3)
    assert plan.samples_per_second == pytest.approx(64 / plan.step_seconds)
    assert "8 replicas x 1 ranks, faster than" in plan.reason


def test_memory_asks_for_deeper_pipelines() -> None:
    # A whole replica needs 32 MB, and a little for activations.
    plan = plan_cluster(profile(), Cluster(8, FAST), memory_limit=20 * MB)
    assert mesh(plan) == (4, 2)
    assert max(plan.memory_bytes) <= 20 * MB
    assert "8 x 1 (rank 0 would need 32.3 MB for state and activations" in plan.reason
    assert "its largest atom is 'block0': 4.0 MB" in plan.reason
    # One small device in each node decides for all replicas.
    small = Cluster(8, FAST, memories=(40.0 * MB, 20.0 * MB))
    assert mesh(plan_cluster(profile(), small)) == (4, 2)


def test_optimizer_state_that_replicas_divide() -> None:
    # Of 8 MB of a pipeline's parameters: as much of gradients and of the teacher, Adam's twice.
    step = replace(profile(), optimizer_bytes_per_parameter_byte=2.0)
    whole = plan_cluster(step, Cluster(8, FAST), num_replicas=4, num_microbatches=1)
    divided = plan_cluster(step, Cluster(8, FAST), num_replicas=4, num_microbatches=1, zero_stage=1)
    assert sum(whole.state_bytes) == 40 * MB
    assert sum(divided.state_bytes) == 28 * MB
    assert divided.step_seconds == whole.step_seconds
    with pytest.raises(PartitionError):
        plan_cluster(step, Cluster(8, FAST), num_replicas=4, state_limit=15 * MB)
    fits = plan_cluster(step, Cluster(8, FAST), num_replicas=4, state_limit=15 * MB, zero_stage=1)
    assert max(fits.state_bytes) <= 15 * MB


def test_slow_links_between_nodes_ask_for_fewer_sums() -> None:
    near = Cluster(8, FAST, num_nodes=2, inter_node_link=FAST)
    far = replace(near, inter_node_link=SLOW)
    large = profile(megabytes=20)
    assert mesh(plan_cluster(large, near)) == (8, 1)
    assert mesh(plan_cluster(large, far)) == (1, 8)


@pytest.mark.parametrize("schedule", ["tspipe", "gpipe", "sequential"])
@pytest.mark.parametrize("between", [FAST, Link(1e-5, 1e9), SLOW])
@pytest.mark.parametrize("speeds", [(), (1.0, 1.0, 0.5, 0.5)])
def test_is_the_fastest_of_all_divisions(
    schedule: str, between: Link, speeds: tuple[float, ...]
) -> None:
    cluster = Cluster(8, FAST, speeds=speeds, num_nodes=2, inter_node_link=between)
    step = profile(megabytes=5, fixed=4)
    options: dict[str, Any] = {"schedule": schedule, "num_microbatches": 4}
    all_plans = [plan_cluster(step, cluster, num_replicas=n, **options) for n in (1, 2, 4, 8)]
    plan = plan_cluster(step, cluster, **options)
    best = min(one.step_seconds for one in all_plans)
    assert plan.step_seconds == pytest.approx(best, rel=0.01)


def test_a_number_of_replicas_that_was_decided() -> None:
    plan = plan_cluster(profile(), Cluster(8, FAST), num_replicas=2, num_microbatches=4)
    assert mesh(plan) == (2, 4)
    constraints = {"num_microbatches": 4}
    assert plan == profile().plan(4, num_replicas=2, cluster=Cluster(8, FAST), **constraints)
    # Each gets 32 of the 64 samples; with half the devices there would be one replica of them.
    alone = profile(batch=32).plan(4, cluster=Cluster(4, FAST), **constraints)
    assert plan.step_seconds == pytest.approx(alone.step_seconds, rel=0.01)
    assert plan.samples_per_second == pytest.approx(2 * alone.samples_per_second, rel=0.01)


def test_a_plan_for_devices_that_differ_is_one_on_paper() -> None:
    cluster = Cluster(8, FAST, speeds=(1, 0.5))
    plan = plan_cluster(profile(), cluster, num_replicas=2, num_microbatches=4)
    assert plan.speeds == (1.0, 0.5, 1.0, 0.5)
    assert Plan.from_json(plan.to_json()) == plan
    text = str(plan)
    assert "tspipe in 2 replicas of 4 ranks: " in text
    assert "devices of relative speeds 1, 0.5, 1, 0.5, which TSPipeStrategy does not check" in text
    assert "relative speeds" not in str(plan_cluster(profile(), Cluster(4, FAST), num_replicas=1))
    assert plan.simulate(8).step_time == pytest.approx(plan.step_seconds, rel=0.03)


def test_fast_ranks_get_more_atoms() -> None:
    # Rank 0, where the last stage is, is as fast as all three others together.
    plan = plan_cluster(profile(12), Cluster(4, FAST, speeds=(3, 1, 1, 1)), num_replicas=1)
    assert plan.student_cuts == (0, 2, 4, 6, 12)
    assert plan.bubble_ratio < 0.01


def test_batches_that_were_not_measured() -> None:
    # A replica gets one sample at least; with 64 devices and 8 samples there are no 64 replicas.
    plan = plan_cluster(profile(batch=8), Cluster(64, FAST))
    assert mesh(plan) == (8, 8)
    assert "64 x 1 (a batch of 8 samples cannot be divided evenly" in plan.reason
    sizes = dict.fromkeys((4, 8), 0.001)
    coarse = replace(
        profile(batch=8), student=NetworkProfile((AtomProfile("a", sizes, sizes),) * 8)
    )
    plan = plan_cluster(replace(coarse, teacher=None, num_calls=(1, 0)), Cluster(8, FAST))
    assert mesh(plan) == (2, 4)
    assert (
        "8 x 1 (a replica would get 1 samples per call, but the smallest measured call has 4"
        in plan.reason
    )
    # Beyond what was measured the line goes on, and the plan says so.
    plan = plan_cluster(profile(batch=128), Cluster(2, FAST), num_replicas=2)
    assert "units of 64 samples are extrapolated" in plan.reason
    assert plan.step_seconds == pytest.approx(64 * 8 * 4e-3, rel=1e-3)


def test_a_batch_of_any_size() -> None:
    step = replace(profile(), num_calls=(2, 2), batch_sizes=(64, 16))
    assert step.with_batch(128).batch_sizes == (128, 32)
    with pytest.raises(ConfigurationError, match="leaves some calls without any"):
        step.with_batch(2)


@pytest.mark.parametrize(
    ("arguments", "error", "remedy"),
    [
        ({"num_replicas": 3}, ConfigurationError, "1, 2, 4 and 8 are possible"),
        ({"num_replicas": 8, "state_limit": MB}, PartitionError, "atom 'block0' alone needs 4.0"),
        ({"state_limit": MB}, PartitionError, r"no division of 8 .* 1 x 8 \(atom 'block0' alone"),
        ({"memory_limit": 2 * MB}, PartitionError, "atom 'block0' alone needs 4.0 MB"),
    ],
)
def test_what_cannot_be_divided(
    arguments: dict[str, Any], error: type[Exception], remedy: str
) -> None:
    with pytest.raises(error, match=remedy):
        plan_cluster(profile(), Cluster(8, FAST), **arguments)


def test_samples_that_cannot_be_divided() -> None:
    with pytest.raises(ConfigurationError, match="12 samples cannot be divided evenly among 8"):
        plan_cluster(profile(batch=12), Cluster(8, FAST), num_replicas=8)


def test_a_thousand_devices() -> None:
    cluster = Cluster(1024, Link(5e-6, 3e11), num_nodes=128, inter_node_link=Link(2e-5, 2.5e10))
    plan = plan_cluster(profile(16, batch=4096, megabytes=80), cluster, memory_limit=1500 * MB)
    replicas, ranks = mesh(plan)
    assert replicas * ranks == 1024
    assert ranks >= 4
    assert max(plan.memory_bytes) <= 1500 * MB
