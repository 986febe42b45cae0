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
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from lightning_tspipe.errors import TransportError
from lightning_tspipe.runtime.faults.local_processes import Neighbour, Parent
from lightning_tspipe.runtime.faults.phases import HERE
from lightning_tspipe.runtime.faults.rendezvous import Job, Member, process_name

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
        clock: Seconds.
    """

    def __init__(
        self, job: Job, run: str, timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._job = job
        self._run = run
        self._timeout = timeout
        self._clock = clock
        self._stopped: defaultdict[int, Lasting] = defaultdict(partial(Lasting, clock))
        self._silent = Lasting(clock)
        self._next_beat = 0.0
        self._num_beats = 0
        self._heard = ""
        self._parent = Parent()
        # A rank that fails looks around too, to know whether another one has failed before.
        # It may be in the middle of that when a signal has it look again.
        self._alone = threading.RLock()

    def expect_no_more(self) -> None:
        """This rank gives up waiting: one that is stopped now is why, and needs no more time."""
        self._timeout = min(self._timeout, _A_MOMENT)

    def look(self) -> Found | None:
        """The first rank that is found to have failed."""
        with self._alone, suppress(OSError):  # out of files, say: the next time then
            try:
                return self._look()
            except TransportError as error:
                remedy = "Look for its output, and for what the launcher says of it"
                what = f"{self._job.name(0)} serves the store no more: {error}"
                return Found(what, remedy, 0)
        return None

    def _look(self) -> Found | None:
        near = self._job.neighbours()
        # By SIGTERM a launcher ends the others when one has failed: that one comes first.
        mine = self._job.children if self._job.launcher_knows_more else near
        for is_ordered, ranks in ((False, near), (True, mine)):
            for rank, neighbour in near.items():
                if rank in ranks and _was_ordered(neighbour) == is_ordered:
                    found = self._if_ended(rank, neighbour) or self._if_stopped(rank, neighbour)
                    if found is not None:
                        return found
        return self._if_parent_ended(near) or self._if_silent()

    def is_over(self, rank: int) -> bool:
        """Whether a rank has said that it needs nobody in this run any more."""
        return self._job.notes.read(f"{self._run}/over/{rank}") is not None

    def _if_ended(self, rank: int, neighbour: Neighbour) -> Found | None:
        if not neighbour.has_ended or self.is_over(rank):
            return None
        how, remedy = neighbour.how_it_ended(), "Its own output, if it has any, says why"
        memory = "look whether memory ran out (dmesg, the launcher's log)"
        if "SIGKILL" in how:
            remedy = f"If nobody killed it, {memory}"
        elif how == "ended":
            remedy += f"; if it has none, {memory}"
        who, where = self._whose(rank, neighbour)
        return Found(f"{who} {how} in {where}", remedy, rank)

    def _if_stopped(self, rank: int, neighbour: Neighbour) -> Found | None:
        if self._stopped[rank].seconds(so=neighbour.is_stopped) < self._timeout:
            return None
        who, where = self._whose(rank, neighbour)
        what = (
            f"{who} was stopped (SIGSTOP, or Ctrl-Z) in {where} and the others gave up waiting "
            "for it"
        )
        remedy = "It is killed now. TSPipeStrategy(timeout=...) says how long a rank may be stopped"
        return Found(what, remedy, rank, neighbour)

    def _whose(self, rank: int, neighbour: Neighbour) -> tuple[str, str]:
        """A rank's process, also of one that has not come, and what it did."""
        who = self._job.find(rank) or process_name(rank, neighbour.pid)
        return str(who), self._job.phase_of(rank) or "the start-up"

    def _if_parent_ended(self, near: Mapping[int, Neighbour]) -> Found | None:
        pid = self._parent.pid
        if not self._parent.has_ended or pid in {neighbour.pid for neighbour in near.values()}:
            return None
        what = f"process {pid}, which had started the ranks, has ended"
        return Found(what, "Whoever ended it meant the job, or it was killed for want of memory")

    # Other machines

    def _if_silent(self) -> Found | None:
        job = self._job
        members = [member for member in map(job.find, range(job.num_ranks)) if member is not None]
        if all(map(job.is_near, members)):
            return None
        self._beat()
        watched = next_of_another_machine(members, job.this)
        if watched is None:
            return None
        heard = job.notes.read(f"beat/{watched.rank}") or ""
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
            self._job.notes.leave(f"beat/{self._job.rank}", f"{self._num_beats} {HERE.text}")


def next_of_another_machine(members: list[Member], this: Member) -> Member | None:
    """Whose signs of life a rank looks after: the first rank of the next machine, in a ring."""
    machines = list(dict.fromkeys(member.machine for member in members))
    target = machines[(machines.index(this.machine) + 1) % len(machines)]
    others = (member for member in members if member.machine == target != this.machine)
    return next(others, None)


def _was_ordered(neighbour: Neighbour) -> bool:
    return neighbour.has_ended and "SIGTERM" in neighbour.how_it_ended()
