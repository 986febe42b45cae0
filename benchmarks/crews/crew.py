"""The coordinator's side: starts a method's processes, gives them turns, ends them."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.crews.job import Job
from benchmarks.crews.messages import Asks, Failed, Message, Weighs
from benchmarks.crews.worker import work

NUM_WARMUP_STEPS = 2
"""Untimed steps at the start of each turn: caches, and a pipeline that has to fill again."""
START_SECONDS = 120.0
"""A method that hasn't fetched its first batch by then has failed."""
TURN_SECONDS = 300.0
"""The same for one turn."""
QUIET_SECONDS = 10.0
END_SECONDS = 3.0


class MethodError(RuntimeError):
    """A method's process raised, died or hung; the message says which and what it printed."""


@dataclass(slots=True)
class _Member:
    process: ForkServerProcess
    connection: Connection
    log: Path


def worker_context(program: str) -> ForkServerContext:
    """Processes forked from one that has imported everything: quick to start, and they share it.

    Args:
        program: The module that the jobs run.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([program])
    return context


class Crew:
    """The processes of one method. Use as a context manager: it ends them whatever happens.

    Args:
        job: What they do; rank and port are filled in.
        context: Starts them.

    Attributes:
        has_run: Whether there was a turn.
    """

    def __init__(self, job: Job, context: ForkServerContext) -> None:
        self.job = job
        self.has_run = False
        self._context = context
        self._members: list[_Member] = []
        self._askers: set[int] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="crew-")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def start(self) -> None:
        """Start all processes and wait until they sleep before their first batch.

        Raises:
            MethodError: One of them failed, or took too long.
        """
        job = replace(self.job, port=_free_port())
        for rank in range(job.num_ranks):
            ours, theirs = self._context.Pipe()
            log = Path(self._folder.name) / f"rank{rank}.log"
            process = self._context.Process(
                target=work, args=(replace(job, rank=rank), theirs, log), daemon=True
            )
            process.start()
            theirs.close()
            self._members.append(_Member(process, ours, log))
        self._collect(lambda: bool(self._askers), START_SECONDS)
        self._wait_until_quiet()

    def turn(self, num_steps: int, num_warmup: int = NUM_WARMUP_STEPS) -> float:
        """Run ``num_steps`` steps after a short warm-up; the others should be asleep.

        Args:
            num_steps: Timed steps.
            num_warmup: Untimed ones before them.

        Returns:
            Seconds that the timed steps took, on the slowest process that reads data.

        Raises:
            MethodError: A process failed, or took too long.
        """
        self.has_run = True
        durations: dict[int, float] = {}
        num_tokens = num_warmup + num_steps

        def note(rank: int, message: Message) -> None:
            if not isinstance(message, Asks):
                return
            if len(message.stamps) > num_steps:
                durations[rank] = message.stamps[-1] - message.stamps[-1 - num_steps]
            else:  # a rank that comes to its first batch only now
                self._members[rank].connection.send(num_tokens)

        for rank in self._askers:
            self._members[rank].connection.send(num_tokens)
        self._collect(lambda: self._askers <= durations.keys(), TURN_SECONDS, note)
        self._wait_until_quiet()
        return max(durations.values())

    def weigh(self) -> list[Weighs]:
        """What each rank holds.

        Raises:
            MethodError: A process failed, or took too long.
        """
        answers: dict[int, Weighs] = {}
        for member in self._members:
            member.connection.send(0)

        def note(rank: int, message: Message) -> None:
            if isinstance(message, Weighs):
                answers[rank] = message

        self._collect(lambda: len(answers) == len(self._members), TURN_SECONDS, note)
        return [answers[rank] for rank in range(len(self._members))]

    def cpu_seconds(self) -> float:
        """CPU time that the processes have used so far (0 where the system doesn't say)."""
        return sum(_cpu_seconds(member.process.pid) for member in self._members)

    def end(self) -> None:
        """End every process: ask, then insist. Nothing is left of them afterwards."""
        for member in self._members:
            member.process.kill()
        for member in self._members:
            member.process.join(END_SECONDS)
            member.connection.close()
        self._members.clear()
        self._folder.cleanup()

    def _collect(
        self,
        complete: Callable[[], bool],
        seconds: float,
        note: Callable[[int, Message], None] = lambda _rank, _message: None,
    ) -> None:
        """Read messages until ``complete``."""
        deadline = time.monotonic() + seconds
        ranks = {member.connection: rank for rank, member in enumerate(self._members)}
        while not complete():
            ready = wait(list(ranks), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise MethodError(f"no answer within {seconds:.0f} s\n{self._printed()}")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = ranks[connection]
                message = self._receive(connection, rank)
                if isinstance(message, Asks):
                    self._askers.add(rank)
                note(rank, message)

    def _receive(self, connection: Connection, rank: int) -> Message:
        try:
            message: Message = connection.recv()
        except EOFError:
            raise MethodError(f"rank {rank} died\n{self._printed()}") from None
        if isinstance(message, Failed):
            raise MethodError(f"rank {rank} failed\n{message.report}\n{self._printed()}")
        return message

    def _printed(self) -> str:
        """The ends of what the processes printed."""
        logs = [member.log for member in self._members if member.log.exists()]
        return "\n".join(f"[{log.stem}] {log.read_text(errors='replace')[-2000:]}" for log in logs)

    def _wait_until_quiet(self) -> None:
        """Wait until all processes sleep: a step's tail may still run on ranks without a loader."""
        deadline = time.monotonic() + QUIET_SECONDS
        used = self.cpu_seconds()
        num_quiet = 0
        while num_quiet < 2 and time.monotonic() < deadline:
            time.sleep(0.03)
            now = self.cpu_seconds()
            num_quiet = num_quiet + 1 if now - used < 0.003 else 0
            used = now


def _cpu_seconds(pid: int | None) -> float:
    try:
        nanoseconds = sum(
            int((task / "schedstat").read_text().split()[0])
            for task in Path(f"/proc/{pid}/task").iterdir()
        )
    except (OSError, ValueError, IndexError):  # not Linux, or the process is just ending
        return 0.0
    return nanoseconds / 1e9


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
