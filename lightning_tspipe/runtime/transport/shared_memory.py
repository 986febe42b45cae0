"""Ranks on one machine that compute on the CPU: tensors travel through shared memory.

A sender copies a tensor once, into a buffer that both processes have mapped; the receiver works on
that memory and hands it back when nothing refers to it any more::

    sender    copy ──► buffer 7 ── "message: channel 2, buffer 7" ──►  receiver
              pool ◄──────────────── "free: buffer 7" ───────────────  (tensor was deleted)

Words travel over a Unix socket between every two ranks, so a process that ends is noticed at once.
Over loopback TCP the same transfer takes two copies through the kernel, on threads that compete
with the computation for its cores.

A packet on the socket has a kind, a channel, the numbers of buffers, and how many messages its
sender has consumed so far.
"""

from __future__ import annotations

import mmap
import os
import pickle
import secrets
import select
import socket
import struct
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.errors import TransportError
from lightning_tspipe.runtime.transport.base import Receipt, Specs, Transport, as_sent, failure
from lightning_tspipe.runtime.transport.channels import Channel

_SPIN_SECONDS = 3e-4
_MOMENT = 2
"""Milliseconds of a wait before a peer hears which buffers are free."""
_SMALLEST = 1 << 12
_EMPTY = -1
"""Stands for the buffer of a tensor without elements."""
_HEAD = struct.Struct("<BBHq")
_PACKET = 1 << 16
_WAY = select.POLLOUT
_LARGE = 1 << 20
_STEPS_AHEAD = 4
_SLACK = 16
"""A peer may leave so many steps' messages untaken, and so many more, before a sender waits for it.

What a teacher computed ahead is taken in the next step only, and there may be an evaluation before.
"""
_MOST_LENT = 192
"""Each buffer is an open file: from so many on, receivers, who may keep an epoch's, get copies."""


class _Kind(IntEnum):
    """What a packet says."""

    NEW = 0
    """There is another buffer; its file comes along."""
    MESSAGE = 1
    """Tensors are in these buffers; or an object is in one, whose length follows its number."""
    FREE = 2
    """These buffers are needed no more."""


class _Peer:
    """One other rank: the socket, and both directions' memory and counts."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.is_open = True
        # To the peer: buffers by number, free ones by size, messages sent and taken
        self.buffers: list[mmap.mmap] = []
        self.views: dict[int, Tensor] = {}
        self.rare: set[int] = set()
        self.pool: dict[int, list[int]] = defaultdict(list)
        self.num_sent = self.num_taken = self.num_sent_before = self.most_sent = 0
        # From the peer: buffers, and messages by channel and number
        self.mapped: dict[int, mmap.mmap] = {}
        self.arrived: dict[tuple[int, int], list[int]] = {}
        self._num_arrived: Counter[int] = Counter()
        self._num_asked: Counter[int] = Counter()
        self.returned: deque[int] = deque()
        self._lent: dict[int, weakref.ref[Any]] = {}
        self.num_consumed = self.num_told = 0

    def ask(self, channel: int) -> tuple[int, int]:
        """Where the next message of a channel will be that nobody asked for yet."""
        self._num_asked[channel] += 1
        return channel, self._num_asked[channel]

    def end_step(self) -> Callable[[], bool]:
        """What says whether the peer has taken as many messages as it has to from now on."""
        self.most_sent = max(self.most_sent, self.num_sent - self.num_sent_before)
        self.num_sent_before = self.num_sent
        limit = _STEPS_AHEAD * self.most_sent + _SLACK
        return lambda: self.num_sent - self.num_taken <= limit

    def lend(self, place: int, spec: TensorSpec) -> Tensor:
        """A tensor in a buffer; when its memory has no user any more, the buffer is returned."""
        if place == _EMPTY:
            return spec.empty("cpu")
        memory = np.frombuffer(self.mapped[place], np.uint8, spec.num_bytes)
        self._lent[place] = weakref.ref(memory, lambda _: self.returned.append(place))
        tensor = torch.frombuffer(memory, dtype=spec.dtype).view(spec.memory_shape)
        return spec.from_memory(tensor.clone() if len(self.mapped) > _MOST_LENT else tensor)

    def read(self) -> bool:
        """Take in the packet that is here; False at the end of the connection."""
        try:
            packet, files, _, _ = socket.recv_fds(self.socket, _PACKET, 1)
        except OSError as error:
            return isinstance(error, BlockingIOError)  # then nothing is there after all
        if packet:
            self._take_in(packet, files)
        return bool(packet)

    def _take_in(self, packet: bytes, files: Sequence[int]) -> None:
        kind, channel, count, num_taken = _HEAD.unpack_from(packet)
        self.num_taken = max(self.num_taken, num_taken)
        places = list(struct.unpack_from(f"<{count}q", packet, _HEAD.size))
        if kind == _Kind.FREE:
            for place in places:
                self._take_back(place)
        elif kind == _Kind.NEW:
            place, size = places
            self.mapped[place] = mmap.mmap(files[0], size)
            os.close(files[0])
        else:
            self._num_arrived[channel] += 1
            self.arrived[channel, self._num_arrived[channel]] = places

    def _take_back(self, place: int) -> None:
        """The peer needs a buffer no more; a large one with what is rare, as weights, is emptied.

        Objects and probes are sent once in a while, and their memory would stay for good.
        """
        size = len(self.buffers[place])
        if place in self.rare:
            self.rare.discard(place)
            if size >= _LARGE:
                with suppress(OSError):  # a kernel that can't keeps it
                    self.buffers[place].madvise(mmap.MADV_REMOVE)
        self.pool[size].append(place)


def _connect(rank: int, num_ranks: int, timeout: timedelta) -> dict[int, _Peer]:
    """Each other rank. The later rank calls, the earlier one listens."""
    group: Any = dist.new_group(list(range(num_ranks)), timeout=timeout, backend="gloo")
    token = [secrets.token_hex(16)]
    dist.broadcast_object_list(token, group=group, group_src=0)
    # A name in the abstract namespace: no file that could be left behind.
    names = [f"\0lightning-tspipe-{token[0]}-{place}" for place in range(num_ranks)]
    seconds = timeout.total_seconds()
    found: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.settimeout(seconds)
        listener.bind(names[rank])
        listener.listen(num_ranks)
        dist.barrier(group=group)
        for place in range(rank):
            caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            caller.settimeout(seconds)
            caller.connect(names[place])
            caller.send(rank.to_bytes(4, "little"))
            found[place] = caller
        while len(found) < num_ranks - 1:
            end, _ = listener.accept()
            credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            _, user, _ = struct.unpack("3i", credentials)
            if user != os.getuid():  # abstract names are open to every user
                end.close()
                continue
            end.settimeout(seconds)
            found[int.from_bytes(end.recv(4), "little")] = end
    for end in found.values():
        end.setblocking(False)
    return {place: _Peer(end) for place, end in found.items()}


class SharedMemoryTransport(Transport):
    """Ranks are the processes of the default group, on one machine, and compute on its CPU.

    Args:
        timeout: How long a receive waits for a message of a live peer.
        num_processes: Processes on this machine, if there are others besides these.
    """

    def __init__(self, timeout: timedelta, num_processes: int = 0) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._timeout = timeout.total_seconds()
        # Not where ranks share cores: another one could use the time.
        enough_cores = (num_processes or self.num_ranks) <= len(os.sched_getaffinity(0))
        self._spin_seconds = _SPIN_SECONDS if enough_cores else 0.0
        self._peers = _connect(self.rank, self.num_ranks, timeout)
        self._by_file = {peer.socket.fileno(): peer for peer in self._peers.values()}
        self._poll = select.poll()
        for file in self._by_file:
            self._poll.register(file, select.POLLIN)
        _OPEN.add(self)

    @override
    def send(
        self, tensors: Sequence[Tensor], target: int, channel: Channel, specs: Specs | None = None
    ) -> None:
        places = [self._fill(target, tensor) for tensor in as_sent(tensors, specs)]
        if channel is Channel.PROBES:
            self._peers[target].rare.update(places)
        self._push(target, _Kind.MESSAGE, channel, places)

    def _fill(self, target: int, tensor: Tensor) -> int:
        """Copy a tensor into a buffer of the peer; the number of the buffer."""
        if tensor.numel() == 0:
            return _EMPTY
        peer, place = self._peers[target], self._buffer(target, tensor.nbytes)
        view = peer.views.get(place)  # of what was there before, most often such a tensor too
        if view is None or (view.shape, view.dtype) != (tensor.shape, tensor.dtype):
            memory = torch.frombuffer(peer.buffers[place], dtype=torch.uint8, count=tensor.nbytes)
            view = peer.views[place] = memory.view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        return place

    def _buffer(self, target: int, num_bytes: int) -> int:
        peer = self._peers[target]
        size = max(_SMALLEST, 1 << (num_bytes - 1).bit_length())
        if not peer.pool[size]:
            self._read_available()  # perhaps one was handed back
        if peer.pool[size]:
            return peer.pool[size].pop()
        place = len(peer.buffers)
        file = os.memfd_create("lightning-tspipe", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, size)
            peer.buffers.append(mmap.mmap(file, size))
            self._push(target, _Kind.NEW, Channel.CONTROL, [place, size], file)
        finally:
            os.close(file)
        return place

    @override
    def receive(self, specs: Specs, source: int, channel: Channel) -> Receipt:
        place = self._peers[source].ask(channel)
        return Receipt(partial(self._take, tuple(specs), source, place))

    def _take(self, specs: Specs, source: int, place: tuple[int, int]) -> list[Tensor]:
        buffers = self._await(source, place)
        lend = self._peers[source].lend
        return [lend(buffer, spec) for buffer, spec in zip(buffers, specs, strict=True)]

    def _await(self, source: int, place: tuple[int, int]) -> list[int]:
        """What a message says, as soon as it is here."""
        peer = self._peers[source]
        self._wait(source, lambda: place in peer.arrived, "receive from")
        peer.num_consumed += 1
        return peer.arrived.pop(place)

    @override
    def finish_step(self, *, in_training: bool = True) -> None:
        for rank, peer in self._peers.items():
            self._give_back(rank)
            self._wait(rank, peer.end_step(), "send to")

    @override
    def send_object(self, value: Any, target: int, channel: Channel = Channel.CONTROL) -> None:
        payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        place = self._fill(target, torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self._peers[target].rare.add(place)
        self._push(target, _Kind.MESSAGE, channel, [place, len(payload)])

    @override
    def receive_object(self, source: int, channel: Channel = Channel.CONTROL) -> Any:
        peer = self._peers[source]
        place, length = self._await(source, peer.ask(channel))
        payload = peer.lend(place, TensorSpec((length,), torch.uint8)).numpy().tobytes()
        # Objects travel outside of steps too, where no ``finish_step`` would tell the sender.
        self._give_back(source)
        return pickle.loads(payload)  # noqa: S301 - a rank of this job wrote it

    @override
    def close(self) -> None:
        for peer in self._peers.values():
            peer.socket.close()

    # Words

    def _push(
        self, target: int, kind: _Kind, channel: Channel, places: Sequence[int], *files: int
    ) -> None:
        """Send one packet; while the way is full, read what others send."""
        peer = self._peers[target]
        head = _HEAD.pack(kind, channel, len(places), peer.num_consumed)
        packet = head + struct.pack(f"<{len(places)}q", *places)
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                if files:
                    socket.send_fds(peer.socket, [packet], files)
                else:
                    peer.socket.send(packet)
                break
            except BlockingIOError:
                self._make_room(target, deadline)
            except OSError as error:
                raise failure(self.rank, "send to", target, "connection lost") from error
        peer.num_told = peer.num_consumed
        peer.num_sent += kind == _Kind.MESSAGE

    def _make_room(self, target: int, deadline: float) -> None:
        peer = self._peers[target]
        if time.monotonic() > deadline:
            reason = f"{self._timeout:.0f} s without an answer"
            raise failure(self.rank, "send to", target, reason)
        self._poll.modify(peer.socket, select.POLLIN | _WAY)
        self._read_available(milliseconds=100)
        if not peer.is_open:
            raise failure(self.rank, "send to", target, "connection closed by peer")
        self._poll.modify(peer.socket, select.POLLIN)

    def _give_back(self, target: int) -> None:
        """Tell a peer which of its buffers are free, and how many messages were consumed."""
        peer = self._peers[target]
        places = [peer.returned.popleft() for _ in range(len(peer.returned))]
        if peer.is_open and (places or peer.num_told < peer.num_consumed):
            try:
                for start in range(0, max(1, len(places)), 256):
                    self._push(target, _Kind.FREE, Channel.CONTROL, places[start : start + 256])
            except TransportError:  # it has ended, and needs no memory
                peer.is_open = False

    def _wait(self, source: int, done: Callable[[], bool], verb: str) -> None:
        """Read until ``done``."""
        if done() or self._is_soon(done):
            return
        deadline = time.monotonic() + self._timeout
        for rank in self._peers:
            self._give_back(rank)
        while not done():
            if not self._peers[source].is_open:
                raise failure(self.rank, verb, source, "connection closed by peer")
            left = deadline - time.monotonic()
            if left <= 0:
                raise failure(self.rank, verb, source, f"nothing within {self._timeout:.0f} s")
            self._read_available(milliseconds=1000 * left + 1)

    def _is_soon(self, done: Callable[[], bool]) -> bool:
        """Read for a short while; whether that was enough."""
        # It takes often less time than falling asleep and waking up takes.
        until = time.perf_counter() + self._spin_seconds
        self._read_available()
        while not done() and time.perf_counter() < until:
            self._read_available()
        if not done():  # asleep, but a word wakes the peer up, and what it says can wait
            self._read_available(milliseconds=_MOMENT)
        return done()

    def _read_available(self, milliseconds: float = 0) -> None:
        while found := [file for file, event in self._poll.poll(milliseconds) if event != _WAY]:
            milliseconds = 0
            for file in found:
                peer = self._by_file[file]
                if not peer.read():
                    peer.is_open = False
                    self._poll.unregister(file)


_OPEN: weakref.WeakSet[SharedMemoryTransport] = weakref.WeakSet()


def _close_all() -> None:
    """A loader's worker that is forked must not keep connections open."""
    for transport in _OPEN:
        transport.close()


os.register_at_fork(after_in_child=_close_all)
