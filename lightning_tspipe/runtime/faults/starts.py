"""The part of torchrun's store that belongs to one start of its workers.

The store that torchrun's agents serve is the same for all starts: whoever looks into it after a
restart finds what ranks have left that have ended. The number of the restart does not tell the
starts apart, since an agent does not count one that another node began. So each start has a part of
that store, under a token that rank 0 draws; and rank 0 answers at a port for as long as it lives::

    agents' store   lightning_tspipe/start = "41873 5f2a..."      rank 0's port, and the token
                    5f2a.../...                                   what this start leaves
    rank 0's port   token = "5f2a...", arrived/1, arrived/2, ...

A rank that finds the entry of an earlier start finds nobody at that port, another token, or that
its own place is taken there; then it looks again. What ranks tell each other later lies in the
agents' store, which is still there when rank 0 is not.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # they are

from lightning_tspipe.errors import TransportError

_ENTRY = "lightning_tspipe/start"
_TOKEN = "token"  # noqa: S105 - a key of the store
_ANSWER_SECONDS = 10.0
_PERIOD = 0.2
_ANSWERING: list[Store] = []
"""On rank 0: what the others ask, for as long as the process lives."""


def store_of_start(agents: Store, rank: int, patience: timedelta) -> Store:
    """The part of the agents' store for this start; every rank calls it.

    Args:
        agents: The store that torchrun serves.
        rank: This rank.
        patience: How long to wait for rank 0.

    Raises:
        TransportError: Rank 0 did not come.
    """
    address = os.environ["MASTER_ADDR"]  # of rank 0's node
    if rank == 0:
        answers = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=patience)
        _ANSWERING[:] = [answers]
        token = secrets.token_hex()
        answers.set(_TOKEN, token)
        agents.set(_ENTRY, f"{answers.port} {token}")
        return PrefixStore(token, agents)
    deadline = time.monotonic() + patience.total_seconds()
    while time.monotonic() < deadline:
        if agents.check([_ENTRY]):
            port, token = agents.get(_ENTRY).decode().split()
            if _joins(address, int(port), token, rank):
                return PrefixStore(token, agents)
        time.sleep(_PERIOD)
    raise TransportError(
        f"rank 0 did not join within {patience.total_seconds():.0f} s: no start that it serves was "
        f"found at {address}. If it has failed, its output says why"
    )


def _joins(address: str, port: int, token: str, rank: int) -> bool:
    """Whether a start has not ended, and this rank's place in it was free; it is taken then."""
    answer = timedelta(seconds=_ANSWER_SECONDS)
    try:
        # A store that is gone would be called for as long as the timeout, with a warning each time.
        socket.create_connection((address, port), timeout=_ANSWER_SECONDS).close()
        store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=answer)
        if not store.check([_TOKEN]) or store.get(_TOKEN).decode() != token:
            return False
        return bool(store.add(f"arrived/{rank}", 1) == 1)
    except (OSError, RuntimeError):  # torch's own errors derive from the latter
        return False
