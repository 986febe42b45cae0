"""One draw, from the start of its processes to what was seen."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.faults.lab.checks import Seen, must_complete
from tests.faults.lab.drawing import DAMAGES, Configuration, Draw
from tests.faults.lab.instant import switch_on
from tests.faults.lab.isolation import SHARED_MEMORY, Place, adopt_orphans, isolate
from tests.faults.lab.jobs import REPOSITORY, Ended, Job, Reaper, wait_for
from tests.faults.lab.striking import BALLAST, MET
from tests.faults.lab.training import AT_END, RESULT, SAVED, Task, result_of

STOP_TIMEOUT = 8.0
"""Of the strategy, where a rank is stopped; nowhere else does the timeout matter."""
_DISK = "24m"
_PAUSES = {"SIGTERM": 0.25, "two jobs": 0.02}
"""Seconds before each batch: a SIGTERM is heard about once a second."""
_OF_USER, _LOCK = "lightning-tspipe-", ".lock"
"""The folder where all jobs of a user meet, which stays; each removes what is its own there."""
_OF_TORCHRUN = "torchelastic_"
"""The folder of its logs, which it keeps."""
_OF_PYTHON = re.compile(r"[a-z0-9_]{8}")
"""A file by which ``tempfile`` finds out whether a folder can be written, and removes."""
_OWN_FILES = {
    "script.py",
    "task.json",
    "output.txt",
    "root",
    "struck",
    "heads",
    "cache",
    SAVED,
    RESULT,
}


class NotPossible(Exception):  # noqa: N818 - no error
    """The draw can't be tried on this machine."""


@dataclass
class Reference:
    """The run that nobody stopped.

    Attributes:
        folder: Where it ran; its checkpoints lie there.
        ended: What became of it.
    """

    folder: Path
    ended: Ended

    @property
    def problem(self) -> str:
        """Why nothing can be compared with it."""
        is_good = set(self.ended.codes.values()) == {0} and not self.ended.left
        if is_good and (self.folder / RESULT).exists():
            return ""
        return f"exit codes {self.ended.codes}, left {self.ended.left}\n{self.ended.output}"


def prepare() -> Place:
    """Make this process one that jobs may run under; it runs no others afterwards."""
    adopt_orphans()
    switch_on()
    return isolate()


def make_reference(configuration: Configuration, folder: Path) -> Reference:
    """Train, and let nothing go wrong."""
    prepare()
    job = Job(Task(configuration, "popen"), folder)
    job.start()
    return Reference(folder, wait_for(job, reaper=Reaper())[0])


def try_out(draw: Draw, reference: Reference, folder: Path) -> Seen:
    """Let it happen, and look.

    Raises:
        NotPossible: Not on this machine.
    """
    experiment = Experiment(draw, reference, folder, prepare())
    if draw.fault.kind in DAMAGES:
        return experiment.damage()
    return experiment.strike()


class Experiment:
    """What happens in one draw.

    Args:
        draw: What was drawn.
        reference: What it is compared with.
        folder: Where everything lies.
        place: Where it runs.
    """

    def __init__(self, draw: Draw, reference: Reference, folder: Path, place: Place) -> None:
        self._draw, self._reference, self._folder, self._place = draw, reference, folder, place
        self._reaper = Reaper()
        folder.mkdir(parents=True)

    def _task(self, **changes: Any) -> Task:
        draw = self._draw
        fault = draw.fault
        pause = 0.03 if fault.moment == "any" else _PAUSES.get(fault.kind, 0.0)
        timeout = STOP_TIMEOUT if fault.kind == "SIGSTOP" else 60.0
        base: dict[str, Any] = {"fault": fault, "timeout": timeout, "pause": pause, **changes}
        return Task(draw.configuration, draw.launcher, **base)

    def _job(self, name: str, number: int = 1, **changes: Any) -> Job:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        return Job(self._task(**changes), folder, is_cold=self._draw.is_cold, number=number)

    # What goes wrong while a job runs

    def strike(self) -> Seen:
        """Start a job that a fault is going to happen to, and maybe another one beside it."""
        draw = self._draw
        jobs = [self._job("job")]
        saved = jobs[0].folder / SAVED
        if draw.fault.kind == "full disk" and not self._place.give_disk(saved, _DISK):
            raise NotPossible("a disk of a few megabytes needs root")
        if draw.fault.kind == "two jobs":
            jobs.append(self._job("other", 2, fault=None))
        for job in jobs:
            job.start()
        ended = wait_for(*jobs, reaper=self._reaper)
        (saved / BALLAST).unlink(missing_ok=True)
        seen = Seen(draw, ended[0], difference=self._difference(jobs[0]))
        if len(jobs) == 2:
            seen.other, seen.other_difference = ended[1], self._difference(jobs[1])
        seen.files = self._left(*jobs)
        temporary = Path(jobs[0].folder.name) / "tmp"
        is_over = not any(job.left for job in ended)
        if is_over and any(Path(name).is_relative_to(temporary) for name in seen.files):
            start_and_end(self._folder / temporary)
            seen.left_to_next = sorted({*seen.files} - {*self._left(*jobs)})
        if not must_complete(seen) and not any(job.left for job in ended):
            self._go_on(seen, saved)
        return seen

    def _go_on(self, seen: Seen, saved: Path, name: str = "resumed") -> None:
        """Look at the checkpoints, and go on from the last one."""
        found = sorted(saved.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
        seen.broken = [problem for path in found if (problem := why_broken(path))]
        if not found:
            return
        seen.checkpoint = found[-1].name
        job = self._job(name, 3, fault=None, checkpoint=str(found[-1]), pause=0.0, timeout=60.0)
        job.start()
        seen.resumed = wait_for(job, reaper=self._reaper)[0]
        seen.resumed_difference = self._difference(job)
        seen.files += self._left(job)

    # What is wrong with a file

    def damage(self) -> Seen:
        """Go on from a checkpoint that was damaged, and then from the one that was not."""
        source = self._reference.folder / SAVED
        found = sorted(source.glob("*.ckpt"))
        fault = self._draw.fault
        chosen = found[min(int(fault.amount * len(found)), len(found) - 1)]
        kept = self._folder / "intact"
        kept.mkdir()
        _copy(chosen, kept / chosen.name)
        job = self._job("job", fault=None, checkpoint=str(self._folder / "job" / chosen.name))
        target = job.folder / chosen.name
        _copy(chosen, target)
        hurt(target, fault.kind, (fault.amount * len(found)) % 1.0)
        job.start()
        ended = wait_for(job, reaper=self._reaper)[0]
        seen = Seen(self._draw, ended, difference=self._difference(job), checkpoint=chosen.name)
        _remove(target)
        seen.files = self._left(job)
        if seen.difference is None and not ended.left:
            self._go_on(seen, kept)
        return seen

    # What is left

    def _difference(self, job: Job) -> float | None:
        """Between a job's result and the reference's."""
        folders = [job.folder, self._reference.folder]
        if not all((folder / RESULT).exists() for folder in folders):
            return None
        first, second = (result_of(folder) for folder in folders)
        known = first.keys() & second.keys()
        return largest_difference(*({name: it[name] for name in known} for it in (first, second)))

    def _left(self, *jobs: Job) -> list[str]:
        """What jobs have left behind, and should not have."""
        found = [str(SHARED_MEMORY / name) for name in self._place.shared_files()]
        found += [f"a listener on port {port}" for port in self._place.listeners()]
        for job in jobs:
            found += [str(path.relative_to(self._folder)) for path in unwanted(job.folder)]
        if self._draw.fault.kind in {"SIGKILL", "SIGSTOP", "two jobs"}:  # documented
            found = [name for name in found if not is_documented(name)]
        return found


def start_and_end(folder: Path) -> None:
    """As the next job of this user does, where temporary files are in this folder."""
    code = (
        "from lightning_tspipe.runtime.faults import private_folder as folder\n"
        "folder.remove_job_folder(folder.make_job_folder('job-next'))"
    )
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)  # noqa: S603 - ours


def is_documented(name: str) -> bool:
    """Whether a process that is killed may leave something: parts of files, and a semaphore.

    joblib makes one when it is imported, and removes it at once.
    """
    return name.endswith((".part", ".old")) or name.startswith(f"{SHARED_MEMORY}/sem.loky-")


def unwanted(folder: Path) -> Iterator[Path]:
    """Files that a job did not have to write, and that nobody takes for a checkpoint."""
    for path in folder.iterdir():
        name = path.name
        if name == "tmp":
            yield from _temporary(path)
        elif name == SAVED:
            yield from (kept for kept in path.iterdir() if not _is_checkpoint(kept))
        elif name not in _OWN_FILES and not name.startswith(("pid-", MET, AT_END, RESULT)):
            yield path


def _temporary(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name.startswith(_OF_USER):
            yield from (kept for kept in path.iterdir() if kept.name != _LOCK)
        elif not path.name.startswith(_OF_TORCHRUN) and not _is_probe(path):
            yield path


def _is_probe(path: Path) -> bool:
    return path.is_file() and path.stat().st_size <= 4 and bool(_OF_PYTHON.fullmatch(path.name))


def _is_checkpoint(path: Path) -> bool:
    return path.suffix == ".ckpt" and not path.name.startswith(".")


def why_broken(path: Path) -> str:
    """What is wrong with a checkpoint; "" if nothing is."""
    try:
        torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=False, mmap=True)
    except Exception as error:  # noqa: BLE001 - whatever torch says
        return f"{path.name}: {type(error).__name__}: {error}"
    if path.is_dir() and not (path / ".metadata").is_file():
        return f"{path.name}: .metadata is missing"
    return ""


def hurt(path: Path, how: str, where: float) -> None:
    """Cut a checkpoint off, or change a byte of it.

    Args:
        path: A file, or a folder of which one file is taken.
        how: ``truncated`` or ``flipped``.
        where: In the file, from 0 to 1.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.stat().st_size)
        place = where * len(files)
        path, where = files[int(place)], place % 1.0
    content = bytearray(path.read_bytes())
    position = min(int(where * len(content)), len(content) - 1)
    if how == "truncated":
        del content[position:]
    else:
        content[position] ^= 0xFF
    path.write_bytes(content)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy2(source, target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def largest_difference(first: Any, second: Any) -> float:
    """Between two trees of numbers; infinite where they are not alike."""
    if isinstance(first, dict) and isinstance(second, dict):
        if first.keys() != second.keys():
            return math.inf
        return _largest((first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        if len(first) != len(second):
            return math.inf
        return _largest(zip(first, second, strict=True))
    if isinstance(first, Tensor | float | int) and isinstance(second, Tensor | float | int):
        return _distance(torch.as_tensor(first), torch.as_tensor(second))
    return 0.0 if first == second else math.inf


def _largest(pairs: Iterable[tuple[Any, Any]]) -> float:
    return max((largest_difference(*pair) for pair in pairs), default=0.0)


def _distance(first: Tensor, second: Tensor) -> float:
    if first.shape != second.shape:
        return math.inf
    if first.numel() == 0:
        return 0.0
    found = (first.double() - second.double()).abs().max().item()
    return math.inf if math.isnan(found) else found
