"""How much a cache of activations may take."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_tspipe import AutoCache
from lightning_tspipe.caching import ActivationCache, Boundary, Segment, measure
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.late import Late


def test_budgets_that_are_not_given_are_a_part_of_what_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    module = "lightning_tspipe.callbacks.fit_cache"
    monkeypatch.setattr(f"{module}.available_memory", lambda: 8_000_000)
    monkeypatch.setattr(f"{module}.available_disk", lambda folder: 4_000_000 if folder else 0)
    with caplog.at_level(logging.INFO, logger="lightning_tspipe"):
        given = AutoCache(memory="1MB", disk=5)
        assert given.budgets() == (1_000_000, 5)
        assert not caplog.messages
        settings = AutoCache(disk="auto", folder=tmp_path)
        assert settings.budgets() == (2_000_000, 1_000_000)
        assert "2.0 MB of memory and 1.0 MB on disk" in caplog.messages[0]
    assert AutoCache().disk == 0


def test_a_folder_that_is_not_there_has_no_part(tmp_path: Path) -> None:
    settings = AutoCache(disk="auto", folder=tmp_path / "none")
    with pytest.raises(ConfigurationError, match="Give a folder that exists"):
        settings.budgets()


def test_samples_without_space_are_told(caplog: pytest.LogCaptureFixture) -> None:
    callback = AutoCache()
    callback.cache = cache = ActivationCache(8, memory=256)  # for four of them
    frozen = [Segment(Boundary("trunk"), lambda x: x)]
    trainer: Any = SimpleNamespace(is_global_zero=True, current_epoch=3, strategy=None)
    for rate in (0.0, 0.5):
        caplog.clear()
        cache.outputs(range(8), torch.ones(8, 8), frozen)
        with caplog.at_level(logging.INFO, logger="lightning_tspipe"):
            assert callback.take_hit_rate(trainer) == rate
        assert f"hits={8 * rate:.0f}, pushed=0, misses={8 - 8 * rate:.0f}" in caplog.messages[0]
        assert "epoch 3: 4 samples did not fit into the cache" in caplog.messages[1]
    callback.restore()


def test_at_the_end_of_an_epoch_others_find_what_a_gpu_was_computing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Late, "is_there", property(lambda _: False))
    callback = AutoCache()
    callback.cache = cache = ActivationCache(4, memory=1_000_000)
    frozen = [Segment(Boundary("trunk"), lambda x: x)]
    trainer: Any = SimpleNamespace(is_global_zero=True, current_epoch=0, strategy=None)
    other = ActivationCache.attach(cache.handle)
    cache.outputs(range(4), torch.ones(4, 8), frozen)
    assert not other.behind(range(4), frozen).any()
    callback.take_hit_rate(trainer)
    assert other.behind(range(4), frozen).all()
    other.close()
    callback.restore()


def test_a_disk_that_has_filled_up_is_never_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_tspipe.caching.arena.available_disk", lambda _: 0)
    worth = measure(torch.nn.Linear(4, 4), torch.ones(2, 4), disk=True)
    assert not worth.by_disk
    assert worth.disk == float("inf")
