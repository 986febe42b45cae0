"""Looking after the other ranks: has one ended without a word, is one stopped, is one silent?

::

    same machine      the system is asked        ended: at once      stopped: after ``timeout``
    other machines    a sign of life in the      silent: after 20 s, or ``timeout``
                      notes, every 2 s           (each looks after one rank of the next machine)

Whatever connects the ranks, and whoever waits for whom there: nothing of this waits for a rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from lightning_tspipe.errors import TransportError
from lightning_tspipe.runtime.faults.local_processes import Neighbour
from lightning_tspipe.runtime.faults.members import Member, process_name
from lightning_tspipe.runtime.faults.parents import Parent
from lightning_tspipe.runtime.faults.phases import HERE

if TYPE_CHECKING:
    from lightning_tspipe.runtime.faults.rendezvous import Job

PERIOD = 0.5
_SILENCE = 20.0
_A_MOMENT = 1.0
_BEAT_EVERY = 2.0


@dataclass(frozen=True)
class Found:
    """A rank that can't go on.

    Attributes:
        what: Which, and what became of it.
        remedy: What to do.
        rank: Its rank; None: it is none, but has started them.
        victim: It is to be ended, since it can't end by itself.
    """

    what: str
    remedy: str
    rank: int | None = None
    victim: Neighbour | None = None


class Lasting:
    """For how long something has been so, in time during which this process itself has run.

    A job that was halted as a whole, or a machine that slept, is not taken for one rank's failure:
    of a long time between two looks only a little counts.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()
        self._seconds = 0.0

    def seconds(self, *, so: bool) -> float:
        """At each look, whether it is so; for how long it has been."""
        now = self._clock()
        self._seconds = self._seconds + min(now - self._last, 2 * PERIOD) if so else 0.0
        self._last = now
        return self._seconds


class Patrol:
    """Looks after the other ranks of a job, in one of its runs.

    Args:
        job: The ranks.
        run: Prefix of the notes of this run.
        timeout: After how many seconds a rank that is stopped is given up.
        children: Processes that this one started for other ranks.
        clock: Seconds.
    """

    def __init__(
        self,
        job: Job,
        run: str,
        timeout: float,
        children: Mapping[int, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._members = job.members
        self._run = run
        self._timeout = timeout
        self._clock = clock
        self._children = {rank: Neighbour(pid) for rank, pid in children.items()}
        self._neighbours: dict[int, Neighbour] = {}
        self._stopped: dict[int, Lasting] = {}
        self._silent = Lasting(clock)
        self._next_beat = 0.0
        self._num_beats = 0
        self._heard = ""
        self._parent = Parent()
        # A rank that fails looks around too, to know whether another one has failed before.
        # It may be in the middle of that when a signal has it look again.
        self._alone = threading.RLock()

    def expect_no_more(self) -> None:
        """This rank has waited in vain: one that is stopped now is why, and needs no more time."""
        self._timeout = min(self._timeout, _A_MOMENT)

    def look(self) -> Found | None:
        """The first rank that is found to have failed."""
        with self._alone, suppress(OSError):  # out of files, say: the next time then
            try:
                return self._look()
            except TransportError as error:
                remedy = "Look for its output, and for what the launcher says of it"
                what = f"{self._members.name(0)} serves the store no more: {error}"
                return Found(what, remedy, 0)
        return None

    def _look(self) -> Found | None:
        near = {rank: self.neighbour(rank) for rank in self._others()}
        # By SIGTERM a launcher ends the others when one has failed: that one comes first.
        mine = self._children if self._job.launcher_knows_more else near
        for is_ordered, ranks in ((False, near), (True, mine)):
            for rank in ranks:
                neighbour = near[rank]
                if neighbour is not None and _was_ordered(neighbour) == is_ordered:
                    found = self._if_ended(rank, neighbour) or self._if_stopped(rank, neighbour)
                    if found is not None:
                        return found
        return self._if_parent_ended() or self._if_silent()

    def _others(self) -> list[int]:
        return [r for r in range(self._members.num_ranks) if r != self._members.rank]

    def neighbour(self, rank: int) -> Neighbour | None:
        """The process of a rank that is on this machine; None: it is not, or has not come yet."""
        if rank not in self._neighbours:
            member = self._members.find(rank)
            if member is None or not self._is_near(member):
                return self._children.get(rank) if member is None else None
            self._neighbours[rank] = Neighbour(member.pid, member.started)
        return self._neighbours[rank]

    def _is_near(self, member: Member) -> bool:
        return member.machine == self._members.this.machine

    def is_over(self, rank: int) -> bool:
        """Whether a rank has said that it needs nobody in this run any more."""
        return self._job.notes.read(f"{self._run}/over/{rank}") is not None

    def _if_ended(self, rank: int, neighbour: Neighbour) -> Found | None:
        if not neighbour.has_ended or self.is_over(rank):
            return None
        how = neighbour.how_it_ended()
        who, where = self._whose(rank, neighbour)
        return Found(f"{who} {how}{_without_a_word(how)} in {where}", _remedy_for(how), rank)

    def _if_stopped(self, rank: int, neighbour: Neighbour) -> Found | None:
        lasting = self._stopped.setdefault(rank, Lasting(self._clock))
        if lasting.seconds(so=neighbour.is_stopped) < self._timeout:
            return None
        who, where = self._whose(rank, neighbour)
        what = (
            f"{who} was stopped (SIGSTOP, or Ctrl-Z) in {where} and others have waited for it in "
            "vain"
        )
        remedy = "It is killed now. TSPipeStrategy(timeout=...) says how long a rank may be stopped"
        return Found(what, remedy, rank, neighbour)

    def _whose(self, rank: int, neighbour: Neighbour) -> tuple[str, str]:
        """A rank's process, also of one that has not come, and what it did."""
        is_known = self._members.find(rank) is not None
        who = self._members.name(rank) if is_known else process_name(rank, neighbour.pid)
        return who, self._job.phase_of(rank) or "the start-up"

    def _if_parent_ended(self) -> Found | None:
        pid = self._parent.pid
        if not self._parent.has_ended or pid in {n.pid for n in self._neighbours.values()}:
            return None
        what = f"process {pid}, which had started the ranks, has ended"
        return Found(what, "Whoever ended it meant the job, or it was killed for want of memory")

    # Other machines

    def _if_silent(self) -> Found | None:
        known = [self._members.find(rank) for rank in range(self._members.num_ranks)]
        members = [member for member in known if member is not None]
        watched = next_of_another_machine(members, self._members.this)
        if all(map(self._is_near, members)):
            return None
        self._beat()
        if watched is None:
            return None
        heard = self._job.notes.read(f"beat/{watched.rank}") or ""
        limit = min(_SILENCE, self._timeout)
        silent = self._silent.seconds(so=heard == self._heard)
        self._heard = heard
        if silent < limit or self.is_over(watched.rank):
            return None
        where = heard.partition(" ")[2] or "the start-up"
        what = f"{watched} gives no sign of life for {limit:.0f} s, since {where}"
        return Found(what, "Is that machine up, and the network?", watched.rank)

    def _beat(self) -> None:
        if self._clock() >= self._next_beat:
            self._next_beat = self._clock() + _BEAT_EVERY
            self._num_beats += 1
            self._job.notes.leave(f"beat/{self._members.rank}", f"{self._num_beats} {HERE.text}")


def next_of_another_machine(members: list[Member], this: Member) -> Member | None:
    """Whose signs of life a rank looks after: the first rank of the next machine, in a ring."""
    machines = list(dict.fromkeys(member.machine for member in members))
    following = dict(pairwise([*machines, *machines[:1]]))
    target = following.get(this.machine)
    if target in {None, this.machine}:
        return None
    return next(member for member in members if member.machine == target)


def _was_ordered(neighbour: Neighbour) -> bool:
    return neighbour.has_ended and "SIGTERM" in neighbour.how_it_ended()


def _without_a_word(how: str) -> str:
    return " without a word" if how == "ended" else ""


def _remedy_for(how: str) -> str:
    if "SIGKILL" in how or how == "ended":
        return "If nobody killed it, look whether memory ran out (dmesg, the launcher's log)"
    return "Its own output, if it has any, says why"
