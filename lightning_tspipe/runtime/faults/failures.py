"""When a rank fails: its cause is told once, and every process ends.

The first that knows of a failure claims it, and tells it: the rank that has the exception, or one
that finds another one killed, stopped or silent. All others end with one line that names the cause.
A rank that notices nothing, since it computes for long or stalls, is ended by its own watch::

    rank 2   ... ValueError ── claims the cause               traceback, one line, exit
    rank 1   ... connection closed by rank 2 ── the cause?    one line that names it, exit
    rank 0   ... stalls        ◄── watch: someone failed 5 s ago: where it is, exit

    rank 3   ... killed        ◄── watch of any other rank: claims the cause, one line

Each rank looks after the others: has one ended without a word, is one stopped, is one silent? ::

    same machine      the system is asked        ended: at once      stopped: after ``timeout``
    other machines    a sign of life in the      silent: after 20 s, or ``timeout``
                      notes, every 2 s           (each looks after one rank of the next machine)

Whatever connects the ranks, and whoever waits for whom there: nothing of this waits for a rank.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import util
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from lightning_tspipe.errors import TransportError
from lightning_tspipe.runtime.faults.local_processes import Neighbour, Parent, until
from lightning_tspipe.runtime.faults.phases import HERE
from lightning_tspipe.runtime.faults.private_folder import keep_job_folder
from lightning_tspipe.runtime.faults.rendezvous import Job, Member, process_name

_SIGNS = (
    "gloo", "closed by peer", "reset by peer", "Broken pipe", "remote server shutdown",
    # NCCL: the peer's end, the watchdog's, and what this process gave up because of either.
    "ncclRemoteError", "closed by remote peer", "remote process exited",
    "Watchdog caught collective operation timeout", "NCCL communicator was aborted",
)  # fmt: skip
_OF_GLOO = re.compile(r"\[[^]]*/gloo/[^]]*\] *")
_CLOSED = ("Read error", "Write error", "losed by peer", "reset by peer", "Broken pipe")
PERIOD = 0.5
_PATIENCE = 5.0
_RUNTIME = Path(__file__).parents[1]
_WAITING = tuple(
    f"{folder}{os.sep}"
    for folder in (_RUNTIME / "faults", _RUNTIME / "transport", Path(dist.__file__).parent)
)
"""Folders of code in which ranks wait for each other."""
_AROUND = {threading.__file__, contextlib.__file__}
_A_MOMENT = 2.0
_KEEP_EVERY = 3600.0
_SILENCE = 20.0
_NO_MORE = 1.0
_BEAT_EVERY = 2.0
_SHOWN = 4


def is_consequence(exception: BaseException) -> bool:
    """Whether a failure only tells that another rank failed."""
    text = str(exception)
    return isinstance(exception, TransportError) or (
        isinstance(exception, RuntimeError) and any(sign in text for sign in _SIGNS)
    )


def first_line(exception: BaseException) -> str:
    """What an exception says, in short; what gloo says, in plain words."""
    line = (str(exception).strip().splitlines() or [type(exception).__name__])[0]
    if _OF_GLOO.match(line) is None:
        return line
    if timed_out := re.search(r"[Tt]imed out waiting (\d+) ?ms", line):
        return f"nothing came from another rank within {int(timed_out[1]) / 1000:g} s"
    if any(sign in line for sign in _CLOSED):
        return "another rank closed its connection"
    return _OF_GLOO.sub("", line)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say what this rank waited for, if it gives up.

    Raises:
        TransportError: With ``what`` before the reason.
    """
    try:
        yield
    except TransportError as error:
        raise TransportError(f"{what}: {error}") from error


def say(line: str) -> None:
    """Print where a traceback would go, in one piece."""
    with suppress(OSError, ValueError):  # nobody reads it any more
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def print_at_the_end(exception: BaseException, line: str, *, with_traceback: bool = False) -> None:
    """If an exception ends this process, print a line after its traceback or in its place."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not exception or with_traceback:
            previous(kind, value, trace)
        if value is exception and line:
            say(line)

    sys.excepthook = hook


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


@dataclass(eq=False)
class Failures:
    """What the ranks of a job know of each other's failures.

    All ranks make one at the start of each run; before that, each is on its own.

    Attributes:
        job: The ranks; of one that has met no other, itself.
        timeout: After how many seconds a rank that is stopped is given up.
        children: Processes that this one has started, for the ranks behind it.
        ends_last: Whether a rank that fails because of another one lets that one end first; for
            launchers that report the process that ended first.
        clock: Seconds.
    """

    job: Job
    timeout: float = 600.0
    children: Sequence[Any] = ()
    ends_last: bool = False
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.job.children = {
            self.job.rank + n + 1: Neighbour(child.pid)
            for n, child in enumerate(self.children)
            if _is_script(child)
        }
        self._run = f"run-{self.job.num_begun}"
        self._patience = self.timeout
        self._is_over = threading.Event()
        self._is_settled = self._has_claimed = False
        self._last_words: tuple[BaseException, str, bool] | None = None
        self._thread: threading.Thread | None = None
        self._watched = threading.main_thread().ident
        # What was seen of the others
        self._stopped: defaultdict[int, Lasting] = defaultdict(partial(Lasting, self.clock))
        self._silent = Lasting(self.clock)
        self._next_beat = 0.0
        self._num_beats = 0
        self._heard = ""
        self._parent = Parent()
        # A rank that fails looks around too, to know whether another one has failed before.
        # It may be in the middle of that when a signal has it look again.
        self._alone = threading.RLock()

    # The watch

    def watch(self) -> None:
        """From now on, end this process if another rank fails and this thread doesn't notice."""
        self._watched = threading.get_ident()  # Ray has a thread train
        self._thread = threading.Thread(
            target=self._look_around, name="lightning-tspipe-watch", daemon=True
        )
        self._thread.start()

    def has_failed(self) -> bool:
        """Whether it is known that a rank has failed."""
        return self._cause() is not None

    def end_watch(self) -> None:
        """This rank needs the others no more, or ends by itself."""
        self._is_over.set()
        self.job.notes.leave(f"{self._run}/over/{self.job.rank}")
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(PERIOD)

    def _look_around(self) -> None:
        since = time.monotonic()
        while not self._is_over.wait(PERIOD):
            if self._find_cause() is not None:
                if not self._is_over.wait(_PATIENCE):
                    self._end()
                return
            if self.job.folder is not None and time.monotonic() - since > _KEEP_EVERY:
                since = time.monotonic()
                keep_job_folder(self.job.folder)

    def _find_cause(self) -> str | None:
        """Why the job ends, if it does; if nobody knew it, all know it then."""
        known = self._cause()
        found = self.look() if known is None else None
        if found is None or self._is_over.is_set():
            return known
        self._tell(found)
        return self._cause() or found.what

    def _tell(self, found: Found) -> None:
        if self._claim(found.what, found.rank):
            say(_told(found.what, found.remedy))
            if found.victim is not None:
                found.victim.kill()

    def _end(self) -> None:
        frame = sys._current_frames().get(self._watched or 0)  # noqa: SLF001
        stack = traceback.extract_stack(frame) if frame is not None else None
        if stack is None or _waits_for_others(stack):
            say(f"rank {self.job.rank} stops too: it waited in {HERE.text}{self._because()}")
        else:
            say(
                f"{self.job.this} is terminated: another rank failed, and this one did not notice "
                f"within {_PATIENCE:.0f} s{self._because()}. It was here, in {HERE.text}:\n"
                + "".join(stack.format())
            )
        self.job.notes.leave(f"{self._run}/over/{self.job.rank}")
        if self._has_claimed:
            self._end_the_stopped()
        self.job.leave()
        os._exit(1)

    def await_ends(self) -> None:
        """Wait until every rank of this machine has come here, or has ended."""
        notes, ended = self.job.notes, f"{self._run}/ended/"
        notes.leave(f"{ended}{self.job.rank}")
        near = self.job.neighbours()
        until(
            lambda: all(
                neighbour.has_ended or notes.read(f"{ended}{rank}") is not None
                for rank, neighbour in near.items()
            ),
            self.timeout,
        )

    def tell_of_signal(self, signum: int) -> None:
        """This process is about to be ended: if nothing has failed before, that is the cause."""
        # A launcher may see that a rank is gone before the system says so.
        dying = [each for each in self.job.neighbours().values() if each.is_ending]
        until(lambda: all(each.has_ended for each in dying), _A_MOMENT)
        what = f"{self.job.this} was ended by {signal.Signals(signum).name} in {HERE.text}"
        if self._find_cause() is None and not self.job.launcher_knows_more:
            self._tell(Found(what, "", self.job.rank))

    # The cause

    def _claim(self, what: str, rank: int | None) -> bool:
        """Whether nobody has told of a failure before."""
        claimed = self.job.notes.claim(f"{self._run}/cause", f"{rank} {what}")
        if claimed:
            self._has_claimed = True
            util.Finalize(None, self._end_the_stopped, exitpriority=10)
        return claimed

    def _cause(self) -> str | None:
        try:
            return self.job.notes.read(f"{self._run}/cause")
        except TransportError as error:
            return f"None {error}"

    def _because(self) -> str:
        cause = self._cause()
        return f" (the cause: {cause.partition(' ')[2]})" if cause else ""

    # Looking after the others

    def expect_no_more(self) -> None:
        """This rank gives up waiting: one that is stopped now is why, and needs no more time."""
        self._patience = min(self._patience, _NO_MORE)

    def look(self) -> Found | None:
        """The first rank that is found to have failed."""
        with self._alone, suppress(OSError):  # out of files, say: the next time then
            try:
                return self._first_found()
            except TransportError as error:
                remedy = "Check its output, and what the launcher reports about it"
                what = f"{self.job.name(0)} no longer serves the store: {error}"
                return Found(what, remedy, 0)
        return None

    def _first_found(self) -> Found | None:
        near = self.job.neighbours()
        # By SIGTERM a launcher ends the others when one has failed: that one comes first.
        mine = self.job.children if self.job.launcher_knows_more else near
        for is_ordered, ranks in ((False, near), (True, mine)):
            for rank, neighbour in near.items():
                if rank in ranks and _was_ordered(neighbour) == is_ordered:
                    found = self._if_ended(rank, neighbour) or self._if_stopped(rank, neighbour)
                    if found is not None:
                        return found
        return self._if_parent_ended(near) or self._if_silent()

    def is_over(self, rank: int) -> bool:
        """Whether a rank has said that it needs nobody in this run any more."""
        return self.job.notes.read(f"{self._run}/over/{rank}") is not None

    def _if_ended(self, rank: int, neighbour: Neighbour) -> Found | None:
        if not neighbour.has_ended or self.is_over(rank):
            return None
        how, remedy = neighbour.how_it_ended(), "Its own output, if it has any, says why"
        memory = "check whether memory ran out (dmesg, the launcher's log)"
        if "SIGKILL" in how:
            remedy = f"If nobody killed it, {memory}"
        elif how == "ended":
            remedy += f"; if it has none, {memory}"
        who, where = self._whose(rank, neighbour)
        return Found(f"{who} {how} in {where}", remedy, rank)

    def _if_stopped(self, rank: int, neighbour: Neighbour) -> Found | None:
        if self._stopped[rank].seconds(so=neighbour.is_stopped) < self._patience:
            return None
        who, where = self._whose(rank, neighbour)
        what = (
            f"{who} was stopped (SIGSTOP, or Ctrl-Z) in {where} and the others gave up waiting "
            "for it"
        )
        remedy = "It is killed now. TSPipeStrategy(timeout=...) sets how long a rank may be stopped"
        return Found(what, remedy, rank, neighbour)

    def _whose(self, rank: int, neighbour: Neighbour) -> tuple[str, str]:
        """A rank's process, also of one that has not come, and what it did."""
        who = self.job.find(rank) or process_name(rank, neighbour.pid)
        return str(who), self.job.phase_of(rank) or "the start-up"

    def _if_parent_ended(self, near: Mapping[int, Neighbour]) -> Found | None:
        pid = self._parent.pid
        if not self._parent.has_ended or pid in {neighbour.pid for neighbour in near.values()}:
            return None
        what = f"process {pid}, which had started the ranks, has ended"
        return Found(what, "Either someone ended the job, or it was killed for lack of memory")

    # Other machines

    def _if_silent(self) -> Found | None:
        job = self.job
        members = [member for member in map(job.find, range(job.num_ranks)) if member is not None]
        if all(map(job.is_near, members)):
            return None
        if self.clock() >= self._next_beat:
            self._next_beat = self.clock() + _BEAT_EVERY
            self._num_beats += 1
            job.notes.leave(f"beat/{job.rank}", f"{self._num_beats} {HERE.text}")
        watched = next_of_another_machine(members, job.this)
        if watched is None:
            return None
        heard = job.notes.read(f"beat/{watched.rank}") or ""
        limit = min(_SILENCE, self._patience)
        silent = self._silent.seconds(so=heard == self._heard)
        self._heard = heard
        if silent < limit or self.is_over(watched.rank):
            return None
        where = heard.partition(" ")[2] or "the start-up"
        what = f"{watched} has given no sign of life for {limit:.0f} s, since {where}"
        return Found(what, "Check whether its machine and the network are up", watched.rank)

    # The end of this rank

    def settle(self, exception: BaseException) -> None:
        """See to it that only one rank of the job prints a traceback, and that all of them end.

        Processes that this one has started end with it.

        Args:
            exception: Why this rank ends.
        """
        if self._is_settled:
            return
        self._is_settled = True
        end_with_this_process(self.children)
        if is_consequence(exception):
            self._follow(exception)
        else:
            self._lead(exception)
        self.end_watch()
        if self.ends_last and not self._has_claimed:
            first = (self._cause() or "None").partition(" ")[0]
            neighbour = self.job.neighbour(int(first)) if first.isdigit() else None
            until(lambda: neighbour is None or neighbour.has_ended, _PATIENCE)

    def _lead(self, exception: BaseException) -> None:
        """A failure for a reason of its own: the cause, unless another rank has failed before."""
        what = f"{self.job.this} raised {type(exception).__name__} in {HERE.text}"
        if str(exception):
            what += f": {first_line(exception).removesuffix('.')}"
        if self._claim(what, self.job.rank):
            if isinstance(exception, SystemExit | KeyboardInterrupt):
                say(_told(what))  # the interpreter says nothing of those
            else:
                self._tell_at_the_end(exception, _told(what), with_traceback=True)
        else:
            self._stop_too(exception, f"{type(exception).__name__}: {first_line(exception)}")

    def _follow(self, exception: BaseException) -> None:
        """A failure of another rank: which, and why?"""
        text = first_line(exception)
        if not self.job.num_ranks:  # nobody could know more
            self._tell_at_the_end(exception, _told(text))
            return
        self.expect_no_more()
        until(self._find_cause, _A_MOMENT)
        what = f"{self.job.this} gave up waiting in {HERE.text}: {text}{self._meanwhile()}"
        if self._cause() is None and self._claim(what, self.job.rank):
            remedy = "If a rank is just slow, set a higher TSPipeStrategy(timeout=...)"
            self._tell_at_the_end(exception, _told(what, remedy))
        else:
            self._stop_too(exception, text)

    def _meanwhile(self) -> str:
        """What the other ranks of this machine are doing: one of them did not come."""
        found = [
            f"{self.job.name(rank)} is in {phase}"
            for rank in range(self.job.num_ranks)
            if rank != self.job.rank and (phase := self.job.phase_of(rank))
        ]
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return f"; {', '.join(found[:_SHOWN])}{more}" if found else ""

    def _stop_too(self, exception: BaseException, text: str) -> None:
        line = f"rank {self.job.rank} stops too: {text}{self._because()}"
        self._tell_at_the_end(exception, line)

    def _tell_at_the_end(
        self, exception: BaseException, line: str, *, with_traceback: bool = False
    ) -> None:
        """Print a line if the exception ends this process, after the traceback or in its place."""
        self._last_words = exception, line, with_traceback
        print_at_the_end(exception, line, with_traceback=with_traceback)

    def tell_now(self, exception: BaseException) -> bool:
        """Print what the end of the process would, where it ends without; whether another failed.

        A launcher may not get to see the exception: it looks at the process that ends first.
        """
        told, _, with_traceback = self._last_words or (None, "", False)
        if not self.job.num_ranks or told is not exception:
            return False
        sys.excepthook(type(exception), exception, exception.__traceback__)
        return not with_traceback

    def words_on(self, exception: BaseException) -> str:
        """What the end of the process would print of an exception; "" if nothing.

        For who reports exceptions, and ends processes before they come to that.
        """
        told, line, _ = self._last_words or (None, "", False)
        return line if told is exception else ""

    def _end_the_stopped(self) -> None:
        """On the rank that told the cause, when it ends: others that are stopped can't hear it.

        It does not wait for the others: those that wait for it at a connection notice its end.
        """
        for neighbour in self.job.neighbours().values():
            if neighbour.is_stopped:
                neighbour.kill()


def _waits_for_others(stack: traceback.StackSummary) -> bool:
    """Whether a thread waits where ranks wait for each other: where that is says nothing."""
    innermost = next(entry for entry in reversed(stack) if entry.filename not in _AROUND)
    return innermost.filename.startswith(_WAITING)


def next_of_another_machine(members: list[Member], this: Member) -> Member | None:
    """Whose signs of life a rank looks after: the first rank of the next machine, in a ring."""
    machines = list(dict.fromkeys(member.machine for member in members))
    target = machines[(machines.index(this.machine) + 1) % len(machines)]
    others = (member for member in members if member.machine == target != this.machine)
    return next(others, None)


def _was_ordered(neighbour: Neighbour) -> bool:
    return neighbour.has_ended and "SIGTERM" in neighbour.how_it_ended()


def _told(what: str, remedy: str = "") -> str:
    """The one line of a cause."""
    # A file may have gone since: replaced by a better one, or moved to where Ray keeps checkpoints.
    is_there = "://" in HERE.checkpoint or Path(HERE.checkpoint).exists()
    resume = f"Resume with ckpt_path={HERE.checkpoint!r}" if HERE.checkpoint and is_there else ""
    sentences = [f"The job ends, because {what}", remedy, resume]
    return ". ".join(sentence for sentence in sentences if sentence)


def end_with_this_process(children: Sequence[Any]) -> None:
    """When this process ends, its children end soon after: by themselves, or they are killed."""
    scripts = [child for child in children if _is_script(child)]
    if scripts:
        atexit.register(_end, scripts)


def _is_script(child: Any) -> bool:
    return isinstance(child, subprocess.Popen)


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Give the other processes time to see for themselves, then end them."""
    # Longer than a watch takes to end a rank that notices nothing, and says where it was.
    deadline = time.monotonic() + _PATIENCE + _A_MOMENT
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C waits for nobody
            deadline = 0.0
            child.kill()
            child.wait()  # so that all have ended when this process looks for what they have left
