"""Writing a checkpoint in shards: beside its place, at once or while the training goes on.

What the ranks must agree upon is agreed before anybody writes. What is left then can be done by a
thread, and one exchange at its end tells rank 0 that all files are complete::

    rank 0   plan ─┬─ write own ─┬─ contents, meta.pt, checksums ─ rename
    rank 1   plan ─┴─ write own ─┘
             main    a thread, if the training goes on
"""

from __future__ import annotations

import io
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from typing_extensions import override

from lightning_tspipe.errors import TransportError
from lightning_tspipe.strategy.checkpoints.checksums import (
    TABLE_FILE,
    SummedStream,
    Sums,
    sums_of,
    to_json,
)
from lightning_tspipe.strategy.checkpoints.files import system_error, unsaved
from lightning_tspipe.strategy.checkpoints.folders import IS_SUMMED, META_FILE
from lightning_tspipe.strategy.checkpoints.shards import take_place_of


class ShardWriter:
    """Writes checkpoints in shards, one after another; every rank of the job has one.

    Args:
        is_connected: Whether there are other ranks.
        timeout: How long to wait for one that says nothing.
    """

    def __init__(self, timeout: timedelta, *, is_connected: bool) -> None:
        # Its own, since a thread uses it while the training uses the others.
        self._group: Any = None
        if is_connected:
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._place = self._group.rank() if is_connected else 0
        self._is_first = self._place == 0
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def write(self, states: dict[str, Any], rest: Any, path: Path, *, waits: bool) -> None:
        """Write a folder, and put it in its place when it is complete.

        Args:
            states: What this rank holds; of what several hold, one copy is written.
            rest: What ``meta.pt`` gets; rank 0's counts.
            path: The folder. One that is there stays until the new one is complete.
            waits: Whether to return when this is done, rather than when it has begun.

        Raises:
            OSError: It could not be written, or one that was begun before could not.
        """
        self.wait()
        part = path.with_name(f".{path.name}.part")
        if not waits:
            states = apply_to_collection(states, Tensor, _copy)
        finish = self._begin(states, rest, part, path)
        if waits:
            finish()
        else:
            self.do(finish)

    def do(self, task: Callable[[], None]) -> None:
        """Do something when all that was begun is complete; not at all, if that failed."""
        if self._thread is None:
            # Not one that the process waits for at its end: peers that are gone never answer.
            self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    @property
    def is_busy(self) -> bool:
        """Whether something was begun that may not be complete."""
        return self._tasks.unfinished_tasks > 0

    def wait(self) -> None:
        """Wait until all that was begun is complete.

        Raises:
            OSError: It could not be written.
        """
        self._tasks.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.wait()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Wait for nothing; the thread ends after what it does now."""
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                if self._error is None:
                    task()
            except BaseException as error:  # noqa: BLE001 - told by the thread that waits
                self._error = error
            self._tasks.task_done()

    def _begin(
        self, states: dict[str, Any], rest: Any, part: Path, path: Path
    ) -> Callable[[], None]:
        """Agree on who writes what.

        Returns:
            The rest of the work, in which no other collectives are used.
        """
        if self._is_first:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        planner, writer = DefaultSavePlanner(), SummingWriter(part)
        planner.set_up_planner(states, writer.storage_meta(), self._is_first)
        writer.set_up_storage_writer(self._is_first)
        own = planner.create_local_plan()
        plans, metadata = planner.create_global_plan(self._gather(own))
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[self._place])
        content = io.BytesIO()
        if self._is_first:
            torch.save({**rest, IS_SUMMED: True}, content)

        def write() -> Any:
            done = writer.write_data(plan, planner)
            done.wait()
            return done.value(), writer.sums

        def complete(results: list[Any]) -> None:
            writer.finish(metadata, [written for written, _ in results])
            _write_through(content.getvalue(), part / META_FILE)
            files = {name: one for _, sums in results for name, one in sums.items()}
            files |= {**writer.sums, META_FILE: sums_of(content.getvalue())}
            _write_through(to_json(files).encode(), part / TABLE_FILE)
            _sync_folder(part)
            take_place_of(part, path)

        return lambda: self._finish(write, complete, part, path)

    def _finish(
        self,
        write: Callable[[], Any],
        complete: Callable[[list[Any]], None],
        part: Path,
        path: Path,
    ) -> None:
        """Write, and on rank 0 put the folder in its place when all ranks have written."""
        try:
            result, own = _outcome(write)
            results = self._gather(result)
            _raise_failures(own, results)
            if self._is_first:
                complete(results)
        except BaseException as error:
            if self._is_first:
                shutil.rmtree(part, ignore_errors=True)
            told = unsaved(error, path)
            if told is None:
                raise
            raise told from None

    def _gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self._group.size()
        dist.all_gather_object(values, value, group=self._group)
        return values


class SummingWriter(FileSystemWriter):
    """Writes shards, and knows their checksums without reading them again.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = self._files = _SummingFiles()

    @property
    def sums(self) -> dict[str, Sums]:
        """Of the files that this process wrote, by name."""
        return self._files.sums


class _SummingFiles(FileSystem):
    """Files of this machine, summed while they are written."""

    def __init__(self) -> None:
        self.sums: dict[str, Sums] = {}

    @contextmanager
    @override
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as file:
            stream = SummedStream(file)
            yield cast("io.IOBase", stream)
        self.sums[Path(path).name] = stream.sums

    @override
    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


def _outcome(write: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """The result of a function, or its exception as others are told of it; and the exception."""
    try:
        return write(), None
    except Exception as error:  # noqa: BLE001 - raised when all know of it
        return system_error(error) or _NotWritten(f"{type(error).__name__}: {error}"), error


class _NotWritten(Exception):  # noqa: N818 - it stands for another rank's
    """Why a rank has not written its part."""


def _raise_failures(own: Exception | None, results: list[Any]) -> None:
    if own is not None:
        raise own
    for rank, result in enumerate(results):
        if isinstance(result, _NotWritten):
            raise TransportError(f"rank {rank} could not write its part of a checkpoint: {result}")
        if isinstance(result, Exception):
            raise result


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _write_through(content: bytes, path: Path) -> None:
    """Write a file that is on the disk when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk, before the folder gets its own."""
    with suppress(OSError):  # some systems can't
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
