from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_tspipe.cli.checking import DifferenceError, Record, compare
from lightning_tspipe.cli.main import main
from lightning_tspipe.cli.planning import recommended, staleness, table
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.step_profile import StepProfile
from tests.choosing import some_of
from tests.unit.cli.profiles import MB, step_profile

MODULE = """
import copy
import torch
from lightning.pytorch import LightningModule
from torch import nn

class Distillation(LightningModule):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            target = self.teacher(batch)
        loss = (self.student(batch) - target - 1).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.student.parameters())

def module_and_data():
    return Distillation(), [torch.randn(8, 8) for _ in range(3)]

def nothing():
    return None
"""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(step_profile().to_json())
    return path


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_a_profile_survives_json() -> None:
    for teacher in (True, False):
        before = step_profile(teacher=teacher)
        assert StepProfile.from_json(before.to_json()) == before
    # 8 atoms: weights, gradients, momentum and teacher.
    assert step_profile().state_bytes == 8 * 4 * MB


def test_plan_compares_the_schedules_and_saves_the_best(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "plan.json"
    assert run("plan", profile, "--devices", 4, "--link", "50GB/s", "--save", saved) == 0
    output, progress = capsys.readouterr()
    assert "planning tspipe ...\nplanning gpipe ...\n" in progress
    rows = {line.split()[-8] if line else "": line for line in output.splitlines()[1:4]}
    best = [line for line in rows.values() if line.startswith("*")]
    assert len(best) == 1
    assert " tspipe " in best[0]
    assert "1 update" in best[0]
    assert f'TSPipeStrategy(plan="{saved}")' in output
    plan = Plan.from_json(saved.read_text())
    assert (plan.schedule, plan.pipeline.num_ranks) == ("tspipe", 4)
    assert plan == step_profile().plan(4, link=(1.5e-4, 5e10))


@pytest.mark.slow
def test_plan_compares_the_schedules_of_windows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, saved = tmp_path / "profile.json", tmp_path / "plan.json"
    path.write_text(step_profile(24, teacher=False).to_json())
    assert run("plan", path, "--devices", 4, "--window", 16, "--save", saved) == 0
    lines = capsys.readouterr().out.splitlines()[1:6]
    bubbles = {}
    for line in lines:
        name, *_ = line.lstrip("* ").split()
        bubbles[name] = int(line.split("%")[0].split()[-1])
    assert bubbles.keys() == {"tspipe", "sequential", "1f1b", "interleaved", "zbv"}
    assert bubbles["1f1b"] > bubbles["interleaved"] > bubbles["zbv"]
    plan = Plan.from_json(saved.read_text())
    assert (plan.schedule, plan.window, plan.pipeline.data_rank) == ("zbv", 16, 0)
    assert plan.placement.student_ranks == (0, 1, 2, 3, 3, 2, 1, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--schedule", "zbv"), "say how many, as in --window 16"),
        (("--window", 0), "--window 0: must be at least 1"),
    ],
)
def test_windows_of_no_length(
    arguments: tuple[object, ...], words: str, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", profile, "--devices", 4, *arguments) != 0
    assert words in capsys.readouterr().err


def test_plan_with_stages_that_run_again(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "plan.json"
    options = ("--activation-checkpointing", "--save", saved)
    assert run("plan", profile, "--devices", 2, *options) == 0
    assert "activations of 8 atoms recomputed" in capsys.readouterr().out
    assert Plan.from_json(saved.read_text()).placement.recomputed == frozenset(range(8))


def test_a_faster_device_makes_links_matter_more(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = []
    for speed in (1, 1000):
        assert run("plan", profile, "--devices", 2, "--schedule", "gpipe", "--speed", speed) == 0
        (row,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("*"))
        times.append(float(row.split("s  ")[1].split()[0]))
    assert times[1] > times[0] / 1000


CLUSTER = (
    *("--nodes", 4, "--link", "300GB/s", "--latency", "5us"),
    *("--inter-node-link", "25GB/s", "--inter-node-latency", "20us"),
)


def test_plan_divides_many_devices(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "plan.json"
    arguments = ("--devices", 16, "--batch", 64, "--memory", "20MB", *CLUSTER, "--save", saved)
    assert run("plan", profile, *arguments) == 0
    output = capsys.readouterr().out
    plan = Plan.from_json(saved.read_text())
    replicas, ranks = plan.num_replicas, plan.pipeline.num_ranks
    assert replicas * ranks == 16
    assert ranks > 1
    assert re.search("schedule +replicas  stages", output)
    assert f"\n{replicas} replicas x {ranks} ranks, faster than " in output
    assert "; impossible: 16 x 1 (rank 0 would need " in output
    assert "memory  parameters  gradients  optimizer  teacher  activations" in output
    strategy = f'TSPipeStrategy(plan="{saved}")'
    assert f"Trainer(strategy={strategy}, devices=4, num_nodes=4) runs it" in output
    assert run("simulate", saved, "--width", 60) == 0


@pytest.mark.slow
def test_plan_for_devices_that_differ(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "plan.json"
    wishes = ("--speeds", "1,1,0.5,0.5", "--link", "300GB/s", "--latency", "5us", "--save", saved)
    assert run("plan", profile, "--devices", 4, *wishes) == 0
    free = Plan.from_json(saved.read_text())
    # Stage 0 is on the last rank: the slow ones come first.
    assert free.student_cuts == (0, 1, 2, 5, 8)
    assert "speeds 1, 1, 0.5, 0.5" in capsys.readouterr().out
    memories = ("--memories", "9MB,40MB,40MB,40MB")
    assert run("plan", profile, "--devices", 4, *wishes, *memories) == 0
    assert Plan.from_json(saved.read_text()).memory_bytes[0] <= 9 * MB < free.memory_bytes[0]


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (("--devices", "0"), "at least 1"),
        (("--devices", "9"), "Use devices=8 or fewer"),
        (("--devices", "16"), "Or divide the devices into several pipelines: --replicas auto"),
        (("--devices", "2", "--memory", "1MB"), "block"),
        (("--devices", "2", "--memory", "much"), "write '16GiB' or '800MB'"),
        (("--devices", "2", "--link", "fast"), "write '50GB/s' or '100Gbit/s'"),
        (("--devices", "2", "--latency", "soon"), "write '20us' or '1.5ms'"),
        (("--devices", "2", "--speed", "0"), "greater than 0"),
        (("--devices", "2", "--speeds", "fast"), "write '1,1,0.5,0.5'"),
        (("--devices", "2", "--speeds", "1,1,1"), "3 speeds for 2 devices"),
        (("--devices", "2", "--memories", "1GB,2GB,3GB"), "3 memories for 2 devices"),
        (("--devices", "2", "--memories", "1GB,much"), "write '16GiB' or '800MB'"),
        (("--devices", "8", "--nodes", "3"), "every node must have equally many"),
        (("--devices", "8", "--replicas", "3"), "1, 2, 4 and 8 are possible"),
        (("--devices", "8", "--replicas", "some"), "give 'auto', or a number of at least 1"),
        (("--devices", "8", "--replicas", "auto", "--state", "1MB"), "atom 'block0' alone needs"),
        (("--devices", "2", "--batch", "0"), "leaves some calls without any"),
        (("--devices", "2", "--inter-node-link", "fast"), "write '50GB/s' or '100Gbit/s'"),
    ],
)
def test_what_cannot_be_planned(
    arguments: tuple[str, ...], remedy: str, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", profile, *arguments) == 2
    captured = capsys.readouterr()
    assert remedy in captured.err
    assert "\ntspipe: " in f"\n{captured.err}"


@pytest.mark.parametrize(
    "arguments",
    [("plan", "{}", "--devices", "2"), ("simulate", "{}"), ("timeline", "{}")],
)
@pytest.mark.parametrize("content", [None, "{}", "no JSON"])
def test_files_that_are_something_else(
    arguments: tuple[str, ...],
    content: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    assert run(*(str(path) if word == "{}" else word for word in arguments)) == 2
    assert ("there is no file" if content is None else "not a ") in capsys.readouterr().err


def test_a_plan_simulates_what_it_says() -> None:
    made = step_profile().plan(3)
    timeline = made.simulate(8)
    assert timeline.step_time == pytest.approx(made.step_seconds, rel=1e-6)
    assert timeline.bubble_ratio == pytest.approx(made.bubble_ratio, abs=1e-6)
    with pytest.raises(ConfigurationError, match="at least 1"):
        made.simulate(0)


def test_of_equally_fast_schedules_the_one_without_staleness_is_recommended() -> None:
    exact = step_profile().plan(1, schedule="sequential")
    late = replace(exact, schedule="tspipe")
    assert (staleness(late), staleness(exact)) == (1, 0)
    assert recommended([late, exact]) is exact
    assert recommended([]) is None


def test_under_1f1b_the_first_stage_is_the_most_late() -> None:
    plan = step_profile().plan(3, schedule="1f1b", weights="pipedream")
    assert staleness(plan) == 2
    assert "2 updates" in table({"1f1b": plan}, plan)
    versions = dict(plan.memory.of_rank(2))["versions"]
    assert versions == 2 * plan.memory.gradients[2]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "distillation.py"
    path.write_text(MODULE)
    return path


def test_plan_measures_a_module(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "profile.json"
    arguments = ("--accelerator", "cpu", "--save-profile", saved)
    assert run("plan", script, "--devices", 2, *arguments) == 0
    told = capsys.readouterr()
    assert "* " in told.out
    assert "link between two devices: 7 GB/s, 200 µs per message (measured between two" in told.err
    profile = StepProfile.from_json(saved.read_text())
    assert profile.num_calls == (1, 1)
    assert profile.batch_sizes == (8,)
    assert profile.optimizer_bytes_per_parameter_byte == 2.0
    assert profile.student.num_atoms == 4


@pytest.mark.slow
@pytest.mark.distributed
def test_plan_measures_the_link_between_two_processes(script: Path, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "lightning_tspipe.cli", "plan", str(script)),
        *("--devices", "2", "--accelerator", "cpu"),
    ]
    done = subprocess.run(  # noqa: S603 - our own command
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"link between two devices: (\S+) GB/s, (\S+) µs .*measured", done.stderr)
    assert found is not None, done.stderr
    assert float(found[1]) > 0
    assert float(found[2]) > 0


@pytest.mark.distributed
@pytest.mark.parametrize(("num_microbatches", "code"), some_of([(1, 0), (2, 2)], slow=[(2, 2)]))
def test_check_compares_with_one_device(
    num_microbatches: int, code: int, script: Path, tmp_path: Path
) -> None:
    # On one device there are no other ranks, which a loss would wait for.
    gathers = "if dist.is_initialized():\n            dist.all_reduce(target)\n        loss ="
    text = f"from torch import distributed as dist\n{script.read_text()}".replace("loss =", gathers)
    # BatchNorm normalises each micro-batch by itself.
    script.write_text(text.replace("range(4)))", "range(4)), nn.BatchNorm1d(8))"))
    command = [
        *(sys.executable, "-m", "lightning_tspipe.cli", "check", str(script)),
        *("--steps", "3", "--microbatches", str(num_microbatches)),
    ]
    done = subprocess.run(  # noqa: S603 - our own command
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    rows = [line.split()[:2] for line in done.stdout.splitlines()]
    assert ["network", "kind"] in rows
    assert ["student", "trained"] in rows
    if code:
        assert "NOT the same: the gradients of student" in done.stderr
    else:
        assert done.stdout.rstrip().splitlines()[-2] == "the same"
        assert "weights after 3 steps" in done.stdout


def test_compare_names_the_first_difference() -> None:
    weights = {"a": torch.ones(3), "b": torch.ones(2)}
    same = Record([1.0, 2.0], weights)
    assert compare(same, same).endswith("the same")
    other = Record([1.0, 2.0], {**weights, "b": torch.tensor([1.0, 1.1])})
    with pytest.raises(DifferenceError, match=r"the weights of b differ by 1\.0e-01"):
        compare(same, other)
    with pytest.raises(DifferenceError, match="the losses of step 1 differ"):
        compare(same, Record([1.0, float("nan")], weights))
    with pytest.raises(DifferenceError, match="only one of the two runs has b"):
        compare(same, Record([1.0, 2.0], {"a": torch.ones(3)}))


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        ("{}:missing", "has no function missing()"),
        ("{}:nothing", "must return a LightningModule and its training data"),
        ("nowhere.py", "there is no file nowhere.py"),
    ],
)
def test_modules_that_cannot_be_loaded(
    target: str, remedy: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", target.format(script), "--devices", 2) == 2
    assert remedy in capsys.readouterr().err
