"""One socket between every two ranks of a machine."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def connect(ranks: Sequence[int], rank: int, timeout: timedelta) -> dict[int, socket.socket]:
    """One socket to each other rank. The later rank calls, the earlier one listens."""
    group: Any = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
    token = [secrets.token_hex(16)]
    dist.broadcast_object_list(token, ranks[0], group=group)
    # A name in the abstract namespace: no file that could be left behind.
    names = [f"\0lightning-tspipe-{token[0]}-{place}" for place in range(len(ranks))]
    seconds = timeout.total_seconds()
    found: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.settimeout(seconds)
        listener.bind(names[rank])
        listener.listen(len(ranks))
        dist.barrier(group=group)
        for place in range(rank):
            caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            caller.settimeout(seconds)
            caller.connect(names[place])
            caller.send(rank.to_bytes(4, "little"))
            found[place] = caller
        while len(found) < len(ranks) - 1:
            end, _ = listener.accept()
            if _user_of(end) != os.getuid():  # abstract names are open to every user
                end.close()
                continue
            end.settimeout(seconds)
            found[int.from_bytes(end.recv(4), "little")] = end
    for end in found.values():
        end.setblocking(False)
    return found


def _user_of(end: socket.socket) -> int:
    """The user at the other end."""
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", credentials)[1]
    return user
