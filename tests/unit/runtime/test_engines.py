"""Engines are complete when they are made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tspipe.capture.trace import Networks
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.planning.relay import RelayPlan, passes
from lightning_tspipe.runtime.execution.engine import Engine, Rank, TrainingMode
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.runtime.modes.frozen import Fanout
from lightning_tspipe.runtime.modes.relay.blocks import infer_shapes, pair_blocks
from lightning_tspipe.runtime.modes.relay.engine import (
    NETWORKS,
    RelayEngine,
    RelayOptions,
    capture_blocks,
)
from lightning_tspipe.runtime.stages.heads import Heads
from lightning_tspipe.runtime.transport.base import Alone
from lightning_tspipe.runtime.weights.policies import policy_of
from tests.exactness.fanout import make_batches
from tests.exactness.fanout_threads import Silent
from tests.exactness.relay_threads import Split

CPU = torch.device("cpu")


class Pair(nn.Module):
    """A student that learns from a teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.teacher = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).requires_grad_(False)

    def training_step(self, x: Tensor) -> Tensor:
        return (self.student(x) - self.teacher(x)).square().mean()


def attributes(
    thing: Any, seen: dict[int, tuple[str, set[str]]]
) -> dict[int, tuple[str, set[str]]]:
    """The names of the attributes of an engine, and of all parts of it that the runtime defines."""
    if id(thing) not in seen and type(thing).__module__.startswith("lightning_tspipe.runtime"):
        own = getattr(thing, "__dict__", {})
        seen[id(thing)] = (type(thing).__name__, set(own))
        for value in own.values():
            inner = value.values() if isinstance(value, dict) else (value,)
            for part in inner:
                attributes(part, seen)
    return seen


def assert_complete(engine: Engine, step: Callable[[], None]) -> None:
    """Two steps and a drain add no attribute to what was there."""
    before = {key: (name, set(own)) for key, (name, own) in attributes(engine, {}).items()}
    assert len(before) > 5
    step()
    step()
    engine.drain()
    after = attributes(engine, {})
    assert {key: after[key] for key in before if key in after} == {
        key: value for key, value in before.items() if key in after
    }


def make(module: nn.Module, networks: Networks, mode: Any) -> Rank:
    """One rank that has everything."""
    return Rank(module, networks, Alone(), CPU, mode)


def run(engine: PipelineEngine, step: Any, batch: Any) -> None:
    """One step."""
    loss = engine.forward(step, batch, [(batch, step)] * min(1, engine.lookahead))
    engine.backward(loss.backward)


def test_a_pipeline() -> None:
    module, batch = Pair(), torch.randn(4, 3)
    here = make(module, Networks(("student",), ("teacher",)), TrainingMode())
    captured = here.capture(module.training_step, batch)
    placement = Placement(1, (0, 1, 3), (0, 0), (0, 2), (0,), 2, frozenset({0}))
    engine = PipelineEngine(here, captured, placement, "tspipe")
    assert_complete(engine, partial(run, engine, module.training_step, batch))


def test_an_asynchronous_pipeline() -> None:
    module, batch = Pair(), torch.randn(4, 3)
    here = make(module, Networks(("student",), ("teacher",)), TrainingMode())
    captured = here.capture(module.training_step, batch)
    placement = Placement(1, (0, 3), (0,), (0, 2), (0,))
    engine = PipelineEngine(here, captured, placement, "1f1b", policy=policy_of("pipedream"))
    assert_complete(engine, partial(run, engine, module.training_step, batch))


def test_heads_on_a_trunk() -> None:
    module, batch = Silent(2).double(), make_batches((4,))[0]
    networks = Networks((), ("teacher",), ("student",))
    here = make(module, networks, Fanout(Heads(module, "student", CPU)))
    step = partial(module.training_step, batch_idx=0)
    captured = here.capture(step, batch)
    num_atoms = len(captured.networks["teacher"].atoms)
    placement = Placement(1, (0, 1, 2), (0, 0), (0, num_atoms), (0,))
    engine = PipelineEngine(here, captured, placement, "tspipe")
    assert_complete(engine, partial(run, engine, step, batch))


def test_a_relay() -> None:
    split = Split("ir", (0, 2), (1,))
    module, batch = split.build(), split.batches()[0]
    here, pairs = (
        make(module, NETWORKS, TrainingMode()),
        pair_blocks(module, batch[0], module.boundaries),
    )
    shapes = infer_shapes(pairs, module.block_loss, batch[0], batch)
    captured = capture_blocks(here, pairs, lambda batch: batch[0], batch)
    walks = passes(split.mode, RelayPlan(split.cuts, split.widths))
    engine = RelayEngine(here, captured, pairs, shapes, walks, RelayOptions())

    def step() -> None:
        engine.begin(batch, lambda batch: [batch[0]])
        losses = engine.run_round(0)
        engine.backward(torch.stack([o.loss for o in losses.values()]).sum().backward)
        engine.finish()

    assert_complete(engine, step)
