from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.ir.pipeline import NetworkLayout, Pipeline
from lightning_tspipe.planning.bounds import busy_seconds
from lightning_tspipe.planning.cluster import Cluster, Link
from lightning_tspipe.planning.layout import Layout
from lightning_tspipe.planning.planner import Evaluator, plan
from lightning_tspipe.planning.profile import AtomProfile, NetworkProfile
from lightning_tspipe.planning.search import without_teacher_at_loss
from lightning_tspipe.planning.ties import Tied
from lightning_tspipe.planning.workload import Workload
from lightning_tspipe.schedules.registry import build_step

MB = 1_000_000


def network(*seconds: float, result_at: int | None = None) -> NetworkProfile:
    """Atoms that take a second count per sample; atom n has n + 1 megabytes."""
    return NetworkProfile(
        tuple(
            AtomProfile(
                f"atom{n}",
                {1: s, 8: 8 * s},
                {1: 2 * s, 8: 16 * s},
                output_bytes_per_sample=100 + n,
                activation_bytes_per_sample=1000,
                parameter_bytes=(n + 1) * MB,
                trainable_bytes=(n + 1) * MB,
                result_bytes_per_sample=7 if n == result_at else 0,
            )
            for n, s in enumerate(seconds)
        )
    )


def test_prices_by_hand() -> None:
    student = network(1, 2, 3, result_at=0)
    teacher = NetworkProfile(student.atoms[:2])
    workload = Workload(
        student,
        teacher,
        num_ranks=2,
        num_calls=(2, 1),
        batch_sizes=(8,),
        optimizer_bytes_per_parameter_byte=2,
        action_overhead=0.5,
        update_seconds_per_byte=1e-6,
    )
    layout = Layout(workload, (0, 2, 3), num_microbatches=2)
    # The teacher ends inside the student's first stage, so it has one stage.
    assert layout.pipeline == Pipeline(
        2,
        NetworkLayout((1, 0), 2, 2, frozenset({0, 1})),
        NetworkLayout((1,), 1, 2, frozenset({0})),
        data_rank=1,
    )
    assert layout.teacher_cuts == (0, 2)
    costs = layout.costs
    first, last = costs.student
    assert (first.forward, first.backward, first.input_backward) == (12.5, 24.5, 12.5)
    # No tap is known in the last stage, so its output goes to the loss.
    sizes = [(stage.output_bytes, stage.result_bytes) for stage in (first, last)]
    assert sizes == [(4 * 101, 4 * 7), (0, 4 * 102)]
    assert costs.teacher[0].forward == 12.5
    assert costs.optimizer == (3.0, 3.0)
    assert costs.effects == (0.0, 3.0)
    # Rank 0 has the loss, which takes as long as ten actions that compute nothing.
    assert costs.loss == 5.0
    assert layout.busy == (3 + 5 + 4 * (12.5 + 24.5), 3 + 3 + 4 * (12.5 + 24.5) + 2 * 12.5)
    for other in (
        layout,
        replace(layout, split=frozenset({1})),
        replace(layout, split=frozenset({0, 1})),
    ):
        assert other.busy == busy_seconds(other.pipeline, other.costs, other.split)
        window = replace(other, workload=replace(other.workload, schedule="1f1b", window=4))
        expected = busy_seconds(window.pipeline, window.costs, window.split, 4)
        assert window.busy == pytest.approx(expected)
    # Rank 0 holds 3 MB with gradients and two moments, rank 1 the teacher's 3 MB too.
    assert layout.state_bytes == (12 * MB, 15 * MB)
    # To rank 0 come the results of both networks, to rank 1 gradients of result and activation.
    assert layout.memory.messages == (16 * 7 + 8 * 7, 16 * 7 + 16 * 101)
    held = 12 * MB + 16 * 1000 + 16 * 101, 15 * MB + 16 * 2000
    assert layout.memory_bytes == (held[0] + 24 * 7, held[1] + 16 * 108)


def test_what_the_memory_is_needed_for() -> None:
    student = network(1, 2, 3)
    teacher = NetworkProfile(student.atoms[:2])
    workload = Workload(
        student, teacher, (2, 1), (8,), num_ranks=2, optimizer_bytes_per_parameter_byte=2
    )
    layout = Layout(workload, (0, 2, 3), num_microbatches=2)
    use = layout.memory
    assert (use.parameters, use.gradients, use.optimizer, use.teacher) == (
        (3 * MB, 3 * MB),
        (3 * MB, 3 * MB),
        (6 * MB, 6 * MB),
        (0, 3 * MB),
    )
    assert use.activations == (16 * 1000 + 16 * 101, 16 * 2000)
    total = tuple(sum(size for _, size in use.of_rank(rank)) for rank in range(2))
    assert total == layout.memory_bytes
    # A teacher that is cut on its own counts where it is.
    apart = replace(workload, paired=False)
    assert Layout(apart, (0, 2, 3), 2, teacher_bounds=(0, 1, 2)).memory.teacher == (2 * MB, MB)


def test_devices_that_differ() -> None:
    workload = Workload(
        network(1, 1, 1),
        network(1, 1, 1),
        num_ranks=2,
        num_calls=(1, 1),
        batch_sizes=(8,),
        cluster=Cluster(2, speeds=(0.5, 2), memories=(9 * MB, 40 * MB)),
        action_overhead=0.5,
        update_seconds_per_byte=1e-6,
        memory_limit=30 * MB,
    )
    layout = Layout(workload, (0, 2, 3), num_microbatches=1)
    first, last = layout.costs.student
    # Rank 1 has the first stage and is fast; what an action costs besides is the same.
    assert (first.forward, first.backward) == (8 + 0.5, 16 + 0.5)
    assert (last.forward, last.backward) == (16 + 0.5, 32 + 0.5)
    assert [stage.forward for stage in layout.costs.teacher] == [8 + 0.5, 16 + 0.5]
    assert layout.costs.optimizer == (6.0, 1.5)
    assert layout.busy == (2 * 6 + 4 * 16 + 13 * 0.5, 2 * 1.5 + 4 * 8 + 3 * 0.5)
    assert workload.memory_limits == (9.0 * MB, 30.0 * MB)
    # Rank 0 would need 3 x 3 + 3 MB, and some for activations.
    assert layout.excess > 0
    assert Layout(workload, (0, 2, 3), 1).memory_bytes[0] > 9 * MB


def test_links_between_nodes_and_replicas() -> None:
    cluster = Cluster(8, Link(1e-6, 1e9), num_nodes=4, inter_node_link=Link(1e-3, 1e6), speeds=(1,))
    workload = Workload(
        network(1, 1, 1, 1), None, (1, 0), (4,), num_ranks=4, cluster=cluster, num_replicas=2
    )
    layout = Layout(workload, (0, 1, 2, 3, 4), 1)
    costs = layout.costs
    assert costs.nodes == (0, 0, 1, 1)
    assert (costs.inter_node_latency, costs.inter_node_bandwidth) == (1e-3, 1e6)
    # Two rounds of half the gradients; rank 0 has the last atom.
    expected = [2e-3 + size * MB / 1e6 for size in (4, 3, 2, 1)]
    assert costs.reduction == pytest.approx(expected)
    assert (
        replace(
            layout, workload=replace(workload, num_replicas=1, cluster=Cluster(4))
        ).costs.reduction
        == ()
    )
    with pytest.raises(ConfigurationError, match="2 replicas of 4 ranks need 8 devices"):
        _ = replace(workload, cluster=Cluster(4)).ranks


def test_folded_stages_share_their_rank() -> None:
    workload = Workload(network(1, 2, 3, 4), None, (1, 0), (8,), num_ranks=2)
    layout = Layout(workload, (0, 1, 3, 4), num_microbatches=1)
    assert layout.pipeline.student.ranks == (1, 0, 1)
    assert layout.pipeline.data_rank == 1
    assert layout.busy == (3.0 * 8 * (1 + 4), 3.0 * 8 * (2 + 3))
    assert layout.state_bytes == (3 * 5 * MB, 3 * 5 * MB)


def test_halves_are_priced_apart() -> None:
    atoms = tuple(
        AtomProfile("a", {1: 1.0}, {1: 2.0}, {1: 1.5}, {1: 1.0}, trainable_bytes=MB)
        for _ in range(2)
    )
    workload = Workload(NetworkProfile(atoms), None, (1, 0), (1,), num_ranks=2)
    whole = Layout(workload, (0, 1, 2), 1)
    halves = Layout(workload, (0, 1, 2), 1, frozenset({1}))
    assert whole.busy == (3.0, 3.0)
    assert halves.busy == (3.5, 3.0)


def test_an_independent_teacher_may_leave_ranks_out() -> None:
    teacher = network(1, 1)
    workload = Workload(network(1, 1), teacher, (1, 1), (8,), num_ranks=2, paired=False)
    for bounds, ranks, cuts in (
        ((0, 1, 2), (1, 0), (0, 1, 2)),
        ((0, 0, 2), (0,), (0, 2)),
        ((0, 2, 2), (1,), (0, 2)),
    ):
        layout = Layout(workload, (0, 1, 2), 1, teacher_bounds=bounds)
        assert layout.pipeline.teacher is not None
        assert layout.pipeline.teacher.ranks == ranks
        assert layout.teacher_cuts == cuts
        assert len(layout.costs.teacher) == len(ranks)


def test_uneven_batches_are_averaged() -> None:
    workload = Workload(network(1, 1), None, (2, 0), (7, 3), num_ranks=2)
    # Units of 4, 3, 2 and 1 samples.
    assert workload.units(2)["forward"] == (0.0, 2.5, 5.0)
    assert workload.unit_samples(2)[0] == 2.5


def test_fits() -> None:
    def fits(**limits: float) -> bool:
        workload = Workload(network(1, 1), None, (1, 0), (8,), num_ranks=2, **limits)  # type: ignore[arg-type]
        return not Layout(workload, (0, 1, 2), 1).excess

    assert fits()
    assert fits(state_limit=6 * MB, memory_limit=math.inf)
    assert not fits(state_limit=6 * MB - 1)
    assert fits(memory_limit=6 * MB + 8 * 1100)
    assert not fits(memory_limit=6 * MB + 8 * 1100 - 1)


@pytest.mark.parametrize(
    ("policy", "copies"),
    [("pipedream", (0, 1, 2)), ("2bw", (1, 1, 1)), ("pipeoptim", (0, 1, 1)),
     ("spectrain", (1, 1, 1)), ("synchronous", (0, 0, 0))],
)  # fmt: skip
def test_batches_and_versions_in_flight_need_memory(policy: str, copies: tuple[int, ...]) -> None:
    """Rank 2 holds stage 0, of 1 MB, and three batches of it."""
    workload = Workload(
        network(1, 1, 1), None, num_ranks=3, num_calls=(1, 0), batch_sizes=(8,),
        optimizer_bytes_per_parameter_byte=0,
    )  # fmt: skip
    one = Layout(workload, (0, 1, 2, 3), num_microbatches=1)
    late = replace(workload, schedule="1f1b", weights=policy)
    flying = Layout(late, one.student_cuts, num_microbatches=1)
    weights = (3 * MB, 2 * MB, 1 * MB)
    versions = tuple(n * size for n, size in zip(copies, weights, strict=True))
    assert flying.memory.versions == versions
    assert flying.state_bytes == tuple(
        a + b for a, b in zip(one.state_bytes, versions, strict=True)
    )
    kept = one.memory.activations
    assert flying.memory.activations == (kept[0], 2 * kept[1], 3 * kept[2])
    assert "versions" in dict(flying.memory.of_rank(2))
    short = replace(late, window=2)
    held = Layout(short, one.student_cuts, num_microbatches=1).memory.activations
    assert held == (kept[0], 2 * kept[1], 2 * kept[2])
    assert "versions" not in dict(one.memory.of_rank(2))


def test_the_teacher_runs_while_the_loss_is_computed() -> None:
    """A loss takes time: the other rank doesn't keep teacher's forwards for afterwards."""
    atoms = network(1e-9, 1e-9)
    workload = Workload(
        atoms, atoms, num_ranks=2, num_calls=(1, 1), batch_sizes=(8,), action_overhead=1e-4
    )
    layout = Layout(workload, (0, 1, 2), num_microbatches=4)
    step = build_step("tspipe", layout.pipeline, layout.costs, fresh=False, ahead=1)
    ops = "".join(action.op.value for action in step.ranks[1])
    assert ops == "EDDFFFFTTTTBBBBO"
    without = replace(layout.costs, loss=0.0)
    late = build_step("tspipe", layout.pipeline, without, fresh=False, ahead=1)
    assert "".join(action.op.value for action in late.ranks[1]) != ops


def test_a_loss_that_multiplies_is_work_and_memory_of_its_rank() -> None:
    student = network(1, 1, 1, 1, 1, 1)
    plain = Workload(
        student=student,
        teacher=None,
        num_ranks=2,
        num_calls=(1, 0),
        batch_sizes=(8,),
        optimizer_bytes_per_parameter_byte=2,
    )
    heads = replace(
        plain,
        loss_seconds_per_sample=6.0,
        loss_parameter_bytes=5 * MB,
        loss_trainable_bytes=2 * MB,
    )
    cuts = (0, 3, 6)
    one, other = (Layout(workload, cuts, num_microbatches=1) for workload in (plain, heads))
    assert other.costs.loss == 48
    assert [b - a for a, b in zip(one.busy, other.busy, strict=True)] == [48, 0]
    assert busy_seconds(other.pipeline, other.costs) == other.busy
    more = [b - a for a, b in zip(one.memory_bytes, other.memory_bytes, strict=True)]
    assert more == [(5 + 2 + 2 * 2 + 2) * MB, 0]  # and a gradient that is not added yet
    assert [plan(in_windows(w)).student_cuts for w in (plain, heads)] == [cuts, (0, 4, 6)]


def in_windows(workload: Workload) -> Workload:
    return replace(workload, schedule="1f1b", weights="synchronous", window=8)


def test_what_lies_with_the_loss_must_fit_beside_its_stage() -> None:
    workload = Workload(
        student=network(1, 1, 1, 1),
        teacher=None,
        num_ranks=2,
        num_calls=(1, 0),
        batch_sizes=(8,),
        optimizer_bytes_per_parameter_byte=0,
        loss_parameter_bytes=30 * MB,
    )
    assert plan(in_windows(workload)).student_cuts == (0, 2, 4)
    # The last two atoms have 3 + 4 MB, and gradients.
    assert plan(in_windows(replace(workload, memory_limit=43 * MB))).student_cuts == (0, 3, 4)
    with pytest.raises(PartitionError, match="rank 0 would need 38"):
        plan(in_windows(replace(workload, memory_limit=37 * MB)))


def test_what_is_tied_counts_once_for_a_rank() -> None:
    workload = Workload(
        student=network(1, 1, 1, 1),
        teacher=network(1, 1),
        num_ranks=2,
        num_calls=(1, 1),
        batch_sizes=(8,),
        paired=False,
        loss_parameter_bytes=MB + 7,
        loss_trainable_bytes=MB,
        optimizer_bytes_per_parameter_byte=2,
    )
    # The first atom's parameter is read by the last one and by the loss, too; one of the teacher's
    # lies with the loss.
    own = Tied("own", MB, MB, student=(0, 3), with_loss=True)
    other = Tied("other", 7, teacher=(1,), with_loss=True)

    def saved(num_ranks: int, cuts: tuple[int, ...], bounds: tuple[int, ...]) -> list[list[int]]:
        """Bytes by kind and rank that ties save."""
        apart = replace(workload, num_ranks=num_ranks)
        plain, tied = (
            Layout(each, cuts, 1, teacher_bounds=bounds).memory
            for each in (apart, replace(apart, tied=(own, other)))
        )
        kinds = "parameters", "gradients", "optimizer", "teacher"
        pairs = ((getattr(plain, kind), getattr(tied, kind)) for kind in kinds)
        return [[a - b for a, b in zip(*pair, strict=True)] for pair in pairs]

    assert saved(1, (0, 4), (0, 2)) == [[2 * MB + 7], [2 * MB], [4 * MB], [0]]
    assert saved(2, (0, 2, 4), (0, 2, 2)) == [[MB, 0], [MB, 0], [2 * MB, 0], [0, 0]]
    assert saved(2, (0, 2, 4), (0, 1, 2)) == [[MB + 7, 0], [MB, 0], [2 * MB, 0], [0, 0]]


def test_ties_of_a_student_whose_first_layers_freeze() -> None:
    tied = Tied("shared", MB, MB, (0, 2, 5), (), with_loss=True)
    assert tied.freezing(3) == Tied("shared", MB, MB, (2,), (0, 2), with_loss=True)
    assert tied.freezing(9) == Tied("shared", MB, MB, (), (0, 2, 5), with_loss=True)
    assert tied.freezing(0) == tied


def test_a_loss_works_before_stages_run_again() -> None:
    student = network(1, 1).recomputing(range(2))
    workload = Workload(
        student=student, teacher=None, num_ranks=1, num_calls=(1, 0), batch_sizes=(8,),
        loss_trainable_bytes=3,
    )  # fmt: skip
    again = 8 * 2 * 1000  # of all atoms
    for constant, each, more in ((again - 1, 0, 0), (again + 5, 0, 5), (5, again // 8, 5)):
        busy = replace(workload, loss_working_bytes=constant, loss_working_bytes_per_sample=each)
        found = [Layout(w, (0, 2), 1).memory.activations[0] for w in (workload, busy)]
        assert found[1] - found[0] == more


def test_no_teacher_stands_between_losses() -> None:
    """A layout without is among those that are simulated."""
    workload = in_windows(
        Workload(
            student=network(*[0.04] * 4),
            teacher=network(*[0.1] * 27),
            num_ranks=4,
            num_calls=(1, 1),
            batch_sizes=(1,),
            paired=False,
            loss_seconds_per_sample=0.8,
        )
    )
    layout = Layout(workload, (0, 1, 2, 3, 4), 1, teacher_bounds=(0, 9, 18, 26, 27))
    moved = without_teacher_at_loss(layout)
    assert moved is not None
    assert moved.teacher_bounds == (0, 9, 18, 27, 27)
    assert max(moved.busy) == pytest.approx(max(layout.busy))  # which says nothing of windows
    assert plan(workload).step_seconds <= min(map(Evaluator().exact, (layout, moved)))
    assert without_teacher_at_loss(moved) is None
    other = replace(layout, workload=replace(workload, schedule="zbv", _units={}))
    assert other.teacher_parts[0][2] == 0  # there the loss is where the first part is
    freed = without_teacher_at_loss(other)
    assert freed is not None
    assert freed.teacher_bounds == (0, 0, 18, 26, 27)
    full = replace(workload, memory_limit=max(layout.memory_bytes), _units={})
    assert without_teacher_at_loss(replace(layout, workload=full)) is None


def test_a_long_teacher_lets_the_student_pass_between_its_stages() -> None:
    """In windows with one stage of the student on a rank, and nowhere else."""
    workload = Workload(
        student=network(1, 1, 1, 1),
        teacher=network(*[2] * 12),
        num_ranks=2,
        num_calls=(1, 1),
        batch_sizes=(8,),
        paired=False,
    )

    def stages(**changed: Any) -> tuple[tuple[int, int, int], ...]:
        own = replace(in_windows(workload), **changed, _units={})
        cuts = (0, 1, 2, 3, 4) if own.schedule == "interleaved" else (0, 2, 4)
        return Layout(own, cuts, 1, teacher_bounds=(0, 5, 12)).teacher_parts

    # 12 seconds of the teacher, and 2 of the student, of which four times as many are too many.
    assert stages() == (
        (0, 1, 1), (1, 2, 1), (2, 4, 1), (4, 5, 1),
        (5, 7, 0), (7, 8, 0), (8, 10, 0), (10, 12, 0),
    )  # fmt: skip
    assert stages(teacher=network(*[0.25] * 12)) == ((0, 5, 1), (5, 12, 0))
    assert stages(schedule="interleaved") == ((0, 5, 1), (5, 12, 0))
    assert stages(schedule="tspipe", window=0, weights="pipeoptim") == ((0, 5, 1), (5, 12, 0))
    joined = workload.teacher.joining(range(11)) if workload.teacher else None
    assert stages(teacher=joined) == ((0, 5, 1), (5, 12, 0))
    best = plan(in_windows(workload))
    assert best.pipeline.teacher is not None
    assert best.pipeline.teacher.num_stages > 2
    assert best.teacher_cuts[-1] == 12
    assert "0-3: atoms 0-" in str(best)
