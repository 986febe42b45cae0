"""The laboratory's own parts: what it draws is the same each time, and each check can fail."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

import lightning_tspipe  # noqa: F401 - registers its strategies
from lightning_tspipe.runtime.faults.local_processes import until
from tests.faults.lab import checks, drawing, striking, tables
from tests.faults.lab.checks import Seen, failures
from tests.faults.lab.drawing import Configuration, Draw, Fault, draw
from tests.faults.lab.experiment import (
    STOP_TIMEOUT,
    hurt,
    is_documented,
    largest_difference,
    start_and_end,
    unwanted,
)
from tests.faults.lab.jobs import Ended, descendants
from tests.faults.lab.running import groups, try_all
from tests.faults.lab.tables import Result
from tests.faults.lab.training import Task

LABORATORY = Path(__file__).with_name("laboratory.py")
MANY = [draw(7, number) for number in range(600)]


# Draws


def test_a_draw_is_a_function_of_seed_and_number() -> None:
    assert [draw(7, number) for number in (599, 3, 0)] == [MANY[599], MANY[3], MANY[0]]
    assert draw(8, 3) != MANY[3]
    assert MANY[3].command == "python tests/faults/laboratory.py --seed 7 --draw 3"


def test_draws_in_a_row_have_one_configuration() -> None:
    found = list(groups(7, range(2, 10)))
    assert [[drawn.number for drawn in group] for group in found] == [
        [2, 3], [4, 5, 6, 7], [8, 9],
    ]  # fmt: skip
    assert all(len({drawn.configuration for drawn in group}) == 1 for group in found)


def test_everything_is_drawn() -> None:
    configurations = [drawn.configuration for drawn in MANY]
    assert {drawn.fault.kind for drawn in MANY} == set(drawing.FAULTS)
    assert {drawn.fault.moment for drawn in MANY} == {*drawing.MOMENTS, "resume"}
    assert {drawn.launcher for drawn in MANY} == set(drawing.LAUNCHERS)
    assert {it.strategy for it in configurations} == set(drawing.STRATEGIES)
    assert {it.mode for it in configurations} == set(drawing.MODES)
    assert {it.num_ranks for it in configurations} == {1, 2, 3, 4}
    for name in ("num_stages", "validation", "accumulate", "caches", "sharded", "keeps",
                 "writes_meanwhile", "workers"):  # fmt: skip
        assert len({getattr(it, name) for it in configurations}) > 1, name
    assert any(drawn.is_cold for drawn in MANY)
    assert {drawn.fault.target for drawn in MANY} == {"rank", "parent"}


def test_every_registered_strategy_is_drawn() -> None:
    assert {name for name in StrategyRegistry if "tspipe" in name} == set(drawing.STRATEGIES)


def test_only_what_can_happen_is_drawn() -> None:
    for drawn in MANY:
        fault, it = drawn.fault, drawn.configuration
        assert fault.rank < it.num_ranks
        assert fault.moment != "repack" or it.repacks
        assert fault.moment != "validation" or it.validation != "none"
        assert fault.kind != "SIGSTOP" or it.num_ranks > 1
        assert fault.target == "rank" or drawn.launcher in drawing.HAVE_PARENT


@pytest.mark.parametrize("place", [p for places in striking.PATCHED.values() for p in places])
def test_what_is_patched_is_there(place: str) -> None:
    owner, name = striking.owner_of(place)
    assert callable(getattr(owner, name))


def test_what_is_shortened_is_there() -> None:
    assert getattr(*striking.owner_of(striking.START)) > timedelta(seconds=STOP_TIMEOUT)


def test_a_task_is_read_as_it_was_written(tmp_path: Path) -> None:
    task = Task(MANY[5].configuration, "slurm", MANY[5].fault, checkpoint="a.ckpt")
    task.write(tmp_path / "task.json")
    assert Task.read(tmp_path / "task.json") == task


# Checks: each accepts what is right, and refuses what is not

LINE = "The job ends, because rank 1 (pid 7 on node7) was killed by SIGKILL in training step 8"
TRACE = "Traceback (most recent call last):\n"


def seen_of(kind: str = "SIGKILL", launcher: drawing.Launcher = "popen", **changes: object) -> Seen:
    """A kill of rank 1, as it should be."""
    fault = Fault(kind, "step", rank=1)
    it = Draw(1, 2, Configuration("plain", "no teacher", "tspipe", 2), launcher, fault)
    name = "parent" if launcher in drawing.HAVE_PARENT else "rank 0"
    ended = Ended({name: 1}, LINE, was_struck=True, struck_rank=1, seconds=3.0)
    resumed = Ended({name: 0}, "")
    seen = Seen(it, ended, checkpoint="last.ckpt", resumed=resumed, resumed_difference=0.0)
    for key, value in changes.items():
        setattr(seen.ended if hasattr(seen.ended, key) else seen, key, value)
    return seen


def test_what_is_right_passes() -> None:
    assert not failures(seen_of())


@pytest.mark.parametrize(
    ("check", "changes"),
    [
        ("the fault happened", {"was_struck": False, "codes": {"rank 0": 0}, "difference": 0.0}),
        ("all ended in time", {"left": ["process 7: python script.py"]}),
        ("all ended in time", {"resumed": Ended({"rank 0": None}, left=["process 8"])}),
        ("exit codes", {"codes": {"rank 0": 0}}),
        ("exit codes", {"resumed": Ended({"rank 0": 1}, "refused")}),
        ("one cause", {"output": f"{LINE}\n{TRACE}a\n"}),
        ("one cause", {"output": "rank 0 stops too: connection closed by rank 1"}),
        ("one cause", {"output": LINE.replace("rank 1", "rank 0")}),
        ("one cause", {"output": f"{LINE}\n{LINE.replace('rank 1', 'rank 0')}"}),
        ("nothing left", {"files": ["job/tmp/pymp-1"]}),
        ("checkpoints load", {"broken": ["last.ckpt: BadZipFile"]}),
        ("results equal", {"resumed_difference": 2e-12}),
        ("results equal", {"resumed_difference": math.inf}),
        ("results equal", {"resumed_difference": None}),
    ],
)
def test_each_check_can_fail(check: str, changes: dict[str, object]) -> None:
    assert set(failures(seen_of(**changes))) == {check}


@pytest.mark.parametrize(("place", "rank", "is_right"), [
    ("script", 1, True), ("script", 0, False), ("script", None, False), ("step", 1, False),
])  # fmt: skip
def test_torchrun_may_tell_of_a_script_that_fails_by_itself(
    place: str, rank: int | None, is_right: bool
) -> None:
    seen = seen_of("exception", "torchrun", checkpoint="", resumed=None, resumed_difference=None)
    seen.draw = replace(seen.draw, fault=replace(seen.draw.fault, place=place))
    told = f"Root Cause (first observed failure):\n[0]:\n  host : a\n  rank      : {rank} (local"
    seen.ended.output = f"{TRACE}{striking.TEXT}\n{TRACE}a\n{told if rank is not None else ''}"
    assert ("one cause" in failures(seen)) != is_right


def test_one_traceback_is_the_cause_and_two_are_not() -> None:
    good = seen_of("exception", output=f"{TRACE}ValueError: {striking.TEXT}\n{LINE}")
    assert not failures(good)
    good.ended.output += TRACE
    assert set(failures(good)) == {"one cause"}
    assert set(failures(seen_of("exception", output=LINE))) == {"one cause"}
    good.draw = replace(good.draw, launcher="torchrun")  # which has one of its own
    assert "one cause" not in failures(good)


@pytest.mark.parametrize(
    ("code", "launcher", "is_right"),
    [
        (143, "popen", True), (1, "popen", False), (-15, "popen", False), (0, "popen", False),
        (143, "fork", True), (1, "fork", False), (1, "torchrun", True),
    ],
)  # fmt: skip
def test_sigterm_has_its_code(code: int, launcher: drawing.Launcher, is_right: bool) -> None:
    seen = seen_of("SIGTERM", launcher, output="all ranks stop after this batch")
    seen.ended.codes = dict.fromkeys(seen.ended.codes, code)
    assert ("exit codes" not in failures(seen)) == is_right


@pytest.mark.parametrize("kind", drawing.HARMLESS)
def test_after_what_is_harmless_the_run_is_complete(kind: str) -> None:
    good = seen_of(kind, codes={"rank 0": 0}, output="", resumed=None, difference=0.0)
    assert not failures(good)
    good.difference = 1e-9
    good.ended.codes = {"rank 0": 1}
    assert set(failures(good)) == {"exit codes", "results equal"}


def test_damage_is_refused_by_name_or_does_no_harm() -> None:
    refused = f"{TRACE}CheckpointError: 'last.ckpt' is not a complete checkpoint"
    for kind in drawing.DAMAGES:
        good = seen_of(kind, was_struck=False, output=refused)
        good.draw = replace(good.draw, fault=Fault(kind, "resume"))
        assert not failures(good)
        silent = replace(good, difference=1e-3, ended=Ended({"rank 0": 0}))
        assert "results equal" in failures(silent)
        unnamed = replace(good, ended=Ended({"rank 0": 1}, f"{TRACE}EOFError"))
        assert set(failures(unnamed)) == {"one cause"}
        harmless = replace(silent, difference=0.0, resumed=None)  # a byte that nothing reads
        assert ("exit codes" in failures(harmless)) == (kind == "truncated")


def test_of_two_jobs_the_other_one_is_complete() -> None:
    good = seen_of("two jobs", other=Ended({"rank 0": 0}), other_difference=0.0)
    assert not failures(good)
    good.other = Ended({"rank 0": 1})
    good.other_difference = None
    assert set(failures(good)) == {"exit codes", "results equal"}


@pytest.mark.slow
def test_what_nobody_could_remove_the_next_job_does(tmp_path: Path) -> None:
    base = tmp_path / f"lightning-tspipe-{os.getuid()}"
    base.mkdir(mode=0o700)
    left = ["work-a", "job-launch-b"]
    (base / left[0]).mkdir()
    (base / left[1]).write_text("work-a\n")
    start_and_end(tmp_path)
    assert {path.name for path in base.iterdir()} == {".lock"}
    files = [f"job/tmp/{base.name}/{name}" for name in left]
    alone = seen_of(files=files, left_to_next=files, have_met=False)
    assert "nothing left" not in failures(alone)
    alone.ended.have_met = True  # then the other ranks knew of it, if there were others
    assert "nothing left" in failures(alone)
    single = replace(alone.draw, configuration=replace(alone.draw.configuration, num_ranks=1))
    assert "nothing left" not in failures(replace(alone, draw=single))
    assert "nothing left" in failures(seen_of(files=files, have_met=False))


def test_differences_are_seen() -> None:
    first = {"a": [torch.ones(2), 1], "b": {"c": torch.zeros(0)}}
    second = {"a": [torch.ones(2), 1], "b": {"c": torch.zeros(0)}}
    assert largest_difference(first, second) == 0
    second["a"] = [torch.ones(2) + 1e-3, 1]
    assert largest_difference(first, second) == pytest.approx(1e-3, rel=1e-4)
    assert largest_difference(torch.ones(2), torch.tensor([1.0, math.nan])) == math.inf
    assert largest_difference(torch.ones(2), torch.ones(3)) == math.inf
    assert largest_difference({"a": 1}, {"b": 1}) == math.inf
    assert largest_difference([1], [1, 2]) == math.inf


def test_files_that_nobody_asked_for_are_seen(tmp_path: Path) -> None:
    asked = ("script.py", "saved/a.ckpt", "tmp/torchelastic_1/log", "tmp/hl8et5nx")
    left = {"tmp/mine", "tmp/lightning-tspipe-0/job", "saved/.b.ckpt.part", "core"}
    for name in (*asked, *left):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert {str(path.relative_to(tmp_path)) for path in unwanted(tmp_path)} == left


def test_a_process_has_ended_when_all_its_threads_have() -> None:
    """Before that its files and sockets are open, though its first thread is gone."""
    code = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])  # noqa: S603 - ours
    stat = Path(f"/proc/{process.pid}/stat")
    until(lambda: stat.read_text().rpartition(") ")[2].startswith("Z"), 30.0)
    assert stat.read_text().rpartition(") ")[2].startswith("Z")
    assert (os.getpid(), process.pid) in descendants(os.getpid())
    process.kill()
    process.wait()
    assert (os.getpid(), process.pid) not in descendants(os.getpid())


def test_what_a_killed_process_may_leave_is_as_documented() -> None:
    assert is_documented("job/saved/.newest.ckpt.part")
    assert is_documented("/dev/shm/sem.loky-13925-9s09wybd")  # noqa: S108
    assert not is_documented("/dev/shm/sem.mp-13925")  # noqa: S108 - of our own processes
    assert not is_documented("job/saved/newest.ckpt")


@pytest.mark.parametrize("how", drawing.DAMAGES)
@pytest.mark.parametrize("where", [0.0, 0.5, 0.999])
def test_a_file_is_damaged_in_one_place(how: str, where: float, tmp_path: Path) -> None:
    whole = bytes(range(100))
    (tmp_path / "a").write_bytes(whole)
    hurt(tmp_path / "a", how, where)
    found = (tmp_path / "a").read_bytes()
    place = int(where * 100)
    assert found[:place] == whole[:place]
    if how == "truncated":
        assert len(found) == place
    else:
        assert [i for i in range(100) if found[i] != whole[i]] == [place]


# The report


def result(number: int, fault: str = "SIGKILL", moment: str = "step", **kwargs: str) -> Result:
    wrong = {"exit codes": "0"} if kwargs.pop("wrong", "") else {}
    return Result(number, "text", "command", fault, moment, 1.0, wrong, **kwargs)


def test_the_table_counts_what_was_tried() -> None:
    results = [
        result(0), result(1, wrong="yes"), result(2, moment="any"), result(3, "clock jump"),
        result(4, "full disk", not_possible="needs root"),
    ]  # fmt: skip
    assert tables.as_text(tables.rows(results)).splitlines() == [
        "survived of tried  step    any     all",
        "SIGKILL            1 of 2  1 of 1  2 of 3",
        "clock jump         1 of 1          1 of 1",
        "all                2 of 3  1 of 1  3 of 4",
    ]
    assert tables.as_markdown([["a", "b"], ["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"


def test_the_table_goes_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    tables.put_into(page, "new")
    tables.put_into(page, "newer")
    assert page.read_text() == f"before\n{tables.BEGIN}\nnewer\n{tables.END}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="no place for the table"):
        tables.put_into(page, "new")


def test_the_guide_has_a_place_for_the_table() -> None:
    guide = Path(__file__).parents[2] / "docs/guide/faults.md"
    assert tables.BEGIN in guide.read_text()
    assert tables.END in guide.read_text()


def _quickly(group: list[Draw], folder: Path, tell: object) -> None:
    for drawn in group:
        wrong = {"a check": "failed"} if drawn.number == 5 else {}
        assert callable(tell)
        tell(replace(result(drawn.number), failures=wrong))


def test_all_draws_are_told_and_time_is_kept(tmp_path: Path) -> None:
    far = time.monotonic() + 60
    waiting = groups(7, range(10))
    found = list(try_all(waiting, tmp_path, num_jobs=2, deadline=far, function=_quickly))
    assert sorted(one.number for one in found) == list(range(10))
    assert [one.number for one in found if not one.survived] == [5]
    late = try_all(groups(7, range(10)), tmp_path, num_jobs=2, deadline=0.0, function=_quickly)
    assert list(late) == []


def laboratory(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(  # noqa: S603 - our own script
        [sys.executable, str(LABORATORY), *words, "--folder", str(folder)],
        capture_output=True, text=True, env=environment, cwd=folder, check=False,
    )  # fmt: skip


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder below which there is room for the name of a socket, 107 characters in all."""
    with tempfile.TemporaryDirectory(prefix="laboratory-") as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_few_draws(short: Path) -> None:
    """Through all of it; the draws of one group, and of another."""
    file = short / "results.json"
    done = laboratory("--seed", "1", "--first", "38", "--draws", "3", "--json", str(file),
                      folder=short)  # fmt: skip
    results = json.loads(file.read_text())
    assert [one["number"] for one in results] == list(range(38, 41)), done.stdout
    assert done.returncode == 0, done.stdout
    assert "3 of 3 survived" in done.stdout
    assert checks.limits() in done.stdout
    assert not list(short.glob("group-*"))  # nothing is kept of what survived
