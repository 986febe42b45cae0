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
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_tspipe.errors import TransportError
from lightning_tspipe.strategy.checkpoints import files, folders

_SECONDS_TO_COMPLETE = 5.0


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
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._part: Path | None = None
        """On rank 0: where the last checkpoint was begun, until it takes its place."""

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
        if not waits:
            states = apply_to_collection(states, Tensor, lambda x: x.detach().to("cpu", copy=True))
        finish = self._begin(states, rest, path)
        if waits:
            finish()
        else:
            self.do(finish)

    def do(self, task: Callable[[], None]) -> None:
        """Do something when all that was begun is complete; not at all, if that failed."""
        before = self._thread

        def work() -> None:
            if before is not None:
                before.join()
            if self._error is None:
                try:
                    task()
                except BaseException as error:  # noqa: BLE001 - told by the thread that waits
                    self._error = error

        # Not one that the process waits for at its end: peers that are gone never answer.
        self._thread = threading.Thread(target=work, name="checkpoints", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether something was begun of which nobody knows yet how it ended."""
        return self._thread is not None

    def wait(self) -> None:
        """Wait until all that was begun is complete.

        Raises:
            OSError: It could not be written.
        """
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def abandon(self) -> None:
        """This rank fails: complete what all have written, and leave nothing half done.

        It isn't waited for long, because ranks that are gone never say that they have.
        """
        if self._thread is not None:
            self._thread.join(_SECONDS_TO_COMPLETE)
            if self._part is not None and self._thread.is_alive():
                shutil.rmtree(self._part, ignore_errors=True)

    def _begin(self, states: dict[str, Any], rest: Any, path: Path) -> Callable[[], None]:
        """Agree on who writes what.

        Returns:
            The rest of the work, in which no other collectives are used.
        """
        # Importing it takes a tenth of a second, for which a run that saves none need not wait.
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: PLC0415
        from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: PLC0415

        part = path.with_name(f".{path.name}.part")
        if self._is_first:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            self._part = part
        planner, writer = DefaultSavePlanner(), FileSystemWriter(part)
        planner.set_up_planner(states, writer.storage_meta(), self._is_first)
        writer.set_up_storage_writer(self._is_first)
        own = planner.create_local_plan()
        plans, metadata = planner.create_global_plan(self._gather(own))
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[self._place])
        content = io.BytesIO()
        if self._is_first:
            torch.save({**rest, folders.IS_SUMMED: True}, content)

        def write() -> tuple[Any, dict[str, folders.Sums]]:
            done = writer.write_data(plan, planner)
            done.wait()
            names = {written.storage_data.relative_path for written in done.value()}
            return done.value(), {name: folders.sums_of(part / name) for name in names}

        def complete(results: list[Any]) -> None:
            writer.finish(metadata, [written for written, _ in results])
            _write_through(content.getvalue(), part / folders.META_FILE)
            table = {name: one for _, sums in results for name, one in sums.items()}
            for name in (folders.CONTENTS_FILE, folders.META_FILE):
                table[name] = folders.sums_of(part / name)
            _write_through(folders.to_json(table).encode(), part / folders.TABLE_FILE)
            _sync_folder(part)
            folders.take_place_of(part, path)

        def finish() -> None:
            remove = partial(shutil.rmtree, part, ignore_errors=True) if self._is_first else None
            with files.whole_or_removed(path, remove):
                results = self._all_write(write)
                if self._is_first:
                    complete(results)

        return finish

    def _all_write(self, write: Callable[[], Any]) -> list[Any]:
        """What all ranks have written; the error of one of them is raised by each."""
        own: Exception | None = None
        try:
            result = write()
        except Exception as error:  # noqa: BLE001 - raised when all know of it
            own, result = error, None
        # Of another rank's error that is its own, the text: it may not be pickled.
        told = own and (files.what_happened(own) or f"{type(own).__name__}: {own}")
        outcomes = self._gather((result, told))
        if own is not None:
            raise own
        for rank, (_, failure) in enumerate(outcomes):
            if isinstance(failure, BaseException):
                raise failure
            if failure is not None:
                raise TransportError(
                    f"rank {rank} could not write its part of a checkpoint: {failure}"
                )
        return [result for result, _ in outcomes]

    def _gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self._group.size()
        dist.all_gather_object(values, value, group=self._group)
        return values


def _write_through(content: bytes, path: Path) -> None:
    with files.written_through(path) as file:
        file.write(content)


def _sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk, before the folder gets its own."""
    with suppress(OSError):  # some systems can't
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
