from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.crews.crew import Crew, MethodError, worker_context
from benchmarks.crews.job import Job
from benchmarks.throughput.contest import PROGRAM, Contest, Length
from benchmarks.throughput.entries import Entry

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def job(method: str) -> Job:
    return Job(PROGRAM, "tiny", method, options=(), batch_size=16, num_ranks=1, rank=0, port=0)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def test_a_crew_takes_turns_and_is_gone_afterwards() -> None:
    with Crew(job("half"), worker_context(PROGRAM)) as crew:
        crew.start()
        assert crew.turn(3) > 0
        pids = [member.process.pid for member in crew._members]
        crew.turn(2)
        (weighs,) = crew.weigh()
        assert weighs.held is not None
        used = crew.cpu_seconds()
        time.sleep(0.2)
        assert crew.cpu_seconds() - used < 0.1  # asleep between turns
    assert pids
    assert not any(is_alive(pid) for pid in pids if pid is not None)


def test_a_method_that_raises_is_reported_with_its_traceback() -> None:
    with (
        Crew(job("no such method"), worker_context(PROGRAM)) as crew,
        pytest.raises(MethodError, match="KeyError: 'no such method'"),
    ):
        crew.start()


def test_a_contest_goes_on_without_a_method_that_fails() -> None:
    contest = Contest("tiny", 16, Length(num_rounds=2, num_steps=2), worker_context(PROGRAM))
    entries = [Entry("broken", "broken", num_ranks=1), Entry("half", "half", num_ranks=1)]
    broken, half = contest.run(entries)
    assert broken.failure is not None
    assert len(half.seconds) == 2
