"""Heads on a trunk over ranks that are threads of this process, without Lightning's Trainer."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_tspipe.capture.trace import Networks
from lightning_tspipe.planning.placement import Pieces, Placement, default_ranks
from lightning_tspipe.runtime.execution.engine import Rank
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.runtime.modes.frozen import Fanout
from lightning_tspipe.runtime.stages.heads import Heads
from lightning_tspipe.runtime.transport.channels import Channel
from lightning_tspipe.runtime.transport.wired import OrderedTransport
from tests.device import DEVICE, on_device, on_host
from tests.exactness.fanout import Batch, Tasks, make_batches, make_optimizer
from tests.exactness.pipelined import even_cuts
from tests.local_transport import LocalTransport
from tests.strict import StrictNetwork, StrictWire
from tests.threads import run_on_threads

_COLLECTING = threading.Lock()


@dataclass(frozen=True)
class Fan:
    """A training.

    Attributes:
        num_ranks: Devices.
        num_heads: Heads; head h is on rank ``(h + first) % num_ranks``.
        depth: How far the trunk runs ahead.
        num_stages: Parts of the trunk; 0: one on each device.
        pieces: In which a batch goes through the trunk.
        inside: Of the trunk's first atoms, how many a batch goes through in pieces, and in how
            many, within a rank.
        sizes: Of the batches.
        first: See ``num_heads``.
        stops: The head that stops after the first epoch; -1: none.
        lead: Steps that the last rank has to be ahead before the heads on rank 0 go on.
    """

    num_ranks: int
    num_heads: int
    depth: int
    num_stages: int = 0
    pieces: int = 1
    sizes: tuple[int, ...] = (5, 5, 4, 5, 2)
    first: int = 0
    stops: int = -1
    lead: int = 0
    inside: tuple[int, int] = (0, 1)

    @property
    def head_ranks(self) -> tuple[int, ...]:
        """The rank of each head."""
        return tuple((head + self.first) % self.num_ranks for head in range(self.num_heads))


@dataclass
class Found:
    """What came out.

    Attributes:
        weights: Of each head.
        losses: The sum over a rank's heads, step by step.
        sent: Bytes between each two ranks, by channel.
        began: Ranks and steps, in the order in which they began.
    """

    weights: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    losses: dict[int, list[Tensor | float]] = field(default_factory=dict)
    sent: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    began: list[tuple[int, int]] = field(default_factory=list)


class Counting(OrderedTransport):
    """Adds up what is sent."""

    def __init__(self, network: StrictNetwork, rank: int, found: Found) -> None:
        objects = LocalTransport(network.objects, rank)
        super().__init__(objects, StrictWire(network, rank), network.device)
        self._found = found

    @override
    def send(
        self, tensors: Sequence[Tensor], target: int, channel: Channel, specs: Any = None
    ) -> None:
        self._found.sent[self.rank, target, channel] += sum(t.nbytes for t in tensors)
        super().send(tensors, target, channel, specs)


class Silent(Tasks):
    """Logs nothing."""

    def log(self, *_: Any, **__: Any) -> None:
        """No Trainer listens."""


def train_on_threads(fan: Fan, num_epochs: int = 2) -> Found:
    """Train all heads as one pipeline."""
    network, found = StrictNetwork(fan.num_ranks, timeout=30), Found()
    modules = [Silent(fan.num_heads).double() for _ in range(fan.num_ranks)]

    def work(rank: int) -> None:
        _train_rank(fan, num_epochs, modules[rank], Counting(network, rank, found), found)

    run_on_threads(work, fan.num_ranks)
    return found


def _train_rank(
    fan: Fan, num_epochs: int, module: Silent, transport: Counting, found: Found
) -> None:
    student, rank = module.student, transport.rank
    heads = Heads(module, "student", DEVICE)
    networks = Networks((), ("teacher",), ("student",))
    here = Rank(module, networks, transport, DEVICE, Fanout(heads))
    batches = on_device(make_batches(fan.sizes))
    captured = here.capture(partial(_step, module, 0), batches[0])
    with _COLLECTING:  # a collection that another one interrupts does nothing
        gc.collect()
    placement = _placement(fan, len(captured.networks["teacher"].atoms))
    engine = PipelineEngine(here, captured, placement, "tspipe")
    student.here = tuple(student.names[stage] for stage in engine.pipeline.stages_of(rank))
    optimizers = [
        make_optimizer(name, list(student.heads[name].parameters())) for name in student.here
    ]
    for epoch in range(num_epochs):
        engine.drain()
        if epoch == 1 and fan.stops >= 0:
            student.stop(f"task{fan.stops}", "told to")
        for index in range(len(batches)):
            found.began.append((rank, epoch * len(batches) + index))
            loss = _forward(engine, module, batches, index)
            if loss is not None and rank == 0:
                _let_go_ahead(fan, found, epoch * len(batches) + index)
            for optimizer in optimizers:
                optimizer.zero_grad()
            engine.backward(None if loss is None else loss.backward)
            for optimizer in optimizers:
                optimizer.step()
            found.losses.setdefault(rank, []).append(0.0 if loss is None else on_host(loss))
    for name in student.here:
        found.weights[name] = on_host(dict(student.heads[name].state_dict()))


def _let_go_ahead(fan: Fan, found: Found, step: int) -> None:
    """Until the last rank has begun a step that far ahead, or its last one; and a moment more."""
    if not fan.lead or step == 0:  # the first step has to be over before anybody runs ahead
        return
    wanted = (fan.num_ranks - 1, min(step + fan.lead, len(fan.sizes) - 1))
    deadline = time.monotonic() + 20
    while wanted not in found.began and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.01)  # in which it may not go further


def _step(module: Silent, index: int, batch: Any) -> Any:
    return module.training_step(batch, index)


def _forward(engine: PipelineEngine, module: Silent, batches: list[Batch], index: int) -> Any:
    batch, ahead = None, []
    if engine.is_data_rank:
        batch = batches[index]
        later = range(index + 1, min(index + 1 + engine.lookahead, len(batches)))
        ahead = [(batches[i], partial(_step, module, i)) for i in later]
    return engine.forward(partial(_step, module, index), batch, ahead)


def _placement(fan: Fan, num_atoms: int) -> Placement:
    num_stages = fan.num_stages or fan.num_ranks
    return Placement(
        num_ranks=fan.num_ranks,
        student_cuts=tuple(range(fan.num_heads + 1)),
        student_ranks=fan.head_ranks,
        teacher_cuts=even_cuts(num_atoms, num_stages),
        teacher_ranks=default_ranks(num_stages, fan.num_ranks),
        num_microbatches=fan.pieces,
        depth=fan.depth,
        pieces=Pieces(*fan.inside),
    )
