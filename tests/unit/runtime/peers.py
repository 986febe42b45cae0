"""What the processes of the transport's tests do; each gets its rank from the environment."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.errors import TransportError
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.channels import Channel
from lightning_tspipe.runtime.transport.shared_memory import SharedMemoryTransport
from lightning_tspipe.runtime.transport.wired import GlooTransport


def connect(kind: str, seconds: float) -> Transport:
    rank, num_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=seconds)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=limit)
    if kind == "shared memory":
        return SharedMemoryTransport(limit)
    return GlooTransport(torch.device("cpu"), limit)


def scaled(tensor: torch.Tensor, channel: int, step: int) -> torch.Tensor:
    return (tensor * channel + step).to(tensor.dtype)


def exchange(kind: str, objects: list[Any], tensors: list[torch.Tensor], num_steps: int) -> Any:
    """Both ranks send first, then receive: rendezvous sends would deadlock if they blocked."""
    transport = connect(kind, 30)
    peer = 1 - transport.rank
    found: list[Any] = []
    for step in range(num_steps):
        specs = [TensorSpec.of(tensor) for tensor in tensors]
        receipts = {c: transport.receive(specs, peer, c) for c in (1, 2)}
        for value in objects:
            transport.send_object((value, step), peer)
        for channel in (2, 1):  # the other way round than they are awaited
            made = [scaled(tensor, channel, step) for tensor in tensors]
            transport.send(made, peer, channel, specs)
        found.append([transport.receive_object(peer) for _ in objects])
        for channel in (1, 2):
            received = receipts[channel].wait()
            found.append([tensor.clone() for tensor in received])
        transport.finish_step()
    gathered = transport.gather_object(transport.rank)
    hello = transport.broadcast_object("hello" if transport.rank == 1 else None, 1)
    transport.finish_step()
    transport.finish_step()
    dist.barrier()
    dist.destroy_process_group()
    return found, gathered, hello


def evaluate_before_a_token_is_taken(kind: str, num_batches: int) -> list[str]:
    """Rank 0 sends a token in training, which rank 1 takes when the evaluation is over."""
    transport = connect(kind, 5)
    peer, done = 1 - transport.rank, []
    if transport.rank == 0:
        transport.send_object("token", peer, Channel.PACE)
    transport.finish_step()
    for batch in range(num_batches):
        if transport.rank == 0:
            transport.send_object(f"batch {batch}", peer)
        else:
            done.append(transport.receive_object(peer))
        transport.finish_step(in_training=False)
    if transport.rank == 1:
        done.append(transport.receive_object(peer, Channel.PACE))
    for _ in range(2):
        transport.finish_step()
    dist.barrier()
    dist.destroy_process_group()
    return done


def lose_a_peer(kind: str, how: str) -> tuple[str, float]:
    """Rank 1 ends or stalls; what rank 0 gets to know, and after how many seconds."""
    transport = connect(kind, 3)
    if transport.rank == 1:
        transport.receive_object(0)  # rank 0 may still be about to connect
        if how.startswith("ends"):
            os._exit(3)
        time.sleep(6)
        return "", 0.0
    transport.send_object("connected", 1)
    started = time.monotonic()
    try:
        if "object" in how:
            transport.receive_object(1)
        else:
            transport.receive([TensorSpec((2,), torch.float32)], 1, 1).wait()
    except TransportError as error:
        return str(error), time.monotonic() - started
    return "", time.monotonic() - started


def flood(num_messages: int, num_bytes: int) -> tuple[int, bool]:
    """Both ranks send much more than a socket holds before either of them receives."""
    transport = connect("shared memory", 30)
    peer = 1 - transport.rank
    tensor = torch.full((num_bytes,), transport.rank, dtype=torch.uint8)
    for _ in range(num_messages):
        transport.send([tensor], peer, 1)
    specs = [TensorSpec.of(tensor)]
    receipts = [transport.receive(specs, peer, 1) for _ in range(num_messages)]
    received = [receipt.wait()[0] for receipt in receipts]
    right = all(bool((one == peer).all()) for one in received)
    transport.finish_step()
    dist.barrier()
    dist.destroy_process_group()
    return len(received), right


def flood_a_dying_peer() -> str:
    """Rank 1 reads nothing and ends, while the way to it is full."""
    transport = connect("shared memory", 10)
    if transport.rank == 1:
        time.sleep(1)
        os._exit(3)
    try:
        for _ in range(100_000):
            transport.send([torch.zeros(1)], 1, 1)
    except TransportError as error:
        return str(error)
    return ""


def keep_and_reuse(num_steps: int) -> tuple[list[float], int]:
    """Rank 0 keeps the first tensor; rank 1 sends on, in as little memory as it can."""
    transport = connect("shared memory", 30)
    specs = [TensorSpec((1000,), torch.float64)]
    kept: list[float] = []
    first: torch.Tensor | None = None
    for step in range(num_steps):
        if transport.rank == 1:
            transport.send([torch.full((1000,), float(step), dtype=torch.float64)], 0, 1)
        else:
            (tensor,) = transport.receive(specs, 1, 1).wait()
            first = tensor if first is None else first
            kept.append(float(tensor.sum()))
            del tensor
        transport.finish_step()
    if first is not None:
        kept.append(float(first.sum()))
    num_buffers = 0
    if transport.rank == 1:
        assert isinstance(transport, SharedMemoryTransport)
        num_buffers = sum(len(peer.buffers) for peer in transport._peers.values())
    dist.barrier()
    dist.destroy_process_group()
    return kept, num_buffers


def send_weights() -> tuple[bool, int]:
    """Measure the link, send large objects; do they arrive, what is left in shared memory?"""
    transport = connect("shared memory", 30)
    transport.measure_link(torch.device("cpu"))
    peer, right = 1 - transport.rank, True
    for step in range(3):
        weights = torch.full((1 << 20,), float(step))
        if transport.rank == 0:
            transport.send_object(weights, peer)
        else:
            right = right and bool(torch.equal(transport.receive_object(peer), weights))
        transport.finish_step()
        transport.gather_object(step)
        transport.broadcast_object(step, 0)
    dist.barrier()
    transport.finish_step()
    transport.gather_object(0)
    dist.barrier()
    found = right, _shared_kilobytes()
    dist.barrier()
    dist.destroy_process_group()
    return found


def _shared_kilobytes() -> int:
    """Kilobytes in use of the memory that this process shares with its peers."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if not line[0].isupper():  # a mapping begins
            counts = "memfd:lightning-tspipe" in line
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total
