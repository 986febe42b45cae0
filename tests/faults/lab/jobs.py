"""Jobs: start all their processes, wait until all have ended, and see who has not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.lab.drawing import BEFORE_THEY_MET, HAVE_PARENT
from tests.faults.lab.instant import Instant, NewInterpreter
from tests.faults.lab.striking import MET, ROOT, SCRIPT, STRUCK, pid_file
from tests.faults.lab.training import AT_END, Task

WITHIN = 60.0
"""A job comes to its end, or to its fault, in so many seconds; new interpreters need longer."""
WITHIN_COLD = 150.0
AFTER_FAULT = 20.0
"""All processes have ended so many seconds after a fault."""
AFTER_TIMEOUT = 10.0
"""The same for a rank that stalls, from the strategy's timeout on."""
_SRUN_WAITS = 5.0
_TORCHRUN_WAITS = 30.0
"""Between the SIGTERM and the SIGKILL for ranks that are left."""
_PERIOD = 0.05
_CPUS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
REPOSITORY = Path(__file__).resolve().parents[3]
_OF_ANOTHER_JOB = (
    "LOCAL_RANK", "RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR", "PL_GLOBAL_SEED",
)  # fmt: skip


@dataclass
class Ended:
    """What became of a job.

    Attributes:
        codes: Exit codes of the processes that were started, by name: ``rank 2`` under SLURM and
            where a script is rank 0, else ``parent``; None for one that had to be killed.
        output: What all of them printed.
        was_struck: Whether the fault happened.
        struck_rank: The rank that it happened to; None if it is none, or not known.
        seconds: From the fault, or from the start if there was none, to the end of the last.
        left: Processes that had not ended in time.
        have_met: Whether the ranks came so far that they know each other.
    """

    codes: dict[str, int | None] = field(default_factory=dict)
    output: str = ""
    was_struck: bool = False
    struck_rank: int | None = None
    seconds: float = 0.0
    left: list[str] = field(default_factory=list)
    have_met: bool = True


def descendants(pid: int) -> list[tuple[int, int]]:
    """All living processes that descend from one, each with its parent, in front of its own."""
    children: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        state, parent = _status(int(process.name))
        if state not in {"", "Z"}:
            children.setdefault(parent, []).append(int(process.name))
    found, parents = [], [pid]
    for parent in parents:
        found += [(parent, child) for child in children.get(parent, [])]
        parents += children.get(parent, [])
    return found


def _status(pid: int) -> tuple[str, int]:
    """The letter of a process's state, and its parent; "" if there is none."""
    process = Path("/proc", str(pid))
    try:
        state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
        if state == "Z" and sum(1 for _ in (process / "task").iterdir()) > 1:
            state = "X"  # other threads of it are still ending, and its files are open
    except (OSError, ValueError):
        return "", 0
    return state, int(parent)


class Reaper:
    """Collects exit codes of children, also of those that were adopted."""

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}

    def reap(self) -> None:
        """All that have ended."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self.codes[pid] = os.waitstatus_to_exitcode(status)


class Job:
    """The processes of one task, in a folder of their own.

    Args:
        task: What they are told.
        folder: Where they run; it is made.
        is_cold: Whether they are new interpreters.
        number: Of SLURM's job.
    """

    def __init__(self, task: Task, folder: Path, *, is_cold: bool = False, number: int = 1) -> None:
        self.task, self.folder = task, folder
        self._is_cold = is_cold
        self._number = number
        self.started = 0.0
        self.roots: dict[str, int] = {}

    def start(self) -> None:
        """Start them."""
        folder = self.folder
        for name in ("tmp", "cache"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "script.py").write_text(SCRIPT)
        for old in (STRUCK, ROOT):
            (folder / old).unlink(missing_ok=True)
        self.task.write(folder / "task.json")
        self.started = time.monotonic()
        size = self.task.configuration.num_ranks
        if self.task.launcher == "slurm":
            port = _free_port()
            for rank in range(size):
                self._start(f"rank {rank}", [], slurm(rank, size, port, self._number))
            return
        before = []
        if self.task.launcher == "torchrun":
            before = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        name = "parent" if self.task.launcher in HAVE_PARENT else "rank 0"
        self._start(name, before, {})
        (folder / ROOT).write_text(str(self.roots[name]))

    def _start(self, name: str, before: list[str], environment: dict[str, str]) -> None:
        kind = NewInterpreter if self._is_cold else Instant
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC"))}
        for other in _OF_ANOTHER_JOB:
            kept.pop(other, None)
        own = {
            "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(self.folder / "tmp"),
            "XDG_CACHE_HOME": str(self.folder / "cache"), **_CPUS,
        }  # fmt: skip
        with (self.folder / "output.txt").open("ab") as output:
            process = kind(
                [sys.executable, *before, str(self.folder / "script.py")], cwd=self.folder,
                stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                env={**kept, **own, **environment}, start_new_session=True,
            )  # fmt: skip
        self.roots[name] = process.pid
        process.returncode = 0  # it is reaped elsewhere

    def rank_pid(self, rank: int) -> int | None:
        """A rank's process, if it has said so."""
        with suppress(OSError, ValueError):
            return int((self.folder / pid_file(rank)).read_text())
        return None

    def struck(self) -> tuple[float, int] | None:
        """When the fault happened, by the wall clock, and to which process."""
        with suppress(OSError, ValueError):
            moment, pid = (self.folder / STRUCK).read_text().split()
            return float(moment), int(pid)
        return None

    @property
    def have_met(self) -> bool:
        """Whether the ranks came so far that they know each other."""
        return any(self.folder.glob(f"{MET}*"))

    @property
    def before(self) -> float:
        """How many seconds it may take without a fault."""
        return WITHIN_COLD if self._is_cold else WITHIN


def slurm(rank: int, size: int, port: int, number: int) -> dict[str, str]:
    """What a task of SLURM finds in its environment."""
    return {
        "SLURM_NTASKS": str(size), "SLURM_NTASKS_PER_NODE": str(size), "SLURM_NNODES": "1",
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0",
        "SLURM_JOB_ID": str(4711 + number), "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "no-such-host", "MASTER_PORT": str(port),
    }  # fmt: skip


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Watch:
    """Waits for the end of a job, and strikes from outside where that was drawn.

    Args:
        job: It was started.
        reaper: Of this process.
    """

    def __init__(self, job: Job, reaper: Reaper) -> None:
        self._job, self._reaper = job, reaper
        self._fault = job.task.fault
        self._struck_at: float | None = None
        self._struck_pid: int | None = None
        self._continued_at: float | None = None
        self._known: set[int] = set(job.roots.values())
        self.last_seen = job.started

    def look(self) -> bool:
        """Once in a while; whether it is over, one way or another."""
        self._reaper.reap()
        now = time.monotonic()
        self._strike_from_outside(now)
        self._notice()
        living = self.living()
        if not living:
            return self._reaper.codes.keys() >= set(self._job.roots.values())
        self.last_seen = now
        self._as_srun(living, now)
        self._continue_stopped(living, now)
        return now > self._deadline()

    def living(self) -> list[int]:
        """Processes of this job: those that were started, their descendants, and adopted ones."""
        found = []
        for parent, pid in descendants(os.getpid()):
            if pid in self._known or parent in self._known or self._is_here(pid):
                self._known.add(pid)
                found.append(pid)
        return found

    def _is_here(self, pid: int) -> bool:
        try:
            here = Path(f"/proc/{pid}/cwd").readlink()
        except OSError:
            return False
        return here.is_relative_to(self._job.folder)

    def _deadline(self) -> float:
        fault, job = self._fault, self._job
        if self._continued_at is not None:
            # It may wait for the others then, which have ended.
            return self._continued_at + job.task.timeout + AFTER_TIMEOUT
        if self._struck_at is None or fault is None or fault.kind in {"slow rank", "clock jump"}:
            return job.started + job.before
        if fault.kind == "SIGSTOP":
            # The number of a process that the others have not met is known to torchrun alone.
            is_torchruns = job.task.launcher == "torchrun" and fault.place in BEFORE_THEY_MET
            waits = _TORCHRUN_WAITS if is_torchruns else 0.0
            return self._struck_at + job.task.timeout + AFTER_TIMEOUT + waits
        return self._struck_at + AFTER_FAULT

    def _notice(self) -> None:
        found = self._job.struck()
        if found is not None and self._struck_at is None:
            self._struck_at = time.monotonic() - max(0.0, time.time() - found[0])
            self._struck_pid = found[1]

    def _strike_from_outside(self, now: float) -> None:
        fault, job = self._fault, self._job
        if fault is None or fault.moment != "any" or self._struck_at is not None:
            return
        if now < job.started + fault.delay:
            return
        known = job.rank_pid(fault.rank) if fault.target == "rank" else None
        pid = known or job.roots.get(f"rank {fault.rank}") or next(iter(job.roots.values()))
        if pid in self._reaper.codes or _status(pid)[0] in {"", "Z"}:
            return
        if any(job.folder.glob(f"{AT_END}*")):
            return  # too late; the moments of a run's end are struck from within
        self._struck_at, self._struck_pid = now, pid
        with suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[fault.kind])

    def _as_srun(self, living: list[int], now: float) -> None:
        """Who has not met the others can't be missed by them: srun --kill-on-bad-exit ends them."""
        fault = self._fault
        is_early = fault is not None and (
            fault.place in BEFORE_THEY_MET or (fault.moment == "any" and not self._job.have_met)
        )
        if not is_early or self._job.task.launcher != "slurm" or self._struck_at is None:
            return
        has_failed = self._reaper.codes.get(self._struck_pid or 0, 0) != 0
        if has_failed and now > self._struck_at + _SRUN_WAITS:
            for pid in living:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def _continue_stopped(self, living: list[int], now: float) -> None:
        """A stopped process that nobody started but us: if it is the last one, it may end."""
        if living == [self._struck_pid] and self._continued_at is None:
            fault = self._fault
            is_root = self._struck_pid in self._job.roots.values()
            if fault is not None and fault.kind == "SIGSTOP" and is_root:
                self._continued_at = now
                os.kill(living[0], signal.SIGCONT)

    def end(self) -> Ended:
        """What became of it; whoever lives is killed."""
        job = self._job
        codes = {name: self._reaper.codes.get(pid) for name, pid in job.roots.items()}
        left = [_describe(pid) for pid in self.living()]
        while living := self.living():
            for pid in living:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_PERIOD)
            self._reaper.reap()
        since = self._struck_at if self._struck_at is not None else job.started
        text = job.folder / "output.txt"
        return Ended(
            codes, text.read_text(errors="replace"), self._struck_at is not None,
            self._struck_rank(), self.last_seen - since, left, self._job.have_met,
        )  # fmt: skip

    def _struck_rank(self) -> int | None:
        fault = self._fault
        if self._struck_pid is None or fault is None or fault.target == "parent":
            return None
        ranks = range(self._job.task.configuration.num_ranks)
        known = {rank: self._job.rank_pid(rank) for rank in ranks}
        if fault.moment == "any" and not self._job.have_met:
            return None  # they had not met, and nobody else can tell
        found = [rank for rank, pid in known.items() if pid == self._struck_pid]
        return found[0] if found else None


def _describe(pid: int) -> str:
    state, parent = _status(pid)
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return f"process {pid} (state {state}, parent {parent}): {words[:100]}"
    return f"process {pid}"


def wait_for(*jobs: Job, reaper: Reaper) -> list[Ended]:
    """Wait until all jobs have ended, or had to."""
    watches = [Watch(job, reaper) for job in jobs]
    while not all([watch.look() for watch in watches]):  # noqa: C419 - each of them looks
        time.sleep(_PERIOD)
    return [watch.end() for watch in watches]
