"""Gradients of peers are averaged in buckets, whatever each of them has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_tspipe.errors import ConfigurationError, TransportError
from lightning_tspipe.ir.action import Action
from lightning_tspipe.runtime.transport.replicas import (
    REST,
    GradientReduction,
    default_group,
    gather_among,
    make_groups,
    reduce_among,
)
from tests.integration.jobs import run, run_job


def connect(seconds: float = 30.0) -> int:
    """Join the job's process group; this rank."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
    return rank


def gradients(*owners: nn.Parameter) -> list[Tensor]:
    return [p.grad for p in owners if p.grad is not None]


def parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size)) for size in sizes]


def backward(
    made: GradientReduction, steps: Sequence[tuple[str, Sequence[tuple[nn.Parameter, float]]]]
) -> list[int]:
    """Run actions that add to gradients; how many buckets were under way after each."""
    losses = {
        Action.parse(name): sum((value * p).sum() for p, value in terms) for name, terms in steps
    }
    sent: list[int] = []

    def execute(actions: Sequence[Action]) -> None:
        for action in actions:
            loss = losses[action]
            if isinstance(loss, Tensor):
                loss.backward()
            sent.append(made._num_sent)

    made.run(list(losses), execute)
    return sent


def average(first: list[nn.Parameter], second: list[nn.Parameter], rank: int) -> Any:
    own = 1.0 + rank
    made = GradientReduction({REST: first, 0: second}, dist.group.WORLD, bucket_bytes=24)
    found = []
    for _ in range(2):
        for p in (*first, *second):
            p.grad = None
        # Each rank has no gradient of its own for one parameter, and none has one for the last.
        used = [p for i, p in enumerate(second[:-1]) if i != rank]
        sent = backward(
            made,
            [("0B0", [(p, own) for p in second[:-1]]), ("0T0+1", []),
             ("0B1", [(p, own) for p in used]), ("1T0+1", [])],
        )  # fmt: skip
        found.append((sent, [None if p.grad is None else p.grad.tolist() for p in second]))
    return found, len(made._buckets)


def means() -> Any:
    rank = connect()
    first, second = parameters(2), parameters(3, 2, 4, 1)
    result = average(first, second, rank)
    return result, [p.grad for p in first]


def test_means_of_what_is_there(tmp_path: Path) -> None:
    for (found, num_buckets), rest in run(means, num_ranks=2, folder=tmp_path):
        assert rest == [None]
        # Unit 1 gives rank 0 nothing for parameter 0, and rank 1 nothing for parameter 1.
        expected = [[(1 + 4) / 2] * 3, [(2 + 2) / 2] * 2, [(2 + 4) / 2] * 4, None]
        for sent, gradients in found:
            assert gradients == expected
            assert sent[:2] == [1, 1]  # what the loss reads, at once
            assert sent[2:] == [1, num_buckets]  # the rest, while the teacher runs ahead


def in_the_middle() -> Any:
    """The buckets that left during the last backward itself."""
    connect()
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    made = GradientReduction({0: list(layers.parameters())}, dist.group.WORLD, bucket_bytes=576)
    left: list[int] = []
    layers[1].register_full_backward_hook(lambda *_: left.append(made._num_sent))
    loss = layers(torch.ones(2, 8, requires_grad=True)).sum()
    made.run([Action.parse("0B0")], lambda actions: loss.backward() if actions else None)
    return left, len(made._buckets)


def test_buckets_leave_during_the_backward(tmp_path: Path) -> None:
    for left, num_buckets in run(in_the_middle, num_ranks=2, folder=tmp_path):
        assert num_buckets == 4
        assert 0 < left[0] < num_buckets


def thaw() -> Any:
    connect()
    frozen, trained = parameters(2, 2)
    frozen.requires_grad = False
    made = GradientReduction({0: [frozen, trained]}, dist.group.WORLD)
    rank = dist.get_rank()
    backward(made, [("0B0", [(trained, 1.0 + rank)])])
    before = trained.grad.clone()
    frozen.requires_grad_()
    backward(made, [("0B0", [(trained, 0.0), (frozen, 4.0 * rank)])])
    trained.requires_grad = False
    frozen.grad = None
    backward(made, [("0B0", [(frozen, 2.0 * rank)])])
    return [gradient.tolist() for gradient in (before, *gradients(frozen))]


def test_what_is_frozen_and_thawed_later(tmp_path: Path) -> None:
    assert run(thaw, num_ranks=2, folder=tmp_path) == [[[1.5, 1.5], [1.0, 1.0]]] * 2


def with_sparse_gradients() -> None:
    connect()
    embedding = nn.Embedding(4, 2, sparse=True)
    made = GradientReduction({0: list(embedding.parameters())}, dist.group.WORLD)
    loss = embedding(torch.tensor([1])).sum()
    made.run([Action.parse("0B0")], lambda actions: loss.backward() if actions else None)


def with_a_lost_peer() -> None:
    if connect(seconds=5) == 1:
        return
    made = GradientReduction({0: parameters(3)}, dist.group.WORLD)
    made.run([], lambda _: None)


def test_what_can_go_wrong(tmp_path: Path) -> None:
    job = run_job(with_sparse_gradients, num_ranks=2, folder=tmp_path)
    assert all("sparse=False" in error for error in job.errors)
    assert ConfigurationError.__name__ in job.errors[0]
    job = run_job(with_a_lost_peer, num_ranks=2, folder=tmp_path, seconds=30)
    assert TransportError.__name__ in job.errors[0]
    assert "could not average gradients" in job.errors[0]
    assert job.ranks[0].seconds < 20


def talk() -> Any:
    """Two pipelines of two ranks."""
    rank = connect()
    pipeline, peers = make_groups(2, 2, "gloo", timedelta(seconds=30), torch.device("cpu"))
    with default_group(pipeline):
        inside = dist.new_group([0, 1], backend="gloo")
        numbers = dist.get_rank(), dist.get_world_size()
    total = torch.tensor(rank)
    dist.all_reduce(total, group=inside)
    with default_group(peers):
        replica = dist.get_rank(), dist.get_world_size()
        mean = torch.tensor(float(rank))
        dist.all_reduce(mean)
    x = torch.tensor([1.0 + rank], requires_grad=True)
    gathered = gather_among(x, peers, with_gradients=True)
    (gathered * torch.tensor([[1.0], [10.0]]) * (1 + rank)).sum().backward()
    largest = reduce_among(torch.tensor(rank), peers, "max")
    average = reduce_among(torch.tensor(float(rank)), peers, "mean")
    return {
        "pipeline": numbers, "total": int(total), "replica": replica, "mean": float(mean),
        "gathered": gathered.flatten().tolist(), "gradient": x.grad.tolist(),
        "largest": int(largest), "average": float(average), "world": dist.get_world_size(),
    }  # fmt: skip


@pytest.mark.parametrize("num_ranks", [4])
def test_groups(num_ranks: int, tmp_path: Path) -> None:
    ranks = run(talk, num_ranks=num_ranks, folder=tmp_path)
    assert [rank["pipeline"] for rank in ranks] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [rank["replica"] for rank in ranks] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [rank["total"] for rank in ranks] == [1, 1, 5, 5]
    assert [rank["mean"] for rank in ranks] == [2, 4, 2, 4]
    assert [rank["average"] for rank in ranks] == [1, 2, 1, 2]
    assert [rank["largest"] for rank in ranks] == [2, 3, 2, 3]
    assert [rank["gathered"] for rank in ranks] == [[1, 3], [2, 4], [1, 3], [2, 4]]
    # Of all replicas' losses, with respect to this one's part.
    assert [rank["gradient"] for rank in ranks] == [[1 + 3], [2 + 4], [40], [60]]
    assert {rank["world"] for rank in ranks} == {4}
