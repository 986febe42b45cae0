"""Notes of a job, in a folder and in a store: the same, and neither makes anybody wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined] # it is documented

from lightning_tspipe.errors import TransportError
from lightning_tspipe.runtime.faults import rendezvous
from lightning_tspipe.runtime.faults.notes import FolderNotes, Notes, StoreNotes


@pytest.fixture(params=["folder", "store"])
def notes(
    request: pytest.FixtureRequest, tmp_path: Path, free_port: Callable[[], int]
) -> Iterator[Notes]:
    if request.param == "folder":
        yield FolderNotes(tmp_path)
        return
    served = TCPStore("127.0.0.1", free_port(), 1, is_master=True, wait_for_workers=False)
    yield StoreNotes(served.clone(), 20.0)
    del served


def test_what_was_left_is_read(notes: Notes) -> None:
    assert notes.read("run-0/over/1") is None
    notes.leave("run-0/over/1")
    notes.leave("beat/1", "1 training")
    notes.leave("beat/1", "2 training")
    assert notes.read("run-0/over/1") == ""
    assert notes.read("beat/1") == "2 training"


def test_one_of_two_claims(notes: Notes) -> None:
    assert notes.claim("cause", "rank 0")
    assert not notes.claim("cause", "rank 1")
    assert notes.read("cause") == "rank 0"


def test_without_a_folder_nothing_fails(tmp_path: Path) -> None:
    """Another job has removed it: then nobody else can tell the cause either."""
    notes = FolderNotes(tmp_path / "gone")
    notes.leave("over")
    assert notes.read("over") is None
    assert notes.claim("cause", "rank 0")


def test_a_folder_holds_whole_notes_only(tmp_path: Path) -> None:
    notes = FolderNotes(tmp_path)
    notes.leave("a/b", "text")
    notes.claim("c", "text")
    notes.claim("c", "text")
    assert {path.name for path in tmp_path.iterdir()} == {"a-b", "c"}


class Stuck:
    """A store that does not answer."""

    def __init__(self) -> None:
        self.is_over = Event()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.is_over.wait(60)


def test_a_store_that_does_not_answer_is_given_up() -> None:
    """As that of a rank 0 which is stopped."""
    store = Stuck()
    notes = StoreNotes(store, 0.2)
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"did not answer within 0 s"):
        notes.read("cause")
    notes.leave("over")
    assert notes.claim("cause", "rank 1")
    assert time.monotonic() - started < 10
    store.is_over.set()


def test_a_connection_that_is_lost_is_told() -> None:
    def fail() -> None:
        raise RuntimeError("broken")

    notes = StoreNotes(None, 20.0)
    with pytest.raises(TransportError, match="the store that connects the ranks is gone: broken"):
        notes._in_time(fail)
    assert notes._in_time(lambda: 3) == 3


def test_a_connection_of_its_own_answers_while_another_one_waits(
    free_port: Callable[[], int],
) -> None:
    store = TCPStore(
        "127.0.0.1", free_port(), 1, is_master=True, wait_for_workers=False,
        timeout=timedelta(seconds=30),
    )  # fmt: skip
    notes = StoreNotes(store.clone(), 20.0)
    with pytest.raises(TransportError, match=r"did not answer within 0 s"):
        StoreNotes(store, 0.3)._in_time(store.get, "never")
    assert notes.read("cause") is None
    notes.leave("a")
    store.clone().set("never", "")


def test_between_machines_a_store_is_given_up_and_nobody_else_s_waiting_counts(
    free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_SECONDS", 4.0)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    job = rendezvous._meet_across(0, 1, timedelta(seconds=60))
    end = job.store.clone()

    def wait_at(store: Any) -> Thread:
        waits = Thread(target=store.get, args=("never",), daemon=True)
        waits.start()
        waits.join(0.5)
        assert waits.is_alive()
        return waits

    threads = [wait_at(job.store)]
    job.notes.leave("a", "text")
    assert job.notes.read("a") == "text"
    assert isinstance(job.notes, StoreNotes)
    threads.append(wait_at(job.notes.store))

    def read_on() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            job.notes.read("a")

    with pytest.raises(TransportError, match="did not answer within 4 s"):
        read_on()
    for key in ("never", "lightning_tspipe/never"):
        end.set(key, "")
    for thread in threads:
        thread.join()
