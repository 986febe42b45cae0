"""How fast the devices of a job sum gradients and gather parameters, as DDP and FSDP2 do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_tspipe.planning.cluster import Link
from lightning_tspipe.planning.overlap import BUCKET, Collectives

# Renamed in torch 2.14, where the old names warn.
_GATHER: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_SCATTER: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_ROUNDS = 6
_WIDTH = 256
"""Rows and columns of the matrices that are multiplied meanwhile: they stay in caches."""


def measure_collectives(device: torch.device) -> Collectives:
    """Measure collectives between all processes; every one calls it, and has the same then.

    Each runs with a small message and with one of a bucket of DDP. How much of a sum a device can
    hide is seen by computing for about as long meanwhile.

    Args:
        device: Where this process computes.
    """
    number = dist.get_world_size()
    whole = torch.ones(BUCKET // 4 // number * number, device=device)
    small = torch.ones(2 * number, device=device)
    rounds = math.ceil(math.log2(number))

    def link(run: Callable[[torch.Tensor], Any], ways: int) -> tuple[Link, float]:
        short, long = (_seconds(partial(run, each), device) for each in (small, whole))
        share = (number - 1) / number * (whole.nbytes - small.nbytes)
        taken = max(long - short, long / 10)
        return Link(short / (ways * rounds), ways * share / taken), long

    def gather(tensor: torch.Tensor) -> None:
        _GATHER(tensor, tensor.chunk(number)[dist.get_rank()].clone())

    def scatter(tensor: torch.Tensor) -> None:
        _SCATTER(torch.empty_like(tensor.chunk(number)[0]), tensor)

    summing, seconds = link(dist.all_reduce, 2)
    return Collectives(
        number, summing, link(gather, 1)[0], link(scatter, 1)[0], _overlap(whole, seconds)
    )


def _overlap(whole: torch.Tensor, communicating: float) -> float:
    """The share of a sum's time in which a device computes as if there were none."""
    device = whole.device
    matrix = torch.ones(_WIDTH, _WIDTH, device=device) / _WIDTH

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    # Twice as long as the sum, which then ends in any case before the computing does.
    times = max(1, round(2 * communicating / (_seconds(lambda: compute(100), device) / 100)))
    computing = _seconds(lambda: compute(times), device)

    def both() -> None:
        work = dist.all_reduce(whole, async_op=True)
        compute(times)
        assert work is not None
        work.wait()

    together = _seconds(both, device)
    hidden = (computing + communicating - together) / min(computing, communicating)
    return min(1.0, max(0.0, hidden))


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """The shortest time of a few, of the process that takes longest; all run it at once."""
    found = []
    for _ in range(_ROUNDS):
        dist.barrier()
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - started)
    shortest = torch.tensor(min(found[1:]), device=device, dtype=torch.float64)
    dist.all_reduce(shortest, dist.ReduceOp.MAX)
    return float(shortest)
