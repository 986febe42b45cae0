from __future__ import annotations

import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest
import torch

from benchmarks.crews.gate import Batch, Gate, GatedLoader
from benchmarks.crews.messages import Asks, Bytes, Weighs

SECONDS = 10.0


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Gate]]:
    ours, theirs = Pipe()
    gate = Gate(theirs)
    gate.listen()
    yield ours, gate
    ours.close()


def receive(connection: Connection) -> object:
    assert connection.poll(SECONDS), "no message"
    return connection.recv()


def test_loader_hands_out_one_batch_per_token(ends: tuple[Connection, Gate]) -> None:
    ours, gate = ends
    fetched: list[float] = []

    def note(loader: GatedLoader) -> None:
        for batch in loader:
            fetched.append(float(batch[0]))  # noqa: PERF401 - read while the loop waits

    batches: list[Batch] = [(torch.tensor(0.0),), (torch.tensor(1.0),)]
    threading.Thread(target=note, args=(GatedLoader(gate, batches),), daemon=True).start()
    first = receive(ours)
    assert isinstance(first, Asks)
    assert len(first.stamps) == 1
    assert fetched == []
    for expected in ([0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]):
        ours.send(3)
        asks = receive(ours)
        assert isinstance(asks, Asks)
        assert fetched == expected
        assert len(asks.stamps) == 4  # three fetches, and the one that has to wait
        assert list(asks.stamps) == sorted(asks.stamps)


def test_gate_answers_while_no_loader_runs(ends: tuple[Connection, Gate]) -> None:
    ours, gate = ends
    gate.held = Bytes(student=1, gradients=2, optimizer=3, fixed=4)
    ours.send(0)
    assert receive(ours) == Weighs(gate.held)
    assert gate.held.total == 10
