"""One other rank of this machine: the socket to it, and the memory that both have mapped.

A packet on the socket has a kind, a channel, the numbers of buffers, and how many messages its
sender has consumed so far; an object that is short follows in it.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.runtime.transport.channels import Channel

EMPTY = -1
"""Stands for the buffer of a tensor without elements."""
_HEAD = struct.Struct("<BBHq")
_PACKET = 1 << 16
_LARGE = 1 << 20
_STEPS_AHEAD = 4
_SLACK = 16
"""A peer may leave so many steps' messages untaken, and so many more, before a sender waits for it.

What a teacher computed ahead is taken in the next step only, and there may be an evaluation before.
"""
_MOST_LENT = 192
"""Each buffer is an open file: from so many on, receivers, who may keep an epoch's, get copies."""


class Kind(IntEnum):
    """What a packet says."""

    NEW = 0
    """There is another buffer; its file comes along."""
    MESSAGE = 1
    """Tensors are in these buffers."""
    FREE = 2
    """These buffers are needed no more."""
    OBJECT = 3
    LONG_OBJECT = 4
    """An object is in a buffer; its length follows the buffer's number."""


class Peer:
    """One other rank: the socket, and both directions' memory and counts."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.is_open = True
        # To the peer: buffers by number, free ones by size, messages sent and taken
        self.buffers: list[Tensor] = []
        self.maps: list[mmap.mmap] = []
        self.objects_sent: set[int] = set()
        self.pool: dict[int, list[int]] = defaultdict(list)
        self.num_sent = 0
        self.num_taken = 0
        self.num_sent_before = 0
        self.most_sent = 0
        # From the peer
        self.mapped: dict[int, mmap.mmap] = {}
        self.arrived: dict[int, dict[int, list[int]]] = defaultdict(dict)
        self.num_arrived: dict[int, int] = defaultdict(int)
        self.num_asked: dict[int, int] = defaultdict(int)
        self.objects: dict[int, deque[bytes | tuple[int, int]]] = defaultdict(deque)
        self.returned: deque[int] = deque()
        self.num_consumed = 0
        self.num_told = 0

    def pack(
        self, kind: Kind, channel: Channel, places: Sequence[int], payload: bytes = b""
    ) -> bytes:
        """A packet for the peer."""
        head = _HEAD.pack(kind, channel, len(places), self.num_consumed)
        return head + struct.pack(f"<{len(places)}q", *places) + payload

    def end_step(self) -> int:
        """How many messages the peer may leave untaken from now on."""
        self.most_sent = max(self.most_sent, self.num_sent - self.num_sent_before)
        self.num_sent_before = self.num_sent
        return _STEPS_AHEAD * self.most_sent + _SLACK

    def has_taken_all_but(self, number: int) -> bool:
        """Whether no more messages than that are under way."""
        return self.num_sent - self.num_taken <= number

    def lend(self, place: int, spec: TensorSpec) -> Tensor:
        """A tensor in a buffer; when its memory has no user any more, the buffer is returned."""
        if place == EMPTY:
            return spec.empty("cpu")
        memory = np.frombuffer(self.mapped[place], np.uint8, spec.num_bytes)
        weakref.finalize(memory, self.returned.append, place).atexit = False
        tensor = torch.from_numpy(memory).view(spec.dtype).view(spec.memory_shape)
        return spec.from_memory(tensor.clone() if len(self.mapped) > _MOST_LENT else tensor)

    def read(self) -> bool:
        """Take in all packets that are here; False at the end of the connection."""
        while True:
            try:
                packet, files, _, _ = socket.recv_fds(self.socket, _PACKET, 1)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not packet:
                return False
            self._take_in(packet, files)

    def _take_back(self, place: int) -> None:
        """The peer needs a buffer no more; a large one of an object, such as weights, is emptied.

        Objects are sent once in a while, and their memory would stay for good.
        """
        size = self.buffers[place].numel()
        if place in self.objects_sent:
            self.objects_sent.discard(place)
            if size >= _LARGE:
                with suppress(OSError):  # a kernel that can't keeps it
                    self.maps[place].madvise(mmap.MADV_REMOVE)
        self.pool[size].append(place)

    def _take_in(self, packet: bytes, files: Sequence[int]) -> None:
        kind, channel, count, num_taken = _HEAD.unpack_from(packet)
        self.num_taken = max(self.num_taken, num_taken)
        places = list(struct.unpack_from(f"<{count}q", packet, _HEAD.size))
        if kind == Kind.MESSAGE:
            self.arrived[channel][self.num_arrived[channel]] = places
            self.num_arrived[channel] += 1
        elif kind == Kind.FREE:
            for place in places:
                self._take_back(place)
        elif kind == Kind.NEW:
            place, size = places
            self.mapped[place] = mmap.mmap(files[0], size)
            os.close(files[0])
        elif kind == Kind.LONG_OBJECT:
            place, length = places
            self.objects[channel].append((place, length))
        else:
            self.objects[channel].append(packet[_HEAD.size :])
