"""A rank fails while shards are written: a checkpoint is completed, or nothing is left of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tspipe.strategy.checkpoints import folders, writing


class Held:
    """Holds the thread that writes, just before the folder takes its place."""

    def __init__(self) -> None:
        self.is_there, self.may_go = threading.Event(), threading.Event()
        self._take_place_of = folders.take_place_of

    def __call__(self, part: Path, path: Path) -> None:
        self.is_there.set()
        assert self.may_go.wait(30)
        self._take_place_of(part, path)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held()
    monkeypatch.setattr(folders, "take_place_of", held)
    yield held
    held.may_go.set()


def begun(path: Path) -> writing.ShardWriter:
    writer = writing.ShardWriter(timedelta(seconds=5), is_connected=False)
    states: dict[str, Any] = {"model": {"weight": torch.arange(3.0)}}
    writer.write(states, {"global_step": 2}, path, waits=False)
    return writer


def test_what_is_written_takes_its_place(tmp_path: Path, held: Held) -> None:
    writer = begun(tmp_path / "a.ckpt")
    assert held.is_there.wait(30)
    assert [entry.name for entry in tmp_path.iterdir()] == [".a.ckpt.part"]
    threading.Timer(0.2, held.may_go.set).start()
    writer.abandon()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]
    assert folders.is_sharded(tmp_path / "a.ckpt")


def test_what_does_not_end_is_removed(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_SECONDS_TO_COMPLETE", 0.1)
    writer = begun(tmp_path / "a.ckpt")
    assert held.is_there.wait(30)
    writer.abandon()
    assert not list(tmp_path.iterdir())


def test_nothing_to_abandon(tmp_path: Path) -> None:
    writing.ShardWriter(timedelta(seconds=5), is_connected=False).abandon()
    writer = begun(tmp_path / "a.ckpt")
    writer.wait()
    writer.abandon()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]
