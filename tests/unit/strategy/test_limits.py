"""What a rank may hold on a GPU."""

from __future__ import annotations

import pytest
import torch

from lightning_tspipe.strategy.setup.options import SetupOptions

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60_000, 80_000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_most_of_what_is_free_is_shared_fairly() -> None:
    assert SetupOptions().bytes_on(GPU) == 54_000
    assert SetupOptions(ranks_per_device=2).bytes_on(GPU) == 27_000
    assert SetupOptions(costs="flops").bytes_on(GPU) == 72_000


def test_what_is_said_counts() -> None:
    assert SetupOptions(memory_limit="1KiB", ranks_per_device=2).bytes_on(GPU) == 1024
    assert SetupOptions().bytes_on(CPU) is None
