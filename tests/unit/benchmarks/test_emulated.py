from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.crews.crew import Crew, worker_context
from benchmarks.crews.job import Job
from benchmarks.emulated import sleeping
from benchmarks.emulated.outcome import Outcome, Report
from benchmarks.emulated.plans import simulated_seconds
from benchmarks.emulated.rows import Row
from benchmarks.emulated.runs import PROGRAM
from benchmarks.emulated.sleeping import Passes, SleepingStage
from benchmarks.emulated.world import emulated, work_seconds
from lightning_tspipe.planning.profile import AtomProfile, NetworkProfile
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.runtime.stages.split_backward import SplitBackward
from lightning_tspipe.simulation.cost import StageCost

COST = StageCost(
    forward=1.0, backward=3.0, input_backward=1.25, weight_backward=1.75, output_bytes=80
)


def profile(num_atoms: int = 4) -> StepProfile:
    atoms = tuple(
        AtomProfile(
            name=str(place),
            forward={1: 1.0, 8: 8.0},
            backward={1: 2.0, 8: 16.0},
            input_backward={1: 1.0, 8: 8.0},
            weight_backward={1: 1.0, 8: 8.0},
            output_bytes_per_sample=640,
            parameter_bytes=4,
            trainable_bytes=4,
        )
        for place in range(num_atoms)
    )
    network = NetworkProfile(atoms)
    return StepProfile(network, network, num_calls=(2, 2), batch_sizes=(8, 8), paired=True)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds: list[float] = []
    monkeypatch.setattr(sleeping.DEVICE, "occupy", seconds.append)
    return seconds


def test_an_emulated_step_has_the_wanted_length_and_the_same_proportions() -> None:
    assert work_seconds(profile()) == 2 * 4 * 8 * (1 + 2) + 2 * 4 * 8
    small = emulated(profile(), seconds=0.5, fraction=1 / 64)
    assert work_seconds(small) == pytest.approx(0.5)
    atom = small.student.atoms[0]
    assert atom.backward[8] == pytest.approx(2 * atom.forward[8])
    assert atom.output_bytes_per_sample == 10


def test_a_stage_sleeps_in_its_forward_and_in_both_halves_of_its_backward(
    slept: list[float],
) -> None:
    stage = SleepingStage(COST, num_weights=1)
    y = stage(torch.zeros(4, 3, requires_grad=True))
    assert (y.shape, slept) == ((4, 5), [1.0])
    y.backward(torch.ones_like(y))
    assert sorted(slept) == [1.0, 1.25, 1.75]


def test_the_halves_of_a_sleeping_backward_can_be_parted(slept: list[float]) -> None:
    stage = SleepingStage(COST, num_weights=1)
    x = torch.zeros(4, 3, requires_grad=True)
    split = SplitBackward([stage(x)], [x])
    (gradient,) = split.input_half([torch.ones(4, 5)])
    assert gradient is not None
    assert (gradient.shape, slept, stage.weight.grad) == ((4, 3), [1.0, 1.25], None)
    split.weight_half()
    assert slept == [1.0, 1.25, 1.75]
    assert stage.weight.grad is not None


def test_a_first_stage_sleeps_its_whole_backward_for_its_weights(slept: list[float]) -> None:
    y = SleepingStage(COST, num_weights=1)(torch.zeros(4, 3))
    y.backward(torch.ones_like(y))
    assert slept == [1.0, 3.0]


def test_figures_are_ratios_of_one_run() -> None:
    outcome = Outcome(Row("kd_a", "kd", ()), 8, work=16.0)
    outcome.emulated = {"tspipe": 2.5, "gpipe": 4.0, "sequential": 20.0}
    outcome.simulated = {"tspipe": 2.0, "gpipe": 4.0, "sequential": 20.0}
    report = Report(2.0, 1 / 64, [outcome], real={"byol": 0.9})
    assert report.complete
    assert report.figures == {
        "kd_a.8.tspipe_over_sequential": 8.0,
        "kd_a.8.tspipe_over_gpipe": 1.6,
        "kd_a.8.utilization": 0.8,
        "kd_a.8.simulated_over_emulated": 0.8,
        "kd.8.utilization": 0.8,
        "simulated_over_emulated": 1.0,
        "simulated_over_emulated_min": 0.8,
        "simulated_over_emulated_max": 1.0,
        "byol.simulated_over_real": 0.9,
        "simulated_over_real": 0.9,
    }
    assert "EMULATED" in report.text


@pytest.mark.distributed
@pytest.mark.slow
def test_two_emulated_devices_train(tmp_path: Path) -> None:
    plan = emulated(profile(), seconds=0.05, fraction=1.0).plan(2, num_microbatches=2)
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    job = Job(PROGRAM, "emulated", "tspipe", (("plan", str(file)),), 8, 2, rank=0, port=0)
    with Crew(job, worker_context(PROGRAM)) as crew:
        crew.start()
        assert crew.turn(3) / 3 > 0.025  # two devices cannot be faster than the work they share


def test_the_students_pass_begins_when_the_teachers_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, student = (Passes(tmp_path / "passes", num_units=2) for _ in range(2))
    events: list[str] = []

    def wait(_seconds: float) -> None:
        teacher.ended()
        events.append("waited")

    monkeypatch.setattr("benchmarks.emulated.sleeping.time.sleep", wait)
    for _ in range(4):
        student.begin()
        events.append("student")
    assert events == ["waited", "waited", "student", "student"] * 2


def test_each_network_passes_on_its_own_in_the_simulation_of_gpipe() -> None:
    # Two views in four micro-batches over four stages: 8 + 3 forwards of the teacher, as many of
    # the student, and of its backwards, which take twice as long: of 11 / 8 of the work.
    costs = emulated(profile(), seconds=4.0, fraction=0.0)
    plan = costs.plan(4, schedule="gpipe", num_microbatches=4, num_stages=4)
    assert simulated_seconds(plan, "gpipe") == pytest.approx(11 / 8)
    # With the student right behind the teacher, one of three fills is saved.
    assert simulated_seconds(plan, "gpipe_joined") == pytest.approx(11 / 8 - 3 / 8 / 4)
