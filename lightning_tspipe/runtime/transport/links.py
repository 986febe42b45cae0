"""How fast neighbouring ranks send to each other, measured by a few messages at the start."""

from __future__ import annotations

import math
import time

import torch

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.planning.cluster import Link
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.channels import Channel, edges_along

NOMINAL = Link(1.5e-4, 4.0e9)
"""What plans assume that are made without measuring: processes of one machine."""

_SMALL = 8
_LARGE = {"cpu": 2**22, "cuda": 2**25}
_ROUNDS = 8


def measure_link(transport: Transport, device: torch.device) -> Link:
    """The slowest link between neighbours, the same on all ranks; every rank calls it.

    Neighbours send a message there and back: half of the shortest time is that of one message, of a
    small one the latency, and the rest of a large one its bytes'. Every other pair does so at the
    same time. Numbers have one digit, so that two measurements give one plan as a rule.

    Args:
        transport: Of a pipeline of two ranks or more.
        device: Where this rank's tensors are.
    """
    transport.open(edges_along(transport.num_ranks))
    found = []
    for first in (0, 1):
        is_asked = (transport.rank - first) % 2 == 1
        peer = transport.rank - 1 if is_asked else transport.rank + 1
        if not 0 <= peer < transport.num_ranks:
            continue
        small, large = _SMALL, _LARGE[device.type]
        short, long = (
            _there_and_back(transport, peer, size, device, answers=is_asked) / 2
            for size in (small, large)
        )
        if not is_asked:
            # Where starting takes nearly all of the time, how long the rest took is noise.
            found.append((short, large / max(long - short, long / 10)))
    gathered = transport.gather_object(found)
    slowest = None
    if gathered is not None:
        links = [link for of_rank in gathered for link in of_rank]
        latencies, bandwidths = zip(*links, strict=True)
        slowest = _one_digit(max(latencies)), _one_digit(min(bandwidths))
    return Link(*transport.broadcast_object(slowest, 0))


def _there_and_back(
    transport: Transport, peer: int, size: int, device: torch.device, *, answers: bool
) -> float:
    """Seconds of the fastest message of so many bytes to the peer and back; the first warms up."""
    message = torch.ones(size, dtype=torch.uint8, device=device)
    spec, fastest = TensorSpec.of(message), math.inf
    for number in range(_ROUNDS + 1):
        started = time.perf_counter()
        if not answers:
            transport.send([message], peer, Channel.PROBES)
        received = transport.receive([spec], peer, Channel.PROBES).wait()
        if answers:
            transport.send(received, peer, Channel.PROBES)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        if number:
            fastest = min(fastest, time.perf_counter() - started)
    return fastest


def _one_digit(value: float) -> float:
    return float(f"{value:.0e}")
