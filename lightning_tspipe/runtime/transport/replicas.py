"""Replicas of a pipeline: their groups, and the mean of their gradients while a backward runs.

Ranks are numbered pipeline by pipeline. The ranks of a column, which have the same place in each
pipeline and so hold the same stages, are *peers*::

                 rank 0 (loss)   rank 1   rank 2 (data)
    replica 0         0            1           2          global ranks
    replica 1         3            4           5
                    peers        peers       peers

Gradients, metrics and whatever a user's step does with ``torch.distributed`` stay among peers.

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
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GroupMember, ReduceOp
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from lightning_tspipe.errors import ConfigurationError, TransportError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.runtime.faults.failures import first_line
from lightning_tspipe.runtime.recording import Recorder

BUCKET_BYTES = 25 * 2**20
"""Of what travels at once."""
_BACKWARDS = frozenset({Op.BACKWARD, Op.INPUT_BACKWARD, Op.WEIGHT_BACKWARD})
REST = -1
"""Stands for the stage of what belongs to none: the parameters that only the loss reads."""


@dataclass(frozen=True)
class Replicas:
    """The replicas, as one rank sees them.

    Attributes:
        index: This rank's replica.
        number: Number of replicas.
        peers: The group of this rank's peers, by replica; None where no processes are connected.
    """

    index: int = 0
    number: int = 1
    peers: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this is the replica that plans, logs and saves."""
        return self.index == 0

    def broadcast(self, value: Any) -> Any:
        """The first replica's value, on all peers."""
        if self.number == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.peers, group_src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all peers, on each of them."""
        if self.number == 1:
            return [value]
        values: list[Any] = [None] * self.number
        dist.all_gather_object(values, value, group=self.peers)
        return values

    def all_say(self, yes: bool) -> bool:
        """Whether all peers say yes."""
        if self.number == 1:
            return yes
        return bool(reduce_among(torch.tensor(int(yes)), self.peers, "min"))

    def as_world(self) -> AbstractContextManager[None]:
        """While inside, the peers are all there is, for users of ``torch.distributed``.

        A loss that gathers (or a metric, or a centre that is averaged) asks the default group. On a
        rank of a pipeline that would include ranks that never run a loss, and would wait for ever.
        """
        return nullcontext() if self.peers is None else default_group(self.peers)


@contextmanager
def default_group(group: Any) -> Iterator[None]:
    """While inside, ``torch.distributed`` takes ``group`` for the whole world; None: it is off.

    Ranks, also those of groups that are made inside, are then places in ``group``. Groups that
    exist already can still be used; they are addressed by places in themselves (``group_dst``).
    """
    previous = GroupMember.WORLD
    GroupMember.WORLD = group
    try:
        yield
    finally:
        GroupMember.WORLD = previous


def make_groups(
    num_ranks: int, num_replicas: int, backend: str, timeout: timedelta, device: torch.device
) -> tuple[Any, Any]:
    """The group of this rank's pipeline and that of its peers; all ranks of the job call it.

    Args:
        num_ranks: Ranks of a pipeline.
        num_replicas: Pipelines.
        backend: Backend among peers; a pipeline's group is for objects on the host.
        timeout: How long a collective waits for a live peer.
        device: This rank's.
    """
    # NCCL would take the one whose number is this process's on the machine.
    bound = device if "nccl" in backend else None
    replica, place = divmod(dist.get_rank(), num_ranks)
    first = range(0, num_ranks * num_replicas, num_ranks)
    pipelines = [
        dist.new_group(list(range(start, start + num_ranks)), timeout=timeout, backend="gloo")
        for start in first
    ]
    peers = [
        dist.new_group(
            [start + rank for start in first], timeout=timeout, backend=backend, device_id=bound
        )
        for rank in range(num_ranks)
    ]
    return pipelines[replica], peers[place]


def reduce_among(tensor: Tensor, group: Any, operation: Any = "mean") -> Tensor:
    """Reduce a tensor in place over the ranks of a group.

    Args:
        tensor: The tensor, of the same shape on all ranks.
        group: The ranks.
        operation: ``mean``, ``sum``, ``max``, ``min`` or another of ``ReduceOp``, or one itself.
    """
    if isinstance(operation, str):
        operation = getattr(ReduceOp, operation.upper().replace("MEAN", "AVG"))
    is_mean = operation == ReduceOp.AVG  # which gloo doesn't know
    dist.all_reduce(tensor, op=ReduceOp.SUM if is_mean else operation, group=group)
    if is_mean:
        tensor.copy_(tensor / dist.get_world_size(group))
    return tensor


def gather_among(tensor: Tensor, group: Any, *, with_gradients: bool = False) -> Tensor:
    """The tensors of all ranks of a group, stacked along a new first dimension.

    Args:
        tensor: The tensor, of the same shape on all ranks.
        group: The ranks.
        with_gradients: Whether gradients go back to the rank that a part came from; then all ranks
            must run the backward. Each gets the sum of what all ranks ask for.
    """
    gathered: Tensor = _Gather.apply(tensor if with_gradients else tensor.detach(), group)
    return gathered


class _Gather(torch.autograd.Function):
    """torch.distributed.nn's knows the whole world only."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor, group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[ctx.group.rank()], None


def shared_scaler(scaler: torch.amp.GradScaler, device: torch.device) -> torch.amp.GradScaler:
    """A scaler of 16-bit precision that skips a step if any rank of the job found an overflow.

    Args:
        scaler: How one rank would scale.
        device: Where this rank computes.
    """
    if isinstance(scaler, ShardedGradScaler) or not scaler.is_enabled():
        return scaler
    shared = ShardedGradScaler(device.type, process_group=dist.group.WORLD)
    shared.load_state_dict(scaler.state_dict())
    return shared


class _Bucket:
    """Parameters whose gradients travel together.

    Args:
        parameters: The parameters, of one dtype on one device.

    Attributes:
        flat: Their gradients one after another, then for each whether there is one.
        views: The parts of ``flat``, in the shapes of the parameters.
        missing: Parameters whose gradients are not final yet.
        work: The reduction under way.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        first, sizes = parameters[0], [p.numel() for p in parameters]
        number = sum(sizes) + len(parameters)
        self.flat = torch.zeros(number, dtype=first.dtype, device=first.device)
        parts = self.flat[: sum(sizes)].split(sizes)
        self.views = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
        self.missing: set[nn.Parameter] = set()
        self.work: Any = None


@dataclass(eq=False)
class GradientReduction:
    """Averages the gradients of one rank's parameters over its peers.

    All peers start the same reductions in the same order, whatever the order in which their
    gradients come. A parameter without a gradient counts as zero where another replica has one, and
    stays without where none has.

    Attributes:
        stages: The parameters of each of this rank's stages, in the order of the forward; under
            ``REST`` those of no stage.
        peers: The group of peers.
        recorder: Notes the wait at the end.
        bucket_bytes: A bucket is sent when it holds so much.
    """

    stages: Mapping[int, Sequence[nn.Parameter]]
    peers: Any
    recorder: Recorder = field(default_factory=Recorder)
    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        self._known = {stage: tuple(dict.fromkeys(ps)) for stage, ps in self.stages.items()}
        self._num_sent = 0
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._fill()

    def _fill(self) -> None:
        """Put into buckets what is trained, or was so before: it may only be off for a while."""
        self._trained = {
            stage: [p for p in parameters if p.requires_grad or p in self._bucket_of]
            for stage, parameters in self._known.items()
        }
        # What the loss reads is final first, then the last stage, from its end to its beginning.
        order = sorted(self._trained, key=lambda stage: (stage != REST, -stage))
        self._buckets = [
            _Bucket(group)
            for stage in order
            for group in divided(reversed(self._trained[stage]), self.bucket_bytes)
        ]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}

    def run(self, actions: Sequence[Action], execute: Callable[[Sequence[Action]], None]) -> None:
        """Run a backward; afterwards every gradient is the mean over the replicas.

        Args:
            actions: What this rank does after the backward of the loss.
            execute: Runs some of the actions.

        Raises:
            TransportError: Another replica ended, or said nothing for too long.
        """
        last = {a.stage: i for i, a in enumerate(actions) if a.op in _BACKWARDS}
        self._start()
        self._complete(self._trained.get(REST, ()))
        start = 0
        for stage, index in sorted(last.items(), key=lambda item: item[1]):
            execute(actions[start:index])
            parameters = self._trained.get(stage, ())
            with ExitStack() as hooks:  # what runs inside is the last that adds to gradients of it
                for parameter in parameters:
                    if parameter.requires_grad:
                        hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)
                        hooks.callback(hook.remove)
                execute(actions[index : index + 1])
            self._complete(parameters)
            start = index + 1
        execute(actions[start:])
        started = time.perf_counter()
        self._complete(self._bucket_of)
        for bucket in self._buckets:
            with reaching_peers():
                bucket.work.wait()
            self._hand_back(bucket)
        self.recorder.paused("reduce", started)

    def _start(self) -> None:
        everything = (p for parameters in self._known.values() for p in parameters)
        if any(p.requires_grad and p not in self._bucket_of for p in everything):
            self._fill()
        for bucket in self._buckets:
            bucket.missing = set(bucket.parameters)
        self._num_sent = 0

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        self._complete((parameter,))

    def _complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients are final, also those that are not there: start what can be, in order."""
        for parameter in parameters:
            self._bucket_of[parameter].missing.discard(parameter)
        while self._num_sent < len(self._buckets) and not self._buckets[self._num_sent].missing:
            self._num_sent += 1
            self._send(self._buckets[self._num_sent - 1])

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
        # Before the sum, which half precision might not hold.
        bucket.flat.div_(dist.get_world_size(self.peers))
        with reaching_peers():
            bucket.work = dist.all_reduce(bucket.flat, group=self.peers, async_op=True)

    @torch.no_grad()
    def _hand_back(self, bucket: _Bucket) -> None:
        own = [p.grad for p in bucket.parameters]
        present = [True] * len(own)
        if any(gradient is None for gradient in own):
            # Only then look: on a GPU the host waits for it.
            present = (bucket.flat[-len(own) :] > 0).tolist()
        for p, anywhere in zip(bucket.parameters, present, strict=True):
            if p.grad is None and anywhere:
                p.grad = torch.empty_like(p)
        pairs = [
            (p.grad, mean)
            for p, mean in zip(bucket.parameters, bucket.views, strict=True)
            if p.grad is not None
        ]
        if pairs:
            torch._foreach_copy_([own for own, _ in pairs], [mean for _, mean in pairs])


def divided(parameters: Iterable[nn.Parameter], limit: int) -> Iterator[list[nn.Parameter]]:
    """Parameters in groups of one kind and of not much more than ``limit`` bytes."""
    groups: defaultdict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        groups[kind].append(parameter)
        if sum(each.nbytes for each in groups[kind]) >= limit:
            yield groups.pop(kind)
    yield from groups.values()


@contextmanager
def reaching_peers(purpose: str = "average gradients with") -> Iterator[None]:
    """What fails inside fails since another replica did.

    Args:
        purpose: What could not be done with it, for the error.

    Raises:
        TransportError: It fails.
    """
    try:
        yield
    except RuntimeError as error:
        raise TransportError(
            f"could not {purpose} another replica: it ended or stalled "
            f"({first_line(error)}). The cause is in the output of its ranks"
        ) from error
