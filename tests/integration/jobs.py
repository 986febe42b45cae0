"""Jobs of several ranks: processes forked from one that has imported everything already.

Importing torch and Lightning takes seconds, a fork takes milliseconds; and whatever a test breaks
ends with its processes.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_tspipe.profiling.costs import CACHE
from tests import strict_backend

Launcher = Literal["script", "torchrun", "slurm"]
_CONTEXT = multiprocessing.get_context("forkserver")
_ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Outcome:
    """What became of one rank.

    Attributes:
        value: What its function returned.
        error: The exception that left it, as ``TypeName: message``; "" if none did.
        exit_code: Of the process; negative for a signal.
        seconds: From the start of the job until the process had ended.
        output: What it printed, stdout and stderr.
    """

    value: Any = None
    error: str = ""
    exit_code: int | None = None
    seconds: float = 0.0
    output: str = ""


@dataclass
class Job:
    """All ranks of a job that has ended."""

    ranks: list[Outcome] = field(default_factory=list)

    @property
    def errors(self) -> list[str]:
        """What failed on each rank."""
        return [rank.error for rank in self.ranks]

    @property
    def output(self) -> str:
        """What all ranks printed."""
        return "\n".join(rank.output for rank in self.ranks)


def preload() -> None:
    """Start the process from which ranks are forked."""
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    _CONTEXT.set_forkserver_preload(["tests.integration.preloaded"])


def run_job(
    function: Callable[..., Any],
    *args: Any,
    num_ranks: int = 2,
    folder: Path,
    launcher: Launcher = "script",
    seconds: float = 90.0,
) -> Job:
    """Run a function on every rank of a job and wait for the end of all.

    Args:
        function: Module-level; gets ``args``. It runs in ``folder``, in float64.
        args: Picklable.
        num_ranks: Processes.
        folder: Where they run; it is made if it is not there.
        launcher: Whose environment the ranks get; ``script``: Lightning's own.
        seconds: After that long all are killed.
    """
    port = _free_port()
    folder.mkdir(parents=True, exist_ok=True)
    processes, readers = [], []
    started = time.monotonic()
    for rank in range(num_ranks):
        reader, writer = _CONTEXT.Pipe(duplex=False)
        environment = _environment(rank, num_ranks, port, launcher)
        where = folder, rank
        process = _CONTEXT.Process(target=_main, args=(writer, function, args, environment, where))
        process.start()
        writer.close()
        processes.append(process)
        readers.append(reader)
    outcomes = [Outcome() for _ in processes]
    _collect(processes, readers, outcomes, started, seconds)
    for rank, outcome in enumerate(outcomes):
        outcome.output = _log(folder, rank).read_text() if _log(folder, rank).exists() else ""
    return Job(outcomes)


def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """What a function returns on each rank of a job, none of which may fail."""
    job = run_job(function, *args, **kwargs)
    for number, rank in enumerate(job.ranks):
        assert rank.exit_code == 0, f"rank {number}: exit code {rank.exit_code}\n{job.output}"
    return [rank.value for rank in job.ranks]


def _collect(
    processes: list[Any],
    readers: list[Connection],
    outcomes: list[Outcome],
    started: float,
    seconds: float,
) -> None:
    alive = dict(enumerate(processes))
    listening = dict(enumerate(readers))
    while alive:
        left = started + seconds - time.monotonic()
        if left <= 0:
            for process in alive.values():
                process.kill()
        sentinels = [process.sentinel for process in alive.values()]
        wait([*sentinels, *listening.values()], timeout=max(left, 1.0))
        # Who has ended by now has said its last word, which may have come since the wait.
        ended = [rank for rank, process in alive.items() if process.exitcode is not None]
        for rank, reader in list(listening.items()):
            if reader.poll():
                _read(reader, outcomes[rank])
                del listening[rank]
        for rank in ended:
            outcomes[rank].exit_code = alive.pop(rank).exitcode
            outcomes[rank].seconds = time.monotonic() - started


def _read(reader: Connection, outcome: Outcome) -> None:
    try:
        outcome.value, outcome.error = pickle.loads(reader.recv_bytes())  # noqa: S301 - own child
    except EOFError:  # it ended without a word
        return


def _main(
    writer: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    environment: dict[str, str],
    where: tuple[Path, int],
) -> None:
    folder, rank = where
    log = os.open(_log(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if strict_backend.VARIABLE in os.environ:
        strict_backend.install()
    value, error = None, ""
    code: Any = None
    try:
        value = function(*args)
        if strict_backend.VARIABLE in os.environ:
            strict_backend.check_end()
    except BaseException as caught:  # noqa: BLE001 - whatever leaves a script ends it
        error = f"{type(caught).__name__}: {caught}"
        # As at the end of a script; multiprocessing would not ask the hook.
        if isinstance(caught, SystemExit):
            code = caught.code
        else:
            sys.excepthook(type(caught), caught, caught.__traceback__)
    try:
        writer.send_bytes(pickle.dumps((value, error)))
    except Exception:  # noqa: BLE001 - a value that can't be pickled
        traceback.print_exc()
        error = error or "unpicklable"
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code or int(bool(error)))


def _environment(rank: int, num_ranks: int, port: int, launcher: Launcher) -> dict[str, str]:
    if num_ranks == 1:
        return {}
    rules = {
        name: os.environ[name] for name in (strict_backend.VARIABLE, CACHE) if name in os.environ
    }
    if launcher == "slurm":
        number = str(num_ranks)
        return {
            "SLURM_NTASKS": number, "SLURM_NTASKS_PER_NODE": number, "SLURM_NNODES": "1",
            "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0",
            "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "no-such-host",
            "MASTER_PORT": str(port), **rules,
        }  # fmt: skip
    environment = {
        "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **rules,
    }  # fmt: skip
    if launcher == "torchrun":
        environment |= {
            "TORCHELASTIC_RUN_ID": "test", "RANK": str(rank), "GROUP_RANK": "0",
            "LOCAL_WORLD_SIZE": str(num_ranks),
        }  # fmt: skip
    return environment


def _log(folder: Path, rank: int) -> Path:
    return folder / f"output-{rank}.txt"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
