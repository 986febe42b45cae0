from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_tspipe.strategy.training.data import copied_beside, to_device

CUDA = torch.device("cuda:0")


class Stream:
    """Notes who waits for whom; a GPU's streams need a driver."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes, self.device = name, notes, CUDA

    def wait_stream(self, other: Stream) -> None:
        self.notes.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    computing = Stream("compute", found)

    @contextmanager
    def within(stream: Stream) -> Iterator[None]:
        found.append(f"on {stream.name}")
        yield
        found.append(f"off {stream.name}")

    def record(tensor: Tensor, stream: Stream) -> None:
        found.append(f"{stream.name} uses {tuple(tensor.shape)}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream("copies", found))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: computing)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(Tensor, "record_stream", record)
    return found


def test_a_batch_is_copied_beside_what_is_computed(notes: list[str]) -> None:
    with FakeTensorMode(), copied_beside(CUDA):
        x = torch.ones(2).to(CUDA) + 1
        torch.ones(3).double()
        x.to(CUDA)
        torch.ones(4).to(torch.float64)
    assert notes == [
        "on copies", "off copies", "compute waits for copies", "compute uses (2,)",
        "on copies", "off copies",  # stays on the host
    ]  # fmt: skip


def test_a_cpu_has_no_streams(notes: list[str]) -> None:
    with copied_beside(torch.device("cpu")):
        assert to_device([torch.ones(2)], torch.device("cpu"))[0].tolist() == [1, 1]
    assert notes == []
