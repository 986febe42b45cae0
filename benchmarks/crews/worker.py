"""One process of one method: silent, single-threaded, gone when its coordinator goes."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback
import warnings
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path

from benchmarks.crews.job import Job
from benchmarks.crews.messages import Failed


def work(job: Job, connection: Connection, log: Path) -> None:
    """Train until ended; report what went wrong to the coordinator."""
    _write_to(log)
    _end_with_parent()
    os.environ.update(job.environment)
    warnings.simplefilter("ignore")
    try:
        # Not at the top: the coordinator imports this module too, and has no use for torch.
        importlib.import_module(job.program).train(job, connection)
        connection.send(Failed("the loader came to its end"))
    except BaseException:  # noqa: BLE001 (whatever it was, it is reported and ends here)
        connection.send(Failed(traceback.format_exc()))
    # Threads of a broken process group may never end by themselves.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _write_to(log: Path) -> None:
    """Send everything that libraries print to a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _end_with_parent() -> None:
    """End when the coordinator ends, even when it was killed and could not say so."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
