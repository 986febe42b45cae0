"""Who is where: the processes of a job, each with its host and its number there."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from lightning_tspipe.errors import ConfigurationError, TransportError
from lightning_tspipe.runtime.faults.local_processes import start_of, this_machine
from lightning_tspipe.runtime.faults.notes import Notes

_PAUSE = 0.02


@dataclass(frozen=True)
class Member:
    """One process of a job.

    Attributes:
        rank: Its rank.
        host: Name of its machine.
        machine: The same for processes that can see each other by their numbers.
        pid: Its number.
        started: When it started, in ticks; None: not known.
    """

    rank: int
    host: str
    machine: str
    pid: int
    started: int | None

    def __str__(self) -> str:
        return process_name(self.rank, self.pid, self.host)


def process_name(rank: int, pid: int, host: str = "") -> str:
    """A rank and its process, on this machine unless another one is named."""
    return f"rank {rank} (pid {pid} on {host or os.uname().nodename})"


class Members:
    """The processes of a job, as far as they have come.

    Args:
        rank: This rank.
        num_ranks: How many there are to be.
        notes: Where they say who they are.
    """

    def __init__(self, rank: int, num_ranks: int, notes: Notes) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.notes = notes
        host = os.uname().nodename
        self.this = Member(rank, host, this_machine(), os.getpid(), start_of(os.getpid()))
        self._known = {rank: self.this}

    def publish(self) -> None:
        """Say who this rank is.

        Raises:
            ConfigurationError: Another process is this rank.
        """
        if not self.notes.claim(f"member/{self.rank}", json.dumps(asdict(self.this))):
            other = self._read(self.rank)
            raise ConfigurationError(
                f"{self.this}: another process, {other or 'which has ended'}, is this rank of the "
                "job already. Two jobs must not have the same MASTER_ADDR and MASTER_PORT"
            )

    def find(self, rank: int) -> Member | None:
        """A rank's process; None if it has not come yet."""
        if rank not in self._known:
            found = self._read(rank)
            if found is None:
                return None
            self._known[rank] = found
        return self._known[rank]

    def name(self, rank: int) -> str:
        """A rank with its process, if that is known."""
        found = self._known.get(rank)
        return str(found) if found is not None else f"rank {rank}"

    def _read(self, rank: int) -> Member | None:
        text = self.notes.read(f"member/{rank}")
        return Member(**json.loads(text)) if text else None

    def missing(self) -> list[int]:
        """Ranks that have not come."""
        return [rank for rank in range(self.num_ranks) if self.find(rank) is None]

    def wait_for_all(self, seconds: float, has_failed: Callable[[], bool]) -> None:
        """Wait until all have come.

        Args:
            seconds: How long.
            has_failed: Whether nobody needs to come any more.

        Raises:
            TransportError: One has not, after so many seconds or since the job has failed.
        """
        deadline = time.monotonic() + seconds
        while missing := self.missing():
            if has_failed():
                raise TransportError(f"rank {', '.join(map(str, missing))} has not come")
            if time.monotonic() > deadline:
                ranks = ", ".join(map(str, missing))
                raise TransportError(
                    f"no word of rank {ranks} within {seconds:.0f} s of the start. If it has "
                    "failed, its output says why"
                )
            time.sleep(_PAUSE)
