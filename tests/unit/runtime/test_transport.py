from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.errors import TransportError
from tests.integration import jobs
from tests.local_transport import LocalNetwork, LocalTransport
from tests.unit.runtime import peers

SPEC = [TensorSpec((2,), torch.float32)]


def make_pair(timeout: float = 5.0) -> tuple[LocalTransport, LocalTransport]:
    network = LocalNetwork(2, timeout)
    return LocalTransport(network, 0), LocalTransport(network, 1)


def test_messages_of_a_channel_keep_their_order_and_channels_are_apart() -> None:
    sender, receiver = make_pair()
    for value in (1.0, 2.0):
        sender.send([torch.full((2,), value)], 1, channel=1)
    sender.send([torch.full((2,), 3.0)], 1, channel=2)
    assert receiver.receive(SPEC, 0, 2).wait()[0][0] == 3
    first, second = (receiver.receive(SPEC, 0, 1) for _ in range(2))
    assert [first.wait()[0][0].item(), second.wait()[0][0].item()] == [1, 2]


def test_objects_are_copies() -> None:
    sender, receiver = make_pair()
    value = {"a": [1, 2]}
    sender.send_object(value, 1)
    value["a"].append(3)
    assert receiver.receive_object(0) == {"a": [1, 2]}


def test_broadcast_and_gather() -> None:
    zero, one = make_pair()
    zero.broadcast_object("x", 0)
    assert one.broadcast_object(None, 0) == "x"
    assert one.gather_object("b") is None
    assert zero.gather_object("a") == ["a", "b"]


def test_a_message_that_never_comes() -> None:
    _, receiver = make_pair(timeout=0.05)
    with pytest.raises(TransportError, match="rank 1: a message of rank 0 did not come"):
        receiver.receive(SPEC, 0, 1).wait()
    with pytest.raises(TransportError, match="rank 1: a message of rank 0 did not come"):
        receiver.receive_object(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    jobs.preload()
    return tmp_path


def assert_equal(received: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(received, expected, rtol=0, atol=0)


KINDS = ["gloo", "shared memory"]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_exchange_objects_and_tensors(kind: str, folder: Path) -> None:
    noise = random.Random(0).randbytes(80_000)  # noqa: S311 - more than one frame or packet
    # A frame holds 4096 bytes: around that, short, long.
    objects: list[Any] = ["", None, {"a": 1}, noise, b"x" * 4050, b"x" * 4096, list(range(5000))]
    tensors = [
        torch.arange(6.0).reshape(2, 3).T,  # not contiguous
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.arange(4, dtype=torch.int64),
        torch.randn(5, dtype=torch.float64).to(torch.bfloat16),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(1, 3, 2, 4, 5).to(memory_format=torch.channels_last_3d),
    ]
    results = jobs.run(peers.exchange, kind, objects, tensors, 4, folder=folder)
    for rank, (found, gathered, hello) in enumerate(results):
        for step in range(4):
            received, first, second = found[3 * step : 3 * step + 3]
            assert received == [(value, step) for value in objects]
            assert_equal(first, [peers.scaled(t, 1, step) for t in tensors])
            assert_equal(second, [peers.scaled(t, 2, step) for t in tensors])
            assert [t.stride() for t in first[-2:]] == [t.stride() for t in tensors[-2:]]
        assert gathered == ([0, 1] if rank == 0 else None)
        assert hello == "hello"


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "how",
    ["ends", "ends, object", "stalls", pytest.param("stalls, object", marks=pytest.mark.slow)],
)
def test_a_lost_peer_is_an_error_in_bounded_time(kind: str, how: str, folder: Path) -> None:
    job = jobs.run_job(peers.lose_a_peer, kind, how, folder=folder, seconds=60)
    message, seconds = job.ranks[0].value
    assert "rank 0 could not receive from rank 1: it ended or stalled" in message
    assert seconds < 15  # the limit is 3


@pytest.mark.distributed
@pytest.mark.parametrize(("num_messages", "num_bytes"), [(3000, 10), (40, 1 << 20)])
def test_senders_that_are_far_ahead_do_not_block(
    num_messages: int, num_bytes: int, folder: Path
) -> None:
    assert jobs.run(peers.flood, num_messages, num_bytes, folder=folder) == [
        (num_messages, True),
        (num_messages, True),
    ]


@pytest.mark.distributed
def test_a_peer_that_ends_while_the_way_to_it_is_full(folder: Path) -> None:
    job = jobs.run_job(peers.flood_a_dying_peer, folder=folder, seconds=60)
    assert "rank 0 could not send to rank 1" in job.ranks[0].value


@pytest.mark.distributed
def test_shared_memory_is_reused_but_never_under_a_living_tensor(folder: Path) -> None:
    (kept, _), (_, num_buffers) = jobs.run(peers.keep_and_reuse, 50, folder=folder)
    assert kept == [1000.0 * step for step in range(50)] + [0.0]
    # One is kept; with the others the sender is at most 4 steps and 16 messages ahead.
    assert num_buffers <= 1 + 4 + 16 + 1


@pytest.mark.distributed
def test_large_objects_and_probes_leave_no_memory_behind(folder: Path) -> None:
    for is_right, kilobytes in jobs.run(peers.send_weights, folder=folder, seconds=200):
        assert is_right
        assert kilobytes < 1024  # of 4 MB


@pytest.mark.parametrize("kind", ["gloo", "shared memory"])
def test_an_evaluation_does_not_wait_for_what_the_training_takes_later(
    kind: str, folder: Path
) -> None:
    _, done = jobs.run(peers.evaluate_before_a_token_is_taken, kind, 3, folder=folder)
    assert done == ["batch 0", "batch 1", "batch 2", "token"]
