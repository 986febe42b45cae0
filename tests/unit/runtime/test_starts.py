"""Ranks of one start of torchrun find each other, and nothing of an earlier one."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined] # it is

from lightning_tspipe.errors import TransportError
from lightning_tspipe.runtime.faults import starts
from lightning_tspipe.runtime.faults.starts import store_of_start

SECONDS = timedelta(seconds=20)


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The store that torchrun serves, for all starts."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SECONDS)


def test_ranks_of_a_start_find_each_other(agents: Any) -> None:
    first = store_of_start(agents, 0, SECONDS)
    second = store_of_start(agents, 1, SECONDS)
    first.set("key", "value")
    assert second.get("key") == b"value"


@pytest.mark.parametrize("is_gone", [True, False])
def test_an_earlier_start_is_not_joined(is_gone: bool, agents: Any) -> None:
    """Its rank 0 has ended, or is about to; rank 1 comes before the next rank 0."""
    earlier = store_of_start(agents, 0, SECONDS)
    earlier.set("key", "earlier")
    assert store_of_start(agents, 1, SECONDS).get("key") == b"earlier"
    answered = list(starts._ANSWERING)
    starts._ANSWERING.clear()
    if is_gone:
        answered.clear()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(store_of_start(agents, 1, SECONDS)))
    thread.start()
    time.sleep(0.5)
    assert not found
    now = store_of_start(agents, 0, SECONDS)
    thread.join(20)
    assert not found[0].check(["key"])
    now.set("key", "now")
    assert found[0].clone().get("key") == b"now"
    assert earlier.get("key") == b"earlier"


def test_rank_0_does_not_come(agents: Any) -> None:
    with pytest.raises(TransportError, match="rank 0 did not join within 0 s"):
        store_of_start(agents, 1, timedelta(seconds=0.3))
