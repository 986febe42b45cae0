"""The store of one start among those of a torchrun that restarts its workers.

The store that torchrun's agents serve is the same for all starts: whoever looks into it after a
restart finds what ranks have left that have ended. The number of the restart does not tell the
starts apart, since an agent does not count one that another node began. So rank 0 serves a store of
its own for each start, and the agents' tells where::

    agents' store   lightning_tspipe/start = "41873 5f2a..."      rank 0's port, and a token
    rank 0's store  token = "5f2a...", arrived/1, arrived/2, ...

A rank that finds the entry of an earlier start finds nobody at that port, another token, or that
its own place is taken there; then it looks again.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined] # they are

from lightning_tspipe.errors import TransportError

_ENTRY = "lightning_tspipe/start"
_TOKEN = "token"  # noqa: S105 - a key of the store
_ANSWER_SECONDS = 10.0
_PERIOD = 0.2


def store_of_start(agents: Store, rank: int, patience: timedelta) -> Store:
    """The store of this start; every rank calls it.

    Args:
        agents: The store that torchrun serves.
        rank: This rank.
        patience: How long to wait for rank 0.

    Raises:
        TransportError: Rank 0 did not come.
    """
    address = os.environ["MASTER_ADDR"]  # of rank 0's node
    if rank == 0:
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=patience)
        token = secrets.token_hex()
        store.set(_TOKEN, token)
        agents.set(_ENTRY, f"{store.port} {token}")
        return store
    deadline = time.monotonic() + patience.total_seconds()
    while time.monotonic() < deadline:
        if agents.check([_ENTRY]):
            port, token = agents.get(_ENTRY).decode().split()
            found = _joined(address, int(port), token, rank)
            if found is not None:
                found.set_timeout(patience)
                return found
        time.sleep(_PERIOD)
    raise TransportError(
        f"rank 0 did not join within {patience.total_seconds():.0f} s: no start that it serves was "
        f"found at {address}. If it has failed, its output says why"
    )


def _joined(address: str, port: int, token: str, rank: int) -> TCPStore | None:
    """The store of a start in which this rank's place is free; None if it isn't, or has ended."""
    answer = timedelta(seconds=_ANSWER_SECONDS)
    try:
        # A store that is gone would be called for as long as the timeout, with a warning each time.
        socket.create_connection((address, port), timeout=_ANSWER_SECONDS).close()
        store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=answer)
        if not store.check([_TOKEN]) or store.get(_TOKEN).decode() != token:
            return None
        return store if store.add(f"arrived/{rank}", 1) == 1 else None
    except (OSError, RuntimeError):  # torch's own errors derive from the latter
        return None
