"""Laps of a device: on a GPU, by events and with one wait."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_tspipe.profiling.atoms import Clock


def test_on_a_cpu() -> None:
    clock = Clock(torch.device("cpu"))
    begin = clock.now()
    time.sleep(0.02)
    (found,) = clock.seconds([{"forward": (begin, clock.now())}])
    assert found["forward"] == pytest.approx(0.02, abs=0.015)


def test_on_a_gpu_all_laps_wait_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Event:
        number = 0

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, _: object) -> None:
            Event.number += 1
            self.at = 10.0 * Event.number

        def elapsed_time(self, other: Event) -> float:
            asked.append("time")
            return other.at - self.at  # in milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: asked.append("wait"))
    clock = Clock(torch.device("cuda"))
    first, second, third = (clock.now() for _ in range(3))
    assert not asked
    (found,) = clock.seconds([{"forward": (first, second), "backward": (first, third)}])
    assert asked == ["wait", "time", "time"]
    assert found == pytest.approx({"forward": 0.01, "backward": 0.02})
