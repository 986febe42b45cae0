"""Many draws, some at a time: groups that share a configuration go to one process each."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.faults.lab.checks import failures
from tests.faults.lab.drawing import SHARED, Draw, draw
from tests.faults.lab.experiment import NotPossible, Reference, make_reference, try_out
from tests.faults.lab.jobs import descendants
from tests.faults.lab.tables import Result

_FORKS = multiprocessing.get_context("fork")


def groups(seed: int, numbers: range) -> Iterator[list[Draw]]:
    """Draws in a row that have one configuration."""
    group: list[Draw] = []
    for number in numbers:
        drawn = draw(seed, number)
        if group and group[-1].number // SHARED != number // SHARED:
            yield group
            group = []
        group.append(drawn)
    if group:
        yield group


def _in_a_child(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a process of its own.

    Raises:
        RuntimeError: It raised something else than ``NotPossible``, or ended without a word.
    """
    reader, writer = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_answer, args=(writer, function, args))
    process.start()
    writer.close()
    try:
        is_good, found = reader.recv()
    except EOFError:
        is_good, found = False, "it ended without a word"
    process.join()
    if isinstance(found, NotPossible):
        raise found
    if not is_good:
        raise RuntimeError(found)
    return found


def _answer(writer: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        answer: Any = True, function(*args)
    except NotPossible as reason:
        answer = False, reason
    except BaseException:  # noqa: BLE001 - told by the process that waits
        answer = False, traceback.format_exc()
    writer.send(answer)
    writer.close()


def try_group(group: list[Draw], folder: Path, tell: Callable[[Result], None]) -> None:
    """The reference, and all draws that are compared with it."""
    here = folder / f"group-{group[0].number // SHARED}"
    shutil.rmtree(here, ignore_errors=True)
    reference = _in_a_child(make_reference, group[0].configuration, here / "reference")
    results = [_try_one(drawn, reference, here / f"draw-{drawn.number}", tell) for drawn in group]
    if all(result.survived for result in results):
        shutil.rmtree(here, ignore_errors=True)


def _try_one(
    drawn: Draw, reference: Reference, folder: Path, tell: Callable[[Result], None]
) -> Result:
    started = time.monotonic()
    wrong: dict[str, str] = {}
    not_possible = ""
    try:
        if reference.problem:
            wrong = {"the run without a fault": reference.problem}
        else:
            wrong = failures(_in_a_child(try_out, drawn, reference, folder))
    except NotPossible as reason:
        not_possible = str(reason)
    except RuntimeError as error:
        wrong = {"the laboratory": str(error)}
    configuration = drawn.configuration
    result = Result(
        drawn.number, str(drawn), drawn.command, drawn.fault.kind, drawn.fault.moment,
        time.monotonic() - started, wrong, not_possible,
        {"mode": configuration.mode, "strategy": configuration.strategy,
         "launcher": drawn.launcher, "ranks": str(configuration.num_ranks)},
    )  # fmt: skip
    tell(result)
    if result.survived:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _worker(
    writer: Connection, group: list[Draw], folder: Path, function: Callable[..., None]
) -> None:
    # Whatever libraries say in this process is nothing of a job's.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    function(group, folder, writer.send)
    writer.close()


def try_all(
    waiting: Iterator[list[Draw]],
    folder: Path,
    *,
    num_jobs: int,
    deadline: float,
    function: Callable[..., None] = try_group,
) -> Iterator[Result]:
    """All groups, as long as there is time to begin one.

    Args:
        waiting: The groups.
        folder: For their files.
        num_jobs: So many at a time.
        deadline: By ``time.monotonic``.
        function: What is done with a group.
    """
    running: dict[Connection, Any] = {}
    try:
        while True:
            while len(running) < num_jobs and time.monotonic() < deadline:
                group = next(waiting, None)
                if group is None:
                    break
                reader, writer = _FORKS.Pipe(duplex=False)
                args = (writer, group, folder, function)
                process = _FORKS.Process(target=_worker, args=args)
                process.start()
                writer.close()
                running[reader] = process
            if not running:
                return
            yield from _collect(running)
    finally:
        _end_all(running.values())


def _end_all(workers: Iterable[Any]) -> None:
    """Nothing goes on when the laboratory is interrupted: jobs too descend from it."""
    for worker in workers:
        if worker.is_alive():
            for _, pid in [*descendants(worker.pid), (0, worker.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _collect(running: dict[Connection, Any]) -> Iterator[Result]:
    for ready in wait(list(running)):
        assert isinstance(ready, Connection)
        with suppress(EOFError):
            yield ready.recv()
            continue
        running.pop(ready).join()
