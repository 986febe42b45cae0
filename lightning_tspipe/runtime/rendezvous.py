"""How the processes of a job find each other."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined] # they are documented
from torch.distributed.distributed_c10d import _get_default_store

_LOOPBACK = "127.0.0.1"


def stay_on_this_machine() -> None:
    """Let process groups of this process listen on the loopback interface, unless told otherwise.

    Nothing outside of the machine needs to reach a job that runs on one.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def local_store(port: int, rank: int, num_ranks: int, timeout: timedelta) -> Store | None:
    """The store that connects the ranks of one machine; rank 0 serves it.

    torch's own listens on all interfaces; so this one is given a socket that doesn't.

    Args:
        port: A free TCP port, the same on all ranks.
        rank: This rank.
        num_ranks: Ranks of the job.
        timeout: How long to wait for the others.

    Returns:
        The store; None where torchrun serves one that all ranks are to use.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    if rank != 0:
        return TCPStore(_LOOPBACK, port, num_ranks, is_master=False, timeout=timeout)
    listener = socket.create_server((_LOOPBACK, port))
    return TCPStore(
        _LOOPBACK, port, num_ranks, is_master=True, timeout=timeout,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def connecting_store() -> Store | None:
    """The store that connects all processes of the job; None before they are connected."""
    return _get_default_store() if dist.is_initialized() else None
