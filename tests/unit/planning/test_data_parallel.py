from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.planning.cluster import Cluster, Link
from lightning_tspipe.planning.data_parallel import METHODS, blocks_of, plan_data_parallel
from lightning_tspipe.planning.mesh import plan_cluster
from lightning_tspipe.planning.profile import AtomProfile, NetworkProfile
from lightning_tspipe.planning.ties import Tied
from tests.unit.cli.profiles import MB, step_profile

FREE = Cluster(4)
PER_SAMPLE = 2 * 8 * (1 + 2 + 1) * 1e-3
"""Seconds: two calls of eight atoms, forward, backward, and the teacher's forward."""
KEPT = 2 * 8 * 4000
"""Bytes of activations of a sample."""


def test_devices_that_need_no_time_to_talk_divide_the_work() -> None:
    profile = step_profile()
    plans = [plan_data_parallel(profile, FREE, method) for method in METHODS]
    for plan in plans:
        assert plan.step_seconds == pytest.approx(4 * PER_SAMPLE)
        assert plan.samples_per_second == pytest.approx(1 / PER_SAMPLE * 4)
        assert (plan.samples, plan.num_passes, plan.fits) == (4, 1, True)
    # As replicas of a pipeline of one rank.
    same = plan_cluster(profile, FREE, num_replicas=4, schedule="gpipe", num_microbatches=1)
    assert plans[-1].step_seconds == pytest.approx(same.step_seconds)


def test_the_slowest_device_counts() -> None:
    cluster = Cluster(4, speeds=(1.0, 1.0, 0.5, 1.0), memories=(math.inf, 9 * MB, 99 * MB, 99 * MB))
    plan = plan_data_parallel(step_profile(), cluster, "ddp")
    assert plan.step_seconds == pytest.approx(2 * 4 * PER_SAMPLE)
    assert plan.memory_limit == 9 * MB
    assert not plan.fits


def test_an_optimizer_updates_all_or_its_part() -> None:
    profile = replace(step_profile(), update_seconds_per_byte=1e-9)
    both = 16 * MB * 1e-9  # a paired teacher follows
    for method, seconds in (("ddp", both), ("fsdp2", both / 4)):
        plan = plan_data_parallel(profile, FREE, method)  # type: ignore[arg-type]
        assert plan.step_seconds == pytest.approx(4 * PER_SAMPLE + seconds)
        assert plan.computing_seconds == pytest.approx(plan.step_seconds)


def test_gradients_of_the_last_call_are_summed_in_its_backward() -> None:
    # A sum takes .75 * 2 / 3 of a second per MB; a block's backward 8 ms: the link is what counts.
    cluster = Cluster(4, Link(0.0, 3 * MB))
    plan = plan_data_parallel(step_profile(), cluster, "ddp")
    # The first bucket, of two blocks, leaves when they are through; all others wait for the link.
    first = 4 * PER_SAMPLE - 6 * 8e-3
    assert plan.step_seconds == pytest.approx(first + 8 * 0.5)
    assert plan.computing_seconds == pytest.approx(4 * PER_SAMPLE)


def test_what_a_device_holds() -> None:
    own = {"parameters": 8 * MB, "gradients": 8 * MB, "optimizer": 8 * MB, "teacher": 8 * MB}
    whole = plan_data_parallel(step_profile(), FREE, "ddp").memory
    assert whole == own | {"buckets": 8 * MB, "activations": 4 * KEPT}
    # Two blocks, and the gradients of one.
    part = plan_data_parallel(step_profile(), FREE, "fsdp2").memory
    quarters = {name: amount // 4 for name, amount in own.items()}
    assert part == quarters | {"gathered": 3 * MB, "activations": 4 * KEPT}


def test_what_is_tied_and_what_lies_with_the_loss() -> None:
    profile = replace(
        step_profile(),
        tied=(Tied("embedding", MB, MB, student=(0,), with_loss=True),),
        loss_parameter_bytes=3 * MB, loss_trainable_bytes=MB,
        loss_working_bytes=MB, loss_working_bytes_per_sample=1000,
    )  # fmt: skip
    memory = plan_data_parallel(profile, FREE, "ddp").memory
    assert (memory["parameters"], memory["gradients"]) == (10 * MB, 8 * MB)
    # A gradient stays until it is added.
    assert memory["activations"] == 4 * KEPT + (MB + 4 * 1000) + MB


@pytest.mark.parametrize(
    ("limit", "has_views", "num_passes", "fits"),
    [
        (41 * MB, False, 1, True),
        (33 * MB, True, 1, True),
        (32 * MB + 3 * KEPT, True, 2, True),
        (32 * MB, True, 2, False),
    ],
)
def test_what_saves_memory_is_done_where_it_is_needed(
    limit: int, has_views: bool, num_passes: int, fits: bool
) -> None:
    cluster = Cluster(4, Link(1e-4, 1e9))
    plan = plan_data_parallel(step_profile(), cluster, "ddp", memory_limit=limit)
    assert (plan.has_views, plan.num_passes, plan.fits) == (has_views, num_passes, fits)
    assert plan.samples * plan.num_passes == 4
    assert plan.excess == max(0, plan.memory_bytes - limit)


def test_activations_are_computed_again_where_they_must() -> None:
    limit = 8 * MB + 3 * MB + 2 * KEPT // 2
    plan = plan_data_parallel(step_profile(), FREE, "fsdp2", memory_limit=limit)
    assert not plan.fits
    plan = plan_data_parallel(
        step_profile(), FREE, "fsdp2", memory_limit=limit, may_recompute=True
    )  # fmt: skip
    assert plan.fits
    assert plan.recomputed
    # Of each block but the first its input, in two calls; of one block everything, in one.
    assert plan.memory["activations"] == plan.samples * (2 * 7 * 1000 + 4000)
    again = 2 * 8 * 1e-3 * 4
    assert plan.step_seconds == pytest.approx(4 * PER_SAMPLE + again)
    assert not plan_data_parallel(
        step_profile(), FREE, "fsdp2", state_limit=8 * MB - 1, may_recompute=True
    ).fits


def test_a_window_is_divided_whole_and_summed_once() -> None:
    profile = step_profile().with_batch(2)  # fewer samples than devices
    with pytest.raises(ConfigurationError, match=r"samples of an update, 2, cannot .* 4 devices"):
        plan_data_parallel(profile, FREE, "ddp")
    plan = plan_data_parallel(profile, FREE, "ddp", window=4)
    assert (plan.samples, plan.num_passes) == (2, 1)
    assert plan.step_seconds == pytest.approx(2 * PER_SAMPLE / 4)
    assert plan.samples_per_second == pytest.approx(4 / PER_SAMPLE)
    assert not plan.is_extrapolated
    # A sum for each update; FSDP2 gathers and divides in each pass.
    slow = Cluster(4, Link(0.0, 3 * MB))
    times = {
        (method, window): plan_data_parallel(profile, slow, method, window=window).step_seconds
        for method in METHODS
        for window in (4, 8)
    }
    assert times["ddp", 8] < 0.6 * times["ddp", 4]
    assert times["fsdp2", 8] == pytest.approx(times["fsdp2", 4])


def test_smaller_calls_than_measured_are_said_to_be() -> None:
    plan = plan_data_parallel(step_profile(), Cluster(16), "ddp")
    assert (plan.samples, plan.is_extrapolated) == (1, True)


def test_blocks_are_the_layers_of_a_network() -> None:
    names = {
        "embed": 1, "layers.0.norm": 1, "add": 0, "layers.0.mlp.up..silu": 1, "layers.1.norm": 1,
        "encoder.layer_7.ln": 1, "encoder.layer_7.mlp.0": 1, "norm": 1, "flatten": 0,
    }  # fmt: skip
    atoms = [AtomProfile(name, {1: 1.0}, parameter_bytes=size) for name, size in names.items()]
    found = blocks_of(NetworkProfile(tuple(atoms)))
    assert found == [(0, 1), (1, 4), (4, 5), (5, 7), (7, 9)]
