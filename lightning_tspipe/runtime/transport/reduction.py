"""Data parallelism: the mean of the gradients over the replicas, while the backward still runs.

The parameters of a rank are put into *buckets*, in the order in which their gradients become final.
A full bucket is on its way while the backward goes on; nobody waits before all of it has run::

    backward of the last unit    ██ layer 3 ██ layer 2 ██ layer 1 ██ teacher, one batch ahead ██
    buckets                                  ░░ 3, 2 ░░░░░░░░    ░░ 1 ░░░░░░░░
                                             sum over replicas    sum over replicas

Only the last backward of a stage makes gradients final: those of earlier micro-batches are added up
first. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB
2020, section 3.2, describes buckets and overlap for a single backward.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_tspipe.errors import ConfigurationError, TransportError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.runtime.faults.failures import first_line
from lightning_tspipe.runtime.recording import Recorder

_BUCKET_BYTES = 25 * 2**20
_BACKWARDS = frozenset({Op.BACKWARD, Op.INPUT_BACKWARD, Op.WEIGHT_BACKWARD})
REST = -1
"""Stands for the stage of what belongs to none: the parameters that only the loss reads."""


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients travel together.

    Attributes:
        parameters: The parameters, of one dtype on one device.
        flat: Their gradients one after another, then for each whether there is one.
        views: The parts of ``flat``, in the shapes of the parameters.
        missing: Parameters whose gradients are not final yet.
        work: The reduction under way.
    """

    parameters: list[nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    missing: set[nn.Parameter] = field(default_factory=set)
    work: Any = None


class GradientReduction:
    """Averages the gradients of one rank's parameters over its peers.

    All peers start the same reductions in the same order, whatever the order in which their
    gradients come. A parameter without a gradient counts as zero where another replica has one, and
    stays without where none has.

    Args:
        stages: The parameters of each of this rank's stages, in the order of the forward; under
            ``REST`` those of no stage.
        peers: The group of peers.
        bucket_bytes: A bucket is sent when it holds so much.
    """

    def __init__(
        self,
        stages: Mapping[int, Sequence[nn.Parameter]],
        peers: Any,
        bucket_bytes: int = _BUCKET_BYTES,
    ) -> None:
        self._peers = peers
        self._num_replicas = dist.get_world_size(peers)
        self._bucket_bytes = bucket_bytes
        self._known = {stage: tuple(dict.fromkeys(ps)) for stage, ps in stages.items()}
        self._num_sent = 0
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._fill()

    def _fill(self) -> None:
        """Put into buckets what is trained, or was so before: it may only be off for a while."""
        self._stages = {
            stage: [p for p in parameters if p.requires_grad or p in self._bucket_of]
            for stage, parameters in self._known.items()
        }
        # What the loss reads is final first, then the last stage, from its end to its beginning.
        order = sorted(self._stages, key=lambda stage: (stage != REST, -stage))
        self._buckets = [
            _bucket(group)
            for stage in order
            for group in _divide(reversed(self._stages[stage]), self._bucket_bytes)
        ]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        everything = [p for parameters in self._known.values() for p in parameters]
        self._untrained = [p for p in everything if p not in self._bucket_of]

    def run(
        self,
        actions: Sequence[Action],
        execute: Callable[[Sequence[Action]], None],
        recorder: Recorder,
    ) -> None:
        """Run a backward; afterwards every gradient is the mean over the replicas.

        Args:
            actions: What this rank does after the backward of the loss.
            execute: Runs some of the actions.
            recorder: Notes the wait at the end.

        Raises:
            TransportError: Another replica ended, or said nothing for too long.
        """
        last = {a.stage: i for i, a in enumerate(actions) if a.op in _BACKWARDS}
        self._start()
        self._complete(REST)
        start = 0
        for stage, index in sorted(last.items(), key=lambda item: item[1]):
            execute(actions[start:index])
            with self._last_backward(stage):
                execute(actions[index : index + 1])
            start = index + 1
        execute(actions[start:])
        started = time.perf_counter()
        self._finish()
        recorder.paused("reduce", started)

    def _start(self) -> None:
        if any(parameter.requires_grad for parameter in self._untrained):
            self._fill()
        for bucket in self._buckets:
            bucket.missing = set(bucket.parameters)
        self._num_sent = 0

    @contextmanager
    def _last_backward(self, stage: int) -> Iterator[None]:
        """What runs inside is the last that adds to the gradients of a stage."""
        handles = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
            for parameter in self._stages.get(stage, ())
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._complete(stage)

    def _complete(self, stage: int) -> None:
        """The gradients of a stage are final, also those that are not there."""
        for parameter in self._stages.get(stage, ()):
            self._bucket_of[parameter].missing.discard(parameter)
        self._send_full()

    def _finish(self) -> None:
        for stage in self._stages:
            self._complete(stage)
        for bucket in self._buckets:
            try:
                bucket.work.wait()
            except RuntimeError as error:
                raise _failure(error) from error
            bucket.work = None
            self._hand_back(bucket)

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """A gradient is final."""
        self._bucket_of[parameter].missing.discard(parameter)
        self._send_full()

    def _send_full(self) -> None:
        """Start the reductions that can be, in the order of the buckets."""
        while self._num_sent < len(self._buckets):
            bucket = self._buckets[self._num_sent]
            if bucket.missing:
                return
            self._num_sent += 1
            self._send(bucket)

    @torch.no_grad()
    def _send(self, bucket: _Bucket) -> None:
        present = [parameter.grad is not None for parameter in bucket.parameters]
        bucket.flat[-len(present) :].fill_(1)
        if not all(present):
            bucket.flat.zero_()
            bucket.flat[-len(present) :].copy_(torch.tensor(present), non_blocking=True)
        pairs = [
            (view, p.grad)
            for view, p in zip(bucket.views, bucket.parameters, strict=True)
            if p.grad is not None
        ]
        if any(gradient.layout != torch.strided for _, gradient in pairs):
            raise ConfigurationError(
                "a parameter has a sparse gradient, which replicas of a pipeline do not average. "
                "Build the embedding with sparse=False"
            )
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
        bucket.flat.div_(self._num_replicas)  # before the sum, which half precision might not hold
        try:
            bucket.work = dist.all_reduce(bucket.flat, group=self._peers, async_op=True)
        except RuntimeError as error:
            raise _failure(error) from error

    @torch.no_grad()
    def _hand_back(self, bucket: _Bucket) -> None:
        own = [p.grad for p in bucket.parameters]
        present = [True] * len(own)
        if any(gradient is None for gradient in own):
            # Only then look: on a GPU the host waits for it.
            present = (bucket.flat[-len(own) :] > 0).tolist()
        gradients, means = [], []
        for p, mean, anywhere in zip(bucket.parameters, bucket.views, present, strict=True):
            if p.grad is None and anywhere:
                p.grad = torch.empty_like(p)
            if p.grad is not None:
                gradients.append(p.grad)
                means.append(mean)
        if gradients:
            torch._foreach_copy_(gradients, means)


def _divide(parameters: Iterable[nn.Parameter], limit: int) -> Iterator[list[nn.Parameter]]:
    """Parameters in groups of one kind and of not much more than ``limit`` bytes."""
    open_groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
    sizes: dict[tuple[torch.dtype, torch.device], int] = defaultdict(int)
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        open_groups[kind].append(parameter)
        sizes[kind] += parameter.nbytes
        if sizes[kind] >= limit:
            del sizes[kind]
            yield open_groups.pop(kind)
    yield from open_groups.values()


def _bucket(parameters: list[nn.Parameter]) -> _Bucket:
    ends = list(accumulate(p.numel() for p in parameters))
    first = parameters[0]
    flat = torch.zeros(ends[-1] + len(parameters), dtype=first.dtype, device=first.device)
    views = [
        flat[end - p.numel() : end].view(p.shape) for p, end in zip(parameters, ends, strict=True)
    ]
    return _Bucket(parameters, flat, views)


def _failure(error: Exception) -> TransportError:
    reason = first_line(error)
    return TransportError(
        f"could not average gradients with another replica: it ended or stalled ({reason}). The "
        "cause is in the output of its ranks"
    )
