"""Messages between processes by gloo: over sockets, matched by tags."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.runtime.transport.base import (
    Outgoing,
    Receipt,
    Transport,
    as_they_travel,
    failure,
)
from lightning_tspipe.runtime.transport.channels import Channel

_FRAME = 4096
_LENGTH_BYTES = 8


class GlooTransport(Transport):
    """Ranks are processes; CPU tensors travel directly, CUDA tensors through pinned memory.

    Args:
        ranks: The global ranks of the pipeline, in its order.
        device: Where received tensors should be.
        timeout: How long a receive waits for a message of a live peer.
    """

    is_tight = True

    def __init__(self, ranks: Sequence[int], device: torch.device, timeout: timedelta) -> None:
        self.num_ranks = len(ranks)
        self.rank = list(ranks).index(dist.get_rank())
        self._device = device
        self._group: Any = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
        self._pool: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self._outgoing = Outgoing()

    @override
    def send(
        self,
        tensors: Sequence[Tensor],
        target: int,
        channel: Channel,
        specs: Sequence[TensorSpec] | None = None,
    ) -> None:
        for tensor in as_they_travel(tensors, specs):
            host = self._to_host(tensor)
            try:
                work = dist.isend(host, group=self._group, group_dst=target, tag=channel)
            except RuntimeError as error:
                raise failure(self.rank, "send to", target, error) from error
            self._outgoing.add(work, host)

    def _to_host(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
        return host

    @override
    def receive(self, specs: Sequence[TensorSpec], source: int, channel: Channel) -> Receipt:
        buffers, works = [], []
        for spec in specs:
            buffer = self._buffer(spec)
            try:
                work = dist.irecv(buffer, group=self._group, group_src=source, tag=channel)
            except RuntimeError as error:
                raise failure(self.rank, "receive from", source, error) from error
            buffers.append(buffer)
            works.append(work)
        return _GlooReceipt(self, tuple(specs), buffers, works, source)

    def _buffer(self, spec: TensorSpec) -> Tensor:
        free = self._pool.get((torch.Size(spec.memory_shape), spec.dtype))
        if free:
            return free.pop()
        pinned = self._device.type == "cuda"
        return torch.empty(spec.memory_shape, dtype=spec.dtype, pin_memory=pinned)

    @override
    def recycle(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if tensor.device.type == "cpu":
                buffer = TensorSpec.of(tensor).to_memory(tensor.detach())
                self._pool.setdefault((buffer.shape, buffer.dtype), []).append(buffer)

    @override
    def finish_step(self, *, in_training: bool = True) -> None:
        self._outgoing.finish_step(
            self.steps_under_way,
            lambda work: self.wait(work, "send to", None),
            in_training=in_training,
        )

    def wait(self, work: Any, verb: str, peer: int | None) -> None:
        """Wait for one transfer."""
        try:
            work.wait()
        except RuntimeError as error:
            raise failure(self.rank, verb, peer, error) from error

    def on_device(self, tensor: Tensor) -> Tensor:
        """A received tensor, where it is needed."""
        if self._device.type == "cpu":
            return tensor
        copied = tensor.to(self._device, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
        self._pool.setdefault((tensor.shape, tensor.dtype), []).append(tensor)
        return copied

    @override
    def send_object(self, value: Any, target: int, channel: Channel = Channel.CONTROL) -> None:
        buffer = io.BytesIO()
        pickle.dump(value, buffer, protocol=pickle.HIGHEST_PROTOCOL)
        payload = buffer.getvalue()
        head = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[: _FRAME - _LENGTH_BYTES]
        parts = [_bytes_tensor(head.ljust(_FRAME, b"\0"))]
        if len(payload) > _FRAME - _LENGTH_BYTES:
            parts.append(_bytes_tensor(payload[_FRAME - _LENGTH_BYTES :]))
        for part in parts:
            work = dist.isend(part, group=self._group, group_dst=target, tag=channel)
            self._outgoing.add(work, part)

    @override
    def receive_object(self, source: int, channel: Channel = Channel.CONTROL) -> Any:
        frame = self._receive_bytes(_FRAME, source, channel)
        length = int.from_bytes(frame[:_LENGTH_BYTES], "little")
        payload = frame[_LENGTH_BYTES : _LENGTH_BYTES + length]
        rest = length - (_FRAME - _LENGTH_BYTES)
        if rest > 0:
            payload += self._receive_bytes(rest, source, channel)
        return pickle.loads(payload)  # noqa: S301 - a rank of this job wrote it

    def _receive_bytes(self, length: int, source: int, channel: Channel) -> bytes:
        buffer = torch.empty(length, dtype=torch.uint8)
        try:
            work = dist.irecv(buffer, group=self._group, group_src=source, tag=channel)
        except RuntimeError as error:
            raise failure(self.rank, "receive from", source, error) from error
        self.wait(work, "receive from", source)
        return buffer.numpy().tobytes()


@dataclass
class _GlooReceipt(Receipt):
    transport: GlooTransport
    specs: tuple[TensorSpec, ...]
    buffers: list[Tensor]
    works: list[Any]
    source: int

    @override
    def wait(self) -> list[Tensor]:
        for work in self.works:
            self.transport.wait(work, "receive from", self.source)
        return [
            spec.from_memory(self.transport.on_device(buffer))
            for spec, buffer in zip(self.specs, self.buffers, strict=True)
        ]


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
