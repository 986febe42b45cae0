"""Who is found to have failed: with processes that are made up, and a clock that stands still."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lightning_tspipe.errors import ConfigurationError, TransportError
from lightning_tspipe.runtime.faults import rendezvous as module
from lightning_tspipe.runtime.faults.failures import PERIOD, Failures, next_of_another_machine
from lightning_tspipe.runtime.faults.notes import FolderNotes
from lightning_tspipe.runtime.faults.rendezvous import Job, Member

TIMEOUT = 8.0


class Process:
    """Stands for a neighbour."""

    def __init__(self, pid: int, _started: int | None = None) -> None:
        self.pid = pid
        self.has_ended = self.is_stopped = False
        self.signal = "SIGKILL"

    def how_it_ended(self) -> str:
        return f"was killed by {self.signal}"


class Ranks:
    """A job of which this process is rank 0; the others are made up."""

    def __init__(
        self, folder: Path, machines: tuple[str, ...], children: dict[int, int] | None = None
    ) -> None:
        self.job = Job(0, len(machines), FolderNotes(folder), folder)
        self.job.publish()
        self.notes = self.job.notes
        self.machines = machines
        for rank in range(1, len(machines)):
            self.join(rank)
        self.now = 0.0
        self.failures = Failures(self.job, TIMEOUT, clock=lambda: self.now)
        self.job.children = {rank: Process(pid) for rank, pid in (children or {}).items()}  # type: ignore[misc]

    def join(self, rank: int) -> None:
        machine = self.job.this.machine if self.machines[rank] == "here" else self.machines[rank]
        member = replace(self.job.this, rank=rank, pid=1000 + rank, machine=machine)
        self.notes.claim(f"member/{rank}", json.dumps(asdict(member)))

    def look(self, seconds: float = 0.0) -> Any:
        """Look now, and all the time for so many seconds; what was found."""
        found = self.failures.look()
        until = self.now + seconds
        while found is None and self.now < until:
            self.now += PERIOD
            found = self.failures.look()
        return found

    def process(self, rank: int) -> Any:
        return self.job.neighbour(rank)


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Neighbour", Process)


def test_one_that_has_ended_is_found_at_once(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, ("here", "here", "here"))
    (tmp_path / "phase-2").write_text("training step 7   ")
    assert ranks.look() is None
    ranks.process(2).has_ended = True
    found = ranks.look()
    assert found.rank == 2
    assert found.what.startswith("rank 2 (pid 1002 on ")
    assert found.what.endswith("was killed by SIGKILL in training step 7")
    assert "memory" in found.remedy


def test_who_was_ended_by_the_launcher_is_not_why(tmp_path: Path) -> None:
    """It ends the others when one has failed, by SIGTERM and at once."""
    ranks = Ranks(tmp_path, ("here", "here", "here"))
    for rank, signal in ((1, "SIGTERM"), (2, "SIGKILL")):
        ranks.process(rank).has_ended, ranks.process(rank).signal = True, signal
    assert ranks.look().rank == 2
    ranks.notes.leave("run-0/over/2")
    found = ranks.look()
    assert found.rank == 1
    assert "was killed by SIGTERM" in found.what


def test_who_was_ended_before_all_have_met_is_told_by_the_launcher(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, ("here", "here"))
    ranks.job.num_ranks = 3
    ranks.process(1).has_ended, ranks.process(1).signal = True, "SIGTERM"
    assert ranks.look(100) is None
    ranks.process(1).signal = "SIGKILL"
    assert ranks.look().rank == 1


def test_who_was_ended_before_all_have_met_is_told_by_its_own_launcher(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, ("here",), children={1: 1001})
    ranks.job.num_ranks = 2
    assert ranks.look(100) is None
    ranks.process(1).has_ended, ranks.process(1).signal = True, "SIGTERM"
    assert re.match(r"rank 1 \(pid 1001 on \S+\) was killed by SIGTERM", ranks.look().what)


def test_one_that_is_done_may_end(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, ("here", "here"))
    ranks.process(1).has_ended = True
    ranks.notes.leave("run-0/over/1")
    assert ranks.look(100) is None


def test_one_that_is_stopped_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, ("here", "here"))
    ranks.look()
    ranks.process(1).is_stopped = True
    assert ranks.look(TIMEOUT - 2 * PERIOD) is None
    found = ranks.look(3 * PERIOD)
    assert found.victim is ranks.process(1)
    expected = r"rank 1 \(pid 1001 on \S+\) was stopped \(.*\) in the start-up and the others"
    assert re.match(expected, found.what)


def test_one_that_is_stopped_is_why_somebody_has_waited_in_vain(tmp_path: Path) -> None:
    """Before its own time is up, since that one began to wait before it was stopped."""
    ranks = Ranks(tmp_path, ("here", "here"))
    ranks.look()
    ranks.process(1).is_stopped = True
    assert ranks.look(PERIOD) is None
    ranks.failures.expect_no_more()
    assert ranks.look(2 * PERIOD).victim is ranks.process(1)


def test_one_that_goes_on_in_time_is_not(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, ("here", "here"))
    for _ in range(4):
        ranks.process(1).is_stopped = True
        assert ranks.look(TIMEOUT - 2 * PERIOD) is None
        ranks.process(1).is_stopped = False
        assert ranks.look(PERIOD) is None


def test_a_job_that_was_halted_as_a_whole_goes_on(tmp_path: Path) -> None:
    """Ctrl-Z, an hour, and fg: this rank goes on before the other one."""
    ranks = Ranks(tmp_path, ("here", "here"))
    ranks.look()
    ranks.process(1).is_stopped = True
    ranks.look(PERIOD)
    ranks.now += 3600
    assert ranks.look() is None


# Other machines


def test_signs_of_life_are_left_and_looked_for(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, ("here", "there"))
    for beat in range(5):
        ranks.notes.leave("beat/1", f"{beat} training step 3")
        assert ranks.look(TIMEOUT - PERIOD) is None
    assert (ranks.notes.read("beat/0") or "").partition(" ")[0].isdigit()
    found = ranks.look(2 * TIMEOUT)
    assert found.rank == 1
    assert "has given no sign of life for 8 s, since training step 3" in found.what


def test_one_that_is_done_may_be_silent(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, ("here", "there"))
    ranks.notes.leave("run-0/over/1")
    assert ranks.look(100) is None


def test_a_store_that_is_gone_is_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(tmp_path, ("here", "there"))

    def fail(_name: str) -> str:
        raise TransportError("the store that connects the ranks did not answer within 8 s")

    monkeypatch.setattr(ranks.notes, "read", fail)
    assert ranks.look(TIMEOUT).rank == 0


def test_each_machine_looks_after_the_next_one() -> None:
    def member(rank: int, machine: str) -> Member:
        return Member(rank, machine, machine, rank, None)

    members = [member(rank, "abc"[rank // 2]) for rank in range(6)]
    targets = [next_of_another_machine(members, this) for this in members]
    assert [t.rank for t in targets if t is not None] == [2, 2, 4, 4, 0, 0]
    assert next_of_another_machine(members[:2], members[0]) is None


def test_two_processes_can_not_be_one_rank(tmp_path: Path) -> None:
    Job(1, 2, FolderNotes(tmp_path)).publish()
    with pytest.raises(ConfigurationError, match="already has this rank in the job"):
        Job(1, 2, FolderNotes(tmp_path)).publish()


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    job = Job(0, 3, FolderNotes(tmp_path))
    job.publish()
    Job(2, 3, FolderNotes(tmp_path)).publish()
    with pytest.raises(TransportError, match="rank 1 did not join within 0 s of the start"):
        job.wait_for_all(0.1, lambda: False)
    with pytest.raises(TransportError, match="rank 1 has not joined"):
        job.wait_for_all(60, lambda: True)
    Job(1, 3, FolderNotes(tmp_path)).publish()
    job.wait_for_all(0.1, lambda: True)
