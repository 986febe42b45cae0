"""A backend of ``torch.distributed`` over CPU processes that has NCCL's rules, and nothing kinder.

Each group is one communicator: a queue that a thread of its own works off in order, without tags.
Its first use holds the host until the other rank has come. A message must be, in shape and type,
what was asked for. A rank that has died is noticed by nobody before the time limit.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined] # they are documented
    PrefixStore,
    ProcessGroupGloo,
)
from torch.futures import Future

from lightning_tspipe.runtime.transport import channels
from lightning_tspipe.runtime.transport.wired import WIRE_TYPES, NcclWire
from lightning_tspipe.strategy.lightning.run import Run

NAME = "strict"
VARIABLE = "TSPIPE_TEST_STRICT"
"""Set in the environment, jobs of tests use this backend: how many groups of it a rank may have."""
_HEAD = 16
_TYPES = sorted(WIRE_TYPES, key=str)
LIVE: set[str] = set()
"""Names of this process's groups that were not shut down."""
MADE: list[str] = []
"""Names of all that were ever made."""


class _StrictWork(dist.Work):
    """One transfer in a group's queue."""

    def __init__(self, timeout: timedelta) -> None:
        super().__init__()
        self._is_over = threading.Event()
        self._error: Exception | None = None
        self._limit = timeout.total_seconds()

    def end(self, error: Exception | None) -> None:
        """The transfer is over."""
        self._error = error
        self._is_over.set()

    def is_completed(self) -> bool:
        return self._is_over.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]
        if not self._is_over.wait(self._limit):
            raise RuntimeError(f"strict: nothing came within {self._limit:.0f} s")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Any:
        future: Future[Any] = Future()
        self.wait()
        future.set_result([])
        return future


class StrictGroup(dist.ProcessGroup):
    """One communicator of two ranks."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg] # not in the stubs of torch 2.14
        if size != 2:
            raise RuntimeError(f"strict: an edge has two ranks, not {size}")
        self._store, self._timeout = store, timeout
        self._gloo: Any = None
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._name = f"{len(MADE)}"
        MADE.append(self._name)
        LIVE.add(self._name)

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        return NAME

    def send(self, tensors: list[Tensor], target: int, tag: int) -> dist.Work:
        head = _head(tensors[0])
        tensor = _checked(tensors[0])

        def work() -> None:
            self._gloo.send([head], target, 0).wait()
            self._gloo.send([tensor], target, 0).wait()

        return self._begin(work)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        tensor = _checked(tensors[0])

        def work() -> None:
            head = torch.zeros(_HEAD, dtype=torch.int64)
            self._gloo.recv([head], source, 0).wait()
            if not head.equal(_head(tensor)):
                raise AssertionError(
                    f"strict: asked for {_head(tensor).tolist()}, and {head.tolist()} came"
                )
            self._gloo.recv([tensor], source, 0).wait()

        return self._begin(work)

    def _begin(self, transfer: Callable[[], None]) -> dist.Work:
        if self._gloo is None:
            self._connect()
        work = _StrictWork(self._timeout)

        def run() -> None:
            try:
                transfer()
            except RuntimeError as error:
                # A peer that died: NCCL would not notice.
                time.sleep(self._timeout.total_seconds())
                work.end(error)
            except AssertionError as error:
                work.end(error)
            else:
                work.end(None)

        self._queue.put(run)
        return work

    def _connect(self) -> None:
        """Hold the host until the other rank makes its first call."""
        store = PrefixStore("strict", self._store)
        self._gloo = ProcessGroupGloo(store, self.rank(), self.size(), self._timeout)
        threading.Thread(target=self._work_off, daemon=True, name="strict").start()

    def _work_off(self) -> None:
        while (run := self._queue.get()) is not None:
            run()

    def shutdown(self) -> None:
        LIVE.discard(self._name)
        self._queue.put(None)

    def abort(self) -> None:
        self.shutdown()


def _checked(tensor: Tensor) -> Tensor:
    if tensor.dtype not in WIRE_TYPES:
        raise AssertionError(f"strict: NCCL has no {tensor.dtype}")
    if not tensor.is_contiguous():
        raise AssertionError("strict: not contiguous")
    return tensor


def _head(tensor: Tensor) -> Tensor:
    """Shape and type of a message."""
    numbers = [_TYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    return torch.tensor(numbers + [0] * (_HEAD - len(numbers)))


def register() -> None:
    """Make the backend known to this process."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make, devices=["cpu"])


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> StrictGroup:
    return StrictGroup(store, rank, size, timeout)


def install() -> None:
    """Let the strategies of this process send tensors over the backend."""
    register()
    channels.MAX_COMMUNICATORS = int(os.environ[VARIABLE])
    Run._ordered_backend = property(  # type: ignore[method-assign, assignment]
        lambda self: NAME if self.num_ranks > 1 else ""
    )
    close = NcclWire.close

    def close_all(self: NcclWire) -> None:
        """As at the end of a run, or where another mesh begins: nothing is left of this one."""
        names = {group._name for group in self._groups.values()}
        close(self)
        assert not names & LIVE, f"{sorted(names & LIVE)} of {sorted(names)} are left"

    NcclWire.close = close_all  # type: ignore[method-assign]
    reconnect = Run.reconnect

    def reconnect_all(self: Run, num_ranks: int) -> None:
        """Into another mesh: the groups of the one before go."""
        names = dist.distributed_c10d._world.pg_names
        own = {names[group] for group in self._own_groups if group in names}
        assert own, "no group is known"
        reconnect(self, num_ranks)
        left = own & set(names.values())
        assert not left, f"{sorted(left)} of {sorted(own)} are left"

    Run.reconnect = reconnect_all  # type: ignore[method-assign]


def check_end() -> None:
    """At the end of a process: as few communicators as there are neighbours, and none is left."""
    if dist.is_initialized():
        dist.destroy_process_group()
    assert not LIVE, f"{len(LIVE)} of {len(MADE)} groups are left"
