"""Ranks on one machine that compute on the CPU: tensors travel through shared memory.

A sender copies a tensor once, into a buffer that both processes have mapped; the receiver works on
that memory and hands it back when nothing refers to it any more::

    sender    copy ──► buffer 7 ── "message: channel 2, buffer 7" ──►  receiver
              pool ◄──────────────── "free: buffer 7" ───────────────  (tensor was deleted)

Words travel over a Unix socket between every two ranks, so a process that ends is noticed at once.
Over loopback TCP the same transfer takes two copies through the kernel, on threads that compete
with the computation for its cores.
"""

from __future__ import annotations

import mmap
import os
import pickle
import select
import socket
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.errors import TransportError
from lightning_tspipe.runtime.transport.base import Receipt, Transport
from lightning_tspipe.runtime.transport.channels import Channel
from lightning_tspipe.runtime.transport.shared_peer import EMPTY, Kind, Peer
from lightning_tspipe.runtime.transport.sockets import connect

_MAX_INLINE = 1 << 15
_SPIN_SECONDS = 3e-4
_SMALLEST = 1 << 12


def is_available() -> bool:
    """Whether the system has anonymous shared files (Linux)."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


class SharedMemoryTransport(Transport):
    """Ranks are processes of one machine that compute on its CPU.

    Args:
        ranks: The global ranks of the pipeline, in its order; ``torch.distributed`` connects them.
        timeout: How long a receive waits for a message of a live peer.
        num_processes: Processes on this machine, if there are others besides these.
    """

    def __init__(
        self, ranks: Sequence[int], timeout: timedelta, num_processes: int | None = None
    ) -> None:
        self.num_ranks = len(ranks)
        self.rank = list(ranks).index(dist.get_rank())
        self._timeout = timeout.total_seconds()
        # Not where ranks share cores: another one could use the time.
        enough_cores = (num_processes or len(ranks)) <= len(os.sched_getaffinity(0))
        self._spin_seconds = _SPIN_SECONDS if enough_cores else 0.0
        sockets = connect(ranks, self.rank, timeout)
        self._peers = {rank: Peer(end) for rank, end in sockets.items()}
        self._poll = select.poll()
        self._by_file = {}
        for peer in self._peers.values():
            self._by_file[peer.socket.fileno()] = peer
            self._poll.register(peer.socket, select.POLLIN)
        os.register_at_fork(after_in_child=_closing(self))

    @property
    def num_buffers(self) -> int:
        """Buffers that this rank has made, for all peers."""
        return sum(len(peer.buffers) for peer in self._peers.values())

    @override
    def send(
        self,
        tensors: Sequence[Tensor],
        target: int,
        channel: Channel,
        specs: Sequence[TensorSpec] | None = None,
    ) -> None:
        peer = self._peers[target]
        arranged = [tensor.detach() for tensor in tensors]
        if specs is not None:
            arranged = [x.to_memory(tensor) for x, tensor in zip(specs, arranged, strict=True)]
        places = [self._fill(peer, target, tensor) for tensor in arranged]
        self._push(target, Kind.MESSAGE, channel, places)
        peer.num_sent += 1

    def _fill(self, peer: Peer, target: int, tensor: Tensor) -> int:
        """Copy a tensor into a buffer of the peer; the number of the buffer."""
        if tensor.numel() == 0:
            return EMPTY
        place = self._buffer(peer, target, tensor.nbytes)
        memory = peer.buffers[place][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        memory.copy_(tensor)
        return place

    def _buffer(self, peer: Peer, target: int, num_bytes: int) -> int:
        size = max(_SMALLEST, 1 << (num_bytes - 1).bit_length())
        if not peer.pool[size]:
            self._read_available()  # perhaps one was handed back
        if peer.pool[size]:
            return peer.pool[size].pop()
        place = len(peer.buffers)
        file = os.memfd_create("lightning-tspipe", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, size)
            peer.maps.append(mmap.mmap(file, size))
            peer.buffers.append(torch.frombuffer(peer.maps[place], dtype=torch.uint8))
            self._push(target, Kind.NEW, Channel.CONTROL, [place, size], files=[file])
        finally:
            os.close(file)
        return place

    @override
    def receive(self, specs: Sequence[TensorSpec], source: int, channel: Channel) -> Receipt:
        peer = self._peers[source]
        number = peer.num_asked[channel]
        peer.num_asked[channel] += 1
        return _SharedReceipt(self, tuple(specs), source, channel, number)

    def take(self, specs: Sequence[TensorSpec], source: int, channel: Channel, number: int) -> Any:
        """The tensors of a message, as soon as it is here."""
        peer = self._peers[source]
        arrived = peer.arrived[channel]
        self._wait(source, lambda: number in arrived, "receive from")
        peer.num_consumed += 1
        return [
            peer.lend(place, spec) for place, spec in zip(arrived.pop(number), specs, strict=True)
        ]

    @override
    def finish_step(self, *, in_training: bool = True) -> None:
        for rank, peer in self._peers.items():
            self._give_back(rank)
            limit = peer.end_step()
            self._wait(rank, partial(peer.has_taken_all_but, limit), "send to")

    @override
    def send_object(self, value: Any, target: int, channel: Channel = Channel.CONTROL) -> None:
        payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        peer = self._peers[target]
        if len(payload) <= _MAX_INLINE:
            self._push(target, Kind.OBJECT, channel, [], payload)
        else:
            place = self._fill(
                peer, target, torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            )
            peer.objects_sent.add(place)
            self._push(target, Kind.LONG_OBJECT, channel, [place, len(payload)])
        peer.num_sent += 1

    @override
    def receive_object(self, source: int, channel: Channel = Channel.CONTROL) -> Any:
        peer = self._peers[source]
        objects = peer.objects[channel]
        self._wait(source, lambda: bool(objects), "receive from")
        peer.num_consumed += 1
        payload = objects.popleft()
        if isinstance(payload, tuple):
            place, length = payload
            payload = peer.lend(place, TensorSpec((length,), torch.uint8)).numpy().tobytes()
        # Objects travel outside of steps too, where no ``finish_step`` would tell the sender.
        self._give_back(source)
        return pickle.loads(payload)  # noqa: S301 - a rank of this job wrote it

    @override
    def close(self) -> None:
        for peer in self._peers.values():
            peer.socket.close()

    # Words

    def _push(  # noqa: PLR0913, PLR0917 - the parts of a packet
        self,
        target: int,
        kind: Kind,
        channel: Channel,
        places: Sequence[int],
        payload: bytes = b"",
        files: Sequence[int] = (),
    ) -> None:
        """Send one packet; while the way is full, read what others send."""
        peer = self._peers[target]
        packet = peer.pack(kind, channel, places, payload)
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                if files:
                    socket.send_fds(peer.socket, [packet], list(files))
                else:
                    peer.socket.send(packet)
            except BlockingIOError:
                self._make_room(target, deadline)
            except OSError as error:
                raise self._failure("send to", target, "connection lost") from error
            else:
                peer.num_told = peer.num_consumed
                return

    def _make_room(self, target: int, deadline: float) -> None:
        peer = self._peers[target]
        if time.monotonic() > deadline:
            raise self._failure("send to", target, f"{self._timeout:.0f} s without an answer")
        self._poll.modify(peer.socket, select.POLLIN | select.POLLOUT)
        self._read_available(milliseconds=100)
        if not peer.is_open:
            raise self._failure("send to", target, "connection closed by peer")
        self._poll.modify(peer.socket, select.POLLIN)

    def _give_back(self, target: int) -> None:
        """Tell a peer which of its buffers are free, and how many messages were consumed."""
        peer = self._peers[target]
        places = [peer.returned.popleft() for _ in range(len(peer.returned))]
        if peer.is_open and (places or peer.num_told < peer.num_consumed):
            try:
                for start in range(0, max(1, len(places)), 256):
                    self._push(target, Kind.FREE, Channel.CONTROL, places[start : start + 256])
            except TransportError:  # it has ended, and needs no memory
                peer.is_open = False

    def _wait(self, source: int, done: Callable[[], bool], verb: str) -> None:
        """Read until ``done``."""
        if done():
            return
        deadline = None
        self._spin(done)
        while not done():
            if deadline is None:
                deadline = time.monotonic() + self._timeout
                for rank in self._peers:
                    self._give_back(rank)
            if not self._peers[source].is_open:
                raise self._failure(verb, source, "connection closed by peer")
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._failure(verb, source, f"nothing within {self._timeout:.0f} s")
            self._read_available(milliseconds=1000 * left + 1)

    def _spin(self, done: Callable[[], bool]) -> None:
        """Look for a short while: often less time than falling asleep and waking up takes."""
        until = time.perf_counter() + self._spin_seconds
        self._read_available()
        while not done() and time.perf_counter() < until:
            self._read_available()

    def _read_available(self, milliseconds: float = 0) -> None:
        for file, _ in self._poll.poll(milliseconds):
            peer = self._by_file[file]
            if not peer.read():
                peer.is_open = False
                self._poll.unregister(file)

    def _failure(self, verb: str, peer: int, reason: str) -> TransportError:
        return TransportError(
            f"rank {self.rank} could not {verb} rank {peer}: it ended or stalled ({reason}). "
            "The cause is in the output of that rank"
        )


@dataclass(slots=True)
class _SharedReceipt(Receipt):
    transport: SharedMemoryTransport
    specs: tuple[TensorSpec, ...]
    source: int
    channel: Channel
    number: int

    @override
    def wait(self) -> list[Tensor]:
        tensors: list[Tensor] = self.transport.take(
            self.specs, self.source, self.channel, self.number
        )
        return tensors


def _closing(transport: SharedMemoryTransport) -> Callable[[], None]:
    """Closes a transport that may be gone: a loader's worker must not keep connections open."""
    reference = weakref.ref(transport)

    def close() -> None:
        found = reference()
        if found is not None:
            found.close()

    return close
