from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.ir.validation import validate
from lightning_tspipe.planning.cluster import Cluster
from lightning_tspipe.planning.layout import Layout
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.planner import Evaluator
from lightning_tspipe.planning.profile import AtomProfile, NetworkProfile
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.planning.workload import Workload
from lightning_tspipe.schedules.registry import steady_step
from lightning_tspipe.simulation.simulator import steady_step_time

SIZES = (4, 8, 16, 32)
MB = 1_000_000


def network(
    *seconds: float, megabytes: tuple[float, ...] = (), fixed: float = 0.0, halves: bool = True
) -> NetworkProfile:
    """Atoms by their seconds for 32 samples, of which ``fixed`` don't depend on the samples."""
    sizes = megabytes or (1.0,) * len(seconds)

    def times(total: float) -> dict[int, float]:
        return {size: total * (fixed + (1 - fixed) * size / 32) for size in SIZES}

    return NetworkProfile(
        tuple(
            AtomProfile(
                f"layer{n}",
                forward=times(total),
                backward=times(2 * total),
                input_backward=times(total) if halves else {},
                weight_backward=times(total) if halves else {},
                output_bytes_per_sample=1000,
                activation_bytes_per_sample=1000,
                parameter_bytes=round(size * MB),
                trainable_bytes=round(size * MB),
            )
            for n, (total, size) in enumerate(zip(seconds, sizes, strict=True))
        )
    )


def planned(student: NetworkProfile, teacher: NetworkProfile | None, **changes: Any) -> Plan:
    names = changes.keys() & {field.name for field in fields(StepProfile)}
    step = StepProfile(student, teacher, (2, 0 if teacher is None else 2), (32,))
    step = replace(step, **{name: changes.pop(name) for name in names})
    found = step.plan(**({"num_ranks": 2} | changes))
    # What is promised is what the schedule that will run takes.
    schedule = steady_step(found.schedule, found.pipeline, found.costs, found.split)
    validate(schedule)
    assert steady_step_time(schedule, found.costs) == pytest.approx(found.step_seconds)
    return found


EVEN = network(*[1.0] * 8)


def test_two_equal_halves_without_a_bubble() -> None:
    found = planned(EVEN, EVEN)
    assert found.student_cuts == found.teacher_cuts == (0, 4, 8)
    assert found.pipeline.student.ranks == (1, 0)
    assert found.num_microbatches == 1
    assert found.split == {1}
    assert found.step_seconds == pytest.approx(2 * 4 * 4)
    assert found.bubble_ratio == pytest.approx(0)
    assert found.samples_per_second == pytest.approx(1)


def test_whole_backwards_need_more_micro_batches() -> None:
    found = planned(EVEN, EVEN, split=False)
    assert found.split == frozenset()
    assert found.num_microbatches == 2
    assert found.step_seconds == pytest.approx(32)


def test_micro_batches_that_cost_more_than_they_fill_are_not_made() -> None:
    slow = network(*[1.0] * 8, fixed=0.5)
    found = planned(slow, slow, split=False)
    assert found.num_microbatches == 1
    assert planned(slow, slow, split=False, num_microbatches=4).step_seconds > found.step_seconds


def test_halves_that_cost_more_than_they_fill_are_not_made() -> None:
    dear = NetworkProfile(
        tuple(replace(atom, weight_backward=dict.fromkeys(SIZES, 9.0)) for atom in EVEN.atoms)
    )
    assert planned(dear, dear).split == frozenset()
    assert planned(dear, dear, split=True).split == {1}


def test_micro_batches_stay_within_what_was_measured() -> None:
    # GPipe profits from every further micro-batch; of 8 samples each was measured at 4 at least.
    assert planned(EVEN, EVEN, schedule="gpipe").num_microbatches == 8
    assert planned(EVEN, EVEN, schedule="gpipe", batch_sizes=[8]).num_microbatches == 2
    assert planned(EVEN, EVEN, schedule="gpipe", batch_sizes=[2]).num_microbatches == 1


def test_action_overhead_counts() -> None:
    found = planned(EVEN, EVEN, schedule="gpipe", action_overhead=0.5)
    assert found.num_microbatches == 2


def test_sequential_balances_memory_and_does_not_split() -> None:
    found = planned(EVEN, EVEN, schedule="sequential")
    assert found.student_cuts == (0, 4, 8)
    assert (found.num_microbatches, found.split) == (1, frozenset())
    assert found.step_seconds == pytest.approx(2 * 8 * 4)
    assert found.bubble_ratio == pytest.approx(0.5)


def test_without_a_teacher() -> None:
    found = planned(EVEN, None)
    assert found.pipeline.teacher is None
    assert found.teacher_cuts == ()
    assert found.placement.teacher_ranks == ()


def test_one_rank() -> None:
    found = planned(EVEN, EVEN, num_ranks=1)
    assert found.student_cuts == (0, 8)
    assert found.num_microbatches == 1
    assert found.step_seconds == pytest.approx(64)


def test_a_paired_teacher_without_the_students_head() -> None:
    student = network(1, 1, 1, 1, 5)
    found = planned(student, NetworkProfile(student.atoms[:4]))
    assert found.student_cuts == (0, 4, 5)
    # All of the teacher is in the first stage.
    assert found.teacher_cuts == (0, 4)
    assert found.placement.teacher_ranks == (1,)


def test_an_independent_teacher_levels_the_ranks() -> None:
    # The student's heavy atom cannot be divided; the teacher goes to the other rank.
    teacher = network(*[0.5] * 24, halves=False)
    found = planned(network(1, 1, 4, 1, 1), teacher, num_calls=(1, 1), paired=False)
    assert found.student_cuts == (0, 2, 5)
    assert found.placement.teacher_ranks == (1,)
    assert found.step_seconds == pytest.approx((3 * 8 + 12) / 2)
    # An even student leaves an even share to both.
    found = planned(EVEN, teacher, num_calls=(1, 1), paired=False)
    assert found.bubble_ratio < 0.03
    assert found.step_seconds == pytest.approx((3 * 8 + 12) / 2, rel=0.03)


def test_atoms_that_share_a_parameter_stay_together() -> None:
    atoms = [replace(atom, joined=n == 3) for n, atom in enumerate(EVEN.atoms)]
    found = planned(NetworkProfile(tuple(atoms)), EVEN)
    assert found.student_cuts == (0, 3, 8)


def test_folds_when_the_state_does_not_fit() -> None:
    # As in a ResNet, the last atoms have the parameters.
    heavy = network(*[1.0] * 8, megabytes=(0.1, 0.1, 0.1, 0.1, 1, 1, 4, 4))
    free = planned(heavy, heavy)
    assert free.student_cuts == (0, 4, 8)
    limit = 30 * MB  # of 10.4 x (2 + 1 + 1) = 41.6
    found = planned(heavy, heavy, state_limit=limit)
    assert max(found.state_bytes) <= limit < max(free.state_bytes)
    assert found.pipeline.student.num_stages > 2
    assert found.step_seconds < 1.1 * free.step_seconds
    assert "folded" in found.reason


def test_coarse_atoms_are_folded_over_the_ranks() -> None:
    # One stage for each of four ranks: (1 1 4) (4) (4) (4 1 1). Two: 4 + 1 each.
    coarse = network(1, 1, 4, 4, 4, 4, 1, 1)
    found = planned(coarse, coarse, num_ranks=4)
    assert found.pipeline.student.num_stages == 8
    assert "folded" in found.reason
    apart = planned(coarse, coarse, num_ranks=4, num_stages=4)
    assert apart.pipeline.student.num_stages == 4
    assert found.step_seconds < 0.9 * apart.step_seconds
    # What is even already is not folded, nor what would not become faster.
    assert planned(EVEN, EVEN, num_ranks=4).pipeline.student.num_stages == 4
    for schedule in ("sequential", "1f1b"):
        found = planned(coarse, None, num_ranks=4, schedule=schedule)
        assert found.pipeline.student.num_stages == 4


@pytest.mark.slow
def test_contiguous_cuts_under_a_limit_compete_with_folded_ones() -> None:
    heavy = network(*[1.0] * 8, megabytes=(0.5,) * 5 + (1.5,) * 3)
    assert planned(heavy, heavy, state_limit=21 * MB).student_cuts == (0, 4, 8)
    near = planned(heavy, heavy, state_limit=19 * MB)
    assert near.pipeline.student.num_stages > 2
    # Where messages take long, an uneven cut is better than going back and forth.
    far = planned(heavy, heavy, state_limit=19 * MB, link=(10.0, 1e9))
    assert far.student_cuts == (0, 5, 8)


def test_activations_count_for_the_memory_limit() -> None:
    limit = 8 * 32 * 1000 * 2
    with pytest.raises(PartitionError, match="state and activations"):
        planned(network(*[1.0] * 8, megabytes=(0.01,) * 8), None, memory_limit=limit // 2)
    planned(network(*[1.0] * 8, megabytes=(0.01,) * 8), None, memory_limit=limit)


def test_names_what_fits_nowhere() -> None:
    heavy = network(1, 1, 1, megabytes=(1, 9, 1))
    message = r"atom 'layer1' alone needs 27\.0 MB for its parameters.*may hold 20\.0 MB"
    with pytest.raises(PartitionError, match=message):
        planned(heavy, None, state_limit=20 * MB)
    message = r"rank 0 would need .* MB for parameters.*may hold 10\.0 MB; its largest atom is"
    with pytest.raises(PartitionError, match=message):
        planned(network(*[1.0] * 8), None, state_limit=10 * MB)


def test_fewer_atoms_than_ranks() -> None:
    with pytest.raises(PartitionError, match="3 pieces at most, but 4 stages"):
        planned(network(1, 1, 1), None, num_ranks=4)


def test_a_partition_by_hand() -> None:
    found = planned(EVEN, EVEN, partition=[2, 6])
    assert found.student_cuts == (0, 2, 8)
    folded = planned(EVEN, EVEN, partition=[2, 4, 2])
    assert folded.pipeline.student.ranks == (1, 0, 1)
    apart = planned(EVEN, EVEN, partition=[2, 6], paired=False)
    assert apart.student_cuts == (0, 2, 8)
    assert apart.teacher_cuts != (0, 2, 8)
    with pytest.raises(PartitionError, match=r"cuts 7 atoms, but the student has 8: layer0, "):
        planned(EVEN, EVEN, partition=[3, 4])
    for counts in ([8], [0, 8]):
        with pytest.raises(ConfigurationError, match="at least one atom to each stage"):
            planned(EVEN, EVEN, partition=counts)
    with pytest.raises(PartitionError, match="rank 0 would need"):
        planned(EVEN, EVEN, partition=[1, 7], state_limit=20 * MB)


def test_json_and_table() -> None:
    found = planned(EVEN, EVEN, link=(1e-3, 1e9))
    assert Plan.from_json(found.to_json()) == found
    free = planned(EVEN, None)
    assert Plan.from_json(free.to_json()) == free
    assert str(replace(found, reason="Because.")) == (
        "tspipe: 1 micro-batch per call, backward in halves on stages [1]; simulated 32002.1 ms "
        "per step, 1 samples/s, bubble 0%\n"
        "rank  student       teacher       busy  state    memory\n"
        "0     1: atoms 4-7  1: atoms 4-7  100%  16.0 MB  16.4 MB\n"
        "1     0: atoms 0-3  0: atoms 0-3  100%  16.0 MB  16.3 MB\n"
        "memory  parameters  gradients  optimizer  teacher  activations  messages\n"
        "0       4.0 MB      4.0 MB     4.0 MB     4.0 MB   0.3 MB       0.1 MB\n"
        "1       4.0 MB      4.0 MB     4.0 MB     4.0 MB   0.3 MB       0.1 MB\n"
        "Because."
    )


def test_plans_of_older_versions_load() -> None:
    found = planned(EVEN, EVEN, link=(1e-3, 1e9))
    data = json.loads(found.to_json())
    for name in ("num_replicas", "speeds", "memory"):
        del data[name]
    for name in ("nodes", "inter_node_latency", "inter_node_bandwidth", "reduction"):
        del data["costs"][name]
    old = Plan.from_json(json.dumps(data))
    assert old == replace(found, memory=None)
    assert "activations" not in str(old)
    assert old.simulate(6).step_time == pytest.approx(found.step_seconds)


def test_ranks_that_differ_get_different_parts() -> None:
    cluster = Cluster(2, speeds=(3, 1))
    found = planned(EVEN, EVEN, cluster=cluster)
    # The last stage is on rank 0, the fast one.
    assert found.student_cuts == found.teacher_cuts == (0, 2, 8)
    assert found.bubble_ratio == pytest.approx(0, abs=1e-6)
    assert found.step_seconds == pytest.approx(2 * 4 * 2)
    # An independent teacher goes where there is time for it.
    apart = planned(
        network(1, 1), network(1, 1, 1), cluster=cluster, paired=False, num_calls=(1, 1)
    )
    assert apart.student_cuts == (0, 1, 2)
    assert apart.placement.teacher_ranks == (0,)


def test_the_memory_of_each_rank_counts() -> None:
    # 8 atoms of 4 MB; rank 0 holds the last stage.
    small = Cluster(2, memories=(13 * MB, 40 * MB))
    found = planned(EVEN, EVEN, cluster=small)
    assert found.student_cuts[1] == 5
    assert found.memory_bytes[0] <= 13 * MB < found.memory_bytes[1]
    with pytest.raises(PartitionError, match=r"rank 1 would need 24\.4 MB .* may hold 24\.0 MB"):
        planned(EVEN, EVEN, cluster=Cluster(2, memories=(9 * MB, 24 * MB)))


@pytest.mark.parametrize(
    ("num_ranks", "teacher", "num_microbatches"),
    [(2, 0.25, 8), (2, 4, 1), (8, 1, 16), (8, 4, 16)],
)
def test_one_view_gets_as_many_micro_batches_as_fill_the_bubble(
    num_ranks: int, teacher: float, num_microbatches: int
) -> None:
    def fine(seconds: float) -> NetworkProfile:
        forward = {1: seconds / 64, 64: seconds}
        backward = {size: 2 * time for size, time in forward.items()}
        return NetworkProfile(
            tuple(AtomProfile(f"layer{n}", forward, backward, forward, forward) for n in range(8))
        )

    constraints = {"num_calls": (1, 1), "batch_sizes": [64], "paired": False}
    found = planned(fine(1), fine(teacher), num_ranks=num_ranks, **constraints)
    assert found.num_microbatches == num_microbatches
    assert found.bubble_ratio == 0


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (1.0, 0.5, 2.0), (0.25, 1.0, 1.0)])
def test_unequal_ranks_get_the_best_of_all_cuts(num_ranks: int, speeds: tuple[float, ...]) -> None:
    student = network(1, 2, 1, 3, 1, 2, 1)
    cluster = Cluster(num_ranks, speeds=speeds[:num_ranks])
    found = planned(
        student, student, num_ranks=num_ranks, cluster=cluster, num_microbatches=4, split=False
    )
    workload = Workload(student, student, (2, 2), (32,), num_ranks=num_ranks, cluster=cluster)
    evaluator = Evaluator()
    best = min(
        evaluator.exact(Layout(workload, (0, *inner, 7), 4))
        for inner in combinations(range(1, 7), num_ranks - 1)
    )
    assert found.step_seconds <= 1.02 * best


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_two_ranks_get_about_the_best_of_all_cuts(data: st.DataObject) -> None:
    seconds = data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=7))
    student = network(*map(float, seconds))
    teacher = data.draw(st.sampled_from([None, student]))
    found = planned(student, teacher, num_microbatches=2, split=False)
    workload = Workload(student, teacher, (2, 2 * (teacher is not None)), (32,), num_ranks=2)
    evaluator = Evaluator()
    best = min(
        evaluator.exact(Layout(workload, (0, *inner, len(seconds)), 2))
        for inner in combinations(range(1, len(seconds)), 1)
    )
    assert found.step_seconds <= 1.02 * best


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_more_ranks_are_balanced(num_ranks: int) -> None:
    student = network(*[1.0, 2.0, 0.5, 1.5] * 6)
    found = planned(student, student, num_ranks=num_ranks)
    assert found.step_seconds < 1.15 * 2 * 4 * 30 / num_ranks
    assert found.placement.student_ranks[:num_ranks] == tuple(range(num_ranks))[::-1]
    assert found.placement.data_rank == num_ranks - 1


def test_asynchronously_a_batch_is_one_unit_and_a_rank_has_one_stage() -> None:
    student = network(1.0, 2.0, 1.0, 1.0, 2.0, 1.0)
    found = planned(student, None, schedule="1f1b", num_ranks=3)
    assert (found.num_microbatches, found.split) == (1, frozenset())
    assert found.pipeline.student.ranks == (2, 1, 0)
    assert found.bubble_ratio == pytest.approx(0.0, abs=0.15)
    assert found.simulate(6).num_ranks == 3
