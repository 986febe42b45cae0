"""What a rank may hold on a GPU."""

from __future__ import annotations

import pytest
import torch

from lightning_tspipe.strategy.setup.options import SetupOptions, memory_limit

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60_000, 80_000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_most_of_what_is_free_is_shared_fairly() -> None:
    assert memory_limit(SetupOptions(), GPU) == 54_000
    assert memory_limit(SetupOptions(ranks_per_device=2), GPU) == 27_000
    assert memory_limit(SetupOptions(costs="flops"), GPU) == 72_000


def test_what_is_said_counts() -> None:
    assert memory_limit(SetupOptions(memory_limit="1KiB", ranks_per_device=2), GPU) == 1024
    assert memory_limit(SetupOptions(), CPU) is None
