"""Tensors by NCCL's rules: each is enforced where ranks are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.errors import TransportError
from lightning_tspipe.runtime.transport import channels
from lightning_tspipe.runtime.transport.channels import (
    Channel,
    Edge,
    Lane,
    edges_around,
    edges_from,
    lane_of,
)
from lightning_tspipe.runtime.transport.wired import WIRE_TYPES, OrderedTransport
from tests.strict import BrokenRuleError, StrictNetwork
from tests.threads import run_on_threads

A, B = Channel.STUDENT_ACTIVATION, Channel.STUDENT_GRADIENT
SPEC = [TensorSpec((2,), torch.float32)]
ONES = [torch.ones(2)]
BOTH_WAYS = edges_around((0, 1), Lane.PROGRAM)


def on_two(*work: Callable[[OrderedTransport], Any], seconds: float = 5.0) -> list[Any]:
    network = StrictNetwork(2, seconds)
    return run_on_threads(lambda rank: work[rank](network.transport(rank)), 2, seconds=30)


def opened(work: Callable[[OrderedTransport], Any]) -> Callable[[OrderedTransport], Any]:
    def run(transport: OrderedTransport) -> Any:
        transport.open(BOTH_WAYS)
        return work(transport)

    return run


def nothing(_: OrderedTransport) -> None:
    return


def test_every_channel_beside_a_program_has_its_own_lane() -> None:
    beside = {channel: lane_of(channel) for channel in Channel if lane_of(channel)}
    assert len(set(beside.values())) == len(beside) == len(Lane) - 1


def test_edges() -> None:
    assert edges_from(2, (0, 2), Lane.FIELDS) == {Edge(2, 0, Lane.FIELDS)}
    ring = {Edge(0, 2, Lane.FIELDS), Edge(2, 5, Lane.FIELDS), Edge(5, 0, Lane.FIELDS)}
    assert edges_around((0, 2, 5), Lane.FIELDS) == ring
    assert edges_around((3,), Lane.FIELDS) == set()


def test_an_edge_without_a_communicator_passes_through_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channels, "MAX_COMMUNICATORS", 1)

    def work(transport: OrderedTransport) -> float:
        other = 1 - transport.rank
        receipt = transport.receive(SPEC, other, A)
        transport.send([ONES[0] + transport.rank], other, A)
        return float(receipt.wait()[0].sum())

    network = StrictNetwork(2, 5.0)
    found = run_on_threads(lambda rank: opened(work)(network.transport(rank)), 2, seconds=30)
    assert found == [4.0, 2.0]
    assert list(network.queues) == [Edge(0, 1, Lane.PROGRAM)]  # the other one is no edge of it


def test_both_ranks_may_begin_with_a_receive() -> None:
    def work(transport: OrderedTransport) -> float:
        receipt = transport.receive(SPEC, 1 - transport.rank, A)
        transport.send([torch.full((2,), float(transport.rank))], 1 - transport.rank, A)
        return float(receipt.wait()[0][0])

    assert on_two(opened(work), opened(work)) == [1, 0]


def test_an_edge_that_is_not_opened_is_a_deadlock() -> None:
    with pytest.raises(BrokenRuleError, match=r"STUDENT_ACTIVATION on .* not opened: a deadlock"):
        on_two(lambda transport: transport.receive(SPEC, 1, A), nothing)


def test_opening_holds_both_ranks_until_both_have_come() -> None:
    with pytest.raises(TransportError, match=r"rank 0 opened .*, and the other rank did not"):
        on_two(lambda transport: transport.open(BOTH_WAYS), nothing, seconds=0.2)


def test_an_edge_is_opened_once() -> None:
    def work(transport: OrderedTransport) -> None:
        for _ in range(2):
            transport.open(BOTH_WAYS)
            transport.open([*BOTH_WAYS, Edge(2, 3, Lane.PROGRAM)])  # of others: nothing to do

    on_two(work, work)


@pytest.mark.parametrize(
    ("channel", "spec"),
    [(B, SPEC), (A, [TensorSpec((3,), torch.float32)]), (A, [TensorSpec((2,), torch.int32)])],
)
def test_what_comes_next_must_be_what_was_asked_for(
    channel: Channel, spec: list[TensorSpec]
) -> None:
    with pytest.raises(BrokenRuleError, match=r"sent .*STUDENT_ACTIVATION.* asked for"):
        on_two(
            opened(lambda transport: transport.send(ONES, 1, A)),
            opened(lambda transport: transport.receive(spec, 0, channel).wait()),
        )


def test_what_is_sent_must_stay_as_it_is() -> None:
    sent = threading.Event()

    def send(transport: OrderedTransport) -> None:
        tensor = torch.ones(2)
        transport.send([tensor], 1, A)
        tensor.zero_()
        sent.set()

    def receive(transport: OrderedTransport) -> None:
        sent.wait(5)
        transport.receive(SPEC, 0, A).wait()

    with pytest.raises(BrokenRuleError, match="changed while it was under way"):
        on_two(opened(send), opened(receive))


def test_nothing_is_there_before_it_was_waited_for() -> None:
    def early(transport: OrderedTransport) -> Any:
        receipt: Any = transport.receive(SPEC, 0, A)
        before = receipt.wait.args[0][0].clone()
        transport.send_object("asked", 0)
        return before, receipt.wait()[0]

    def late(transport: OrderedTransport) -> None:
        transport.receive_object(1)
        transport.send(ONES, 1, A)

    _, (before, after) = on_two(opened(late), opened(early))
    assert before.isnan().all()
    assert after.equal(torch.ones(2))


EVERY_TYPE = [
    torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, *sorted(WIRE_TYPES, key=str),
]  # fmt: skip


@pytest.mark.parametrize("dtype", EVERY_TYPE, ids=str)
def test_types_that_nccl_has_not_travel_as_bytes(dtype: torch.dtype) -> None:
    made = [torch.arange(6).reshape(2, 3).t().to(dtype), torch.tensor(1).to(dtype)]
    made.append(torch.empty(0, 3, dtype=dtype))

    specs = [TensorSpec.of(x) for x in made]

    def receive(transport: OrderedTransport) -> Any:
        return transport.receive(specs, 0, A).wait()

    _, found = on_two(opened(lambda transport: transport.send(made, 1, A, specs)), opened(receive))
    for one, other in zip(found, made, strict=True):
        assert one.dtype == dtype
        assert one.shape == other.shape
        assert (
            one.contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(other.contiguous().view(-1).view(torch.uint8))
        )


def test_a_closed_transport_can_be_opened_again() -> None:
    def work(transport: OrderedTransport) -> float:
        value = 0.0
        for _ in range(2):
            transport.open(BOTH_WAYS)
            receipt = transport.receive(SPEC, 1 - transport.rank, A)
            transport.send(ONES, 1 - transport.rank, A)
            value = float(receipt.wait()[0].sum())
            transport.gather_object(None)
            transport.broadcast_object(None, 0)
            transport.close()
            time.sleep(0.05)
        return value

    assert on_two(work, work) == [2, 2]


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 2, 4, 5), (2, 1, 4, 5), (2, 3)])
def test_a_tensor_arrives_in_the_memory_format_that_is_asked_for(shape: tuple[int, ...]) -> None:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    values = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    innermost = values.to(memory_format=formats.get(len(shape), torch.contiguous_format))
    sent = [(values, innermost), (innermost, values), (innermost, innermost), (values, values)]
    specs = [TensorSpec.of(asked) for _, asked in sent]

    def send(transport: OrderedTransport) -> None:
        transport.send([tensor for tensor, _ in sent], 1, A, specs)

    def receive(transport: OrderedTransport) -> list[torch.Tensor]:
        return transport.receive(specs, 0, A).wait()

    _, received = on_two(opened(send), opened(receive))
    for tensor, (_, asked) in zip(received, sent, strict=True):
        assert torch.equal(tensor, asked)
        assert TensorSpec.of(tensor) == TensorSpec.of(asked)
    assert TensorSpec.of(innermost).order == (
        (0, *range(2, len(shape)), 1) if len(shape) > 2 and shape[1] > 1 else ()
    )
