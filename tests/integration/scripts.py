"""Jobs as users start them: commands, each with all the processes that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 90
Processes = list[subprocess.Popen[bytes]]


@contextmanager
def started(folder: Path, script: str, *commands: list[str]) -> Iterator[Processes]:
    """Commands in a folder, made with a ``script.py``; in the end nothing of them is left."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "script.py").write_text(script)
    processes: Processes = []
    with (folder / "output.txt").open("w") as output:
        try:
            for command in commands:
                process = subprocess.Popen(  # noqa: S603 - our own script
                    command, cwd=folder, env=_environment(), stdout=output, stderr=output,
                    start_new_session=True,
                )  # fmt: skip
                processes.append(process)
            yield processes
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC_"))}
    # Of another job.
    for name in ("LOCAL_RANK", "RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        kept.pop(name, None)
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def output_of(folder: Path) -> str:
    """What a folder's commands have printed."""
    return (folder / "output.txt").read_text()


def wait_for(paths: list[Path], process: subprocess.Popen[bytes]) -> None:
    """Wait until a command has made files."""
    deadline = time.monotonic() + SECONDS
    while not all(path.exists() for path in paths):
        assert process.poll() is None, output_of(paths[0].parent)
        assert time.monotonic() < deadline, output_of(paths[0].parent)
        time.sleep(0.05)


def processes_in(folder: Path) -> list[int]:
    """The processes that work in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            cwd = (process / "cwd").readlink()
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if cwd.is_relative_to(folder) and state != "Z":
            found.append(int(process.name))
    return found
