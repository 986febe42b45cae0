"""What a rank may hold on a GPU."""

from __future__ import annotations

import pytest
import torch

from lightning_tspipe.strategy.setup.machine import memory_limit

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60_000, 80_000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_most_of_what_is_free_is_shared_fairly() -> None:
    assert memory_limit(None, GPU) == 54_000
    assert memory_limit(None, GPU, ranks_per_device=2) == 27_000
    assert memory_limit(None, GPU, whatever_is_free=True) == 72_000


def test_what_is_said_counts() -> None:
    assert memory_limit("1KiB", GPU, ranks_per_device=2) == 1024
    assert memory_limit(None, CPU) is None
