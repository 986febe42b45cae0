"""Windows equal accumulation on one device, by each schedule, over a grid of drawn trainings.

Ranks are threads over the strict transport; between two steps everything is settled now and then,
as for a checkpoint.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_tspipe.capture.trace import Networks
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.runtime.execution.engine import Rank as RankOf
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.weights.policies import policy_of
from lightning_tspipe.schedules.windows import WINDOWS, halves_of
from tests.choosing import some_of
from tests.device import DEVICE, on_device, on_host
from tests.exactness.pipelined import even_cuts
from tests.exactness.test_asynchronous import Module
from tests.exactness.tied import Tied
from tests.strict import StrictNetwork
from tests.threads import run_on_threads

NUM_DRAWS = 120
QUICK, SLOW = 30, 75
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


@dataclass(frozen=True)
class Case:
    """One training: batches of an epoch, of which the last window may be short."""

    schedule: str
    num_ranks: int
    rounds: int
    window: int
    num_batches: int
    kind: str
    clip: float
    settled: frozenset[int]
    in_halves: bool

    def __str__(self) -> str:
        halves = " in halves" * self.in_halves
        how = f"{self.schedule}{halves} {self.num_ranks}x{self.rounds} {self.kind}"
        clip = f" clip {self.clip}" * (self.clip > 0)
        settled = f" settled {','.join(map(str, sorted(self.settled)))}" * bool(self.settled)
        return f"{how} {self.num_batches} by {self.window}{clip}{settled}"

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.rounds


def draw(seed: int) -> Case:
    """One of all trainings; every third has each schedule."""
    drawn = random.Random(seed)  # noqa: S311 - no secret
    schedule = WINDOWS[seed % len(WINDOWS)]
    rounds = {"1f1b": 1, "zbv": 2}.get(schedule) or drawn.choice((2, 3))
    num_ranks = drawn.choice((1, 2, 3, 4) if rounds < 3 else (2, 3))
    window = drawn.randint(1, 6)
    num_batches = drawn.randint(window, 2 * window + 2)
    places = drawn.sample(range(num_batches), k=min(2, num_batches)) if drawn.random() < 0.5 else ()
    return Case(
        schedule, num_ranks, rounds, window, num_batches,
        kind=drawn.choice(("batchnorm", "batchnorm", "tied", "teacher")),
        clip=drawn.choice((0.0, 0.0, 0.05)),
        settled=frozenset(places),
        in_halves=schedule == "1f1b" and drawn.random() < 0.5,
    )  # fmt: skip


def make(case: Case) -> tuple[Any, list[Any]]:
    torch.manual_seed(case.num_stages)
    if case.kind == "tied":
        module: Any = Tied()
        return module, [module.batch(4, seed) for seed in range(case.num_batches)]
    module = Module(max(2, case.num_stages), has_teacher=case.kind == "teacher")
    numbers = torch.Generator().manual_seed(1)
    sizes = (4 + (n % 3 == 2) for n in range(case.num_batches))
    return module, [
        (torch.randn(size, 3, 5, 5, generator=numbers), torch.arange(size) % 3) for size in sizes
    ]


def step(module: Any, index: int, batch: Any) -> Tensor:
    loss: Tensor = module.training_step(batch, index)
    return loss


def optimizer_of(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.student.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-2)


def clip(case: Case, parameters: list[nn.Parameter], total: Tensor) -> None:
    if case.clip:
        held = [p for p in parameters if p.grad is not None]
        nn.utils.clip_grads_with_norm_(held, case.clip, total)


def alone(case: Case) -> tuple[list[Tensor], dict[str, Tensor]]:
    module, batches = make(case)
    optimizer, losses = optimizer_of(module), []
    for index, batch in enumerate(batches):
        loss = step(module, index, batch)
        losses.append(loss.detach())
        (loss / case.window).backward()
        if (index + 1) % case.window == 0 or index + 1 == len(batches):
            own = [p for p in module.student.parameters() if p.grad is not None]
            clip(case, own, nn.utils.get_total_norm([p.grad for p in own]))  # type: ignore[misc]
            optimizer.step()
            optimizer.zero_grad()
    return losses, module.state_dict()


def train(
    case: Case, module: Any, batches: list[Any], transport: Transport
) -> tuple[list[Tensor], dict[str, Tensor]]:
    engine = place(case, module, batches[0], transport)
    optimizer, losses = optimizer_of(module), []
    weights = engine.weights
    assert weights is not None
    weights.optimizers, weights.batches_per_update = [optimizer], case.window
    engine.drain()
    for index, batch in enumerate(batches):
        weights.position = index
        stop = min(len(batches), index - index % case.window + case.window)
        later = range(index + 1, min(index + 1 + engine.lookahead, stop))
        ahead = [(on_device(batches[i]), partial(step, module, i)) for i in later]
        is_data = engine.is_data_rank
        loss = engine.forward(
            partial(step, module, index), on_device(batch) if is_data else None,
            ahead if is_data else [],
        )  # fmt: skip
        updates = index + 1 == stop
        engine.backward(None if loss is None else (loss / case.window).backward, reduce=updates)
        if loss is not None:
            losses.append(on_host(loss))
        if index in case.settled:
            engine.settle(keeps_flights=True)
        if updates:
            own = [p for p in module.student.parameters() if not p.is_meta and p.grad is not None]
            squares = [p.grad.square().sum() for p in own if p not in engine.copies]
            square = torch.stack([torch.zeros((), device=DEVICE), *squares]).sum()
            clip(case, own, transport.sum_over_ranks(square).sqrt())
            optimizer.step()
            weights.updated()
            optimizer.zero_grad()
    return losses, dict(engine.shards.state_dict(engine.rank, transport))


def place(case: Case, module: Any, batch: Any, transport: Transport) -> PipelineEngine:
    has_teacher = case.kind == "teacher"
    networks = Networks(("student",), ("teacher",) if has_teacher else ())
    here = RankOf(module, networks, transport, DEVICE)
    captured = here.capture(partial(step, module, 0), on_device(batch))
    atoms = {name: len(network.atoms) for name, network in captured.networks.items()}
    teacher = even_cuts(atoms["teacher"], 1) if has_teacher else ()
    placement = Placement.of(
        case.num_ranks, even_cuts(atoms["student"], case.num_stages), teacher,
        schedule=case.schedule,
    )  # fmt: skip
    split = frozenset(range(1, case.num_stages)) if case.in_halves else frozenset()
    placement = replace(placement, split=halves_of(case.schedule, case.num_stages) or split)
    policy = policy_of("synchronous")
    return PipelineEngine(here, captured, placement, case.schedule, policy=policy)


def cases() -> Iterator[Case]:
    yield from dict.fromkeys(map(draw, range(NUM_DRAWS)))


ALL = list(cases())


@pytest.mark.parametrize("case", some_of(ALL, slow=ALL[QUICK:SLOW], always=ALL[:QUICK]), ids=str)
def test_a_window_is_accumulation_on_one_device(case: Case) -> None:
    expected, state = alone(case)
    network = StrictNetwork(case.num_ranks, timeout=20)
    made = [make(case) for _ in range(case.num_ranks)]
    ranks = run_on_threads(
        lambda rank: train(case, *made[rank], network.transport(rank)), case.num_ranks
    )
    losses, found = ranks[0]
    torch.testing.assert_close(losses, expected, **CLOSE)
    assert found.keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, **CLOSE, msg=name)


def test_the_grid_has_all_schedules_kinds_and_ranks() -> None:
    for name, values in (
        ("schedule", set(WINDOWS)), ("kind", {"batchnorm", "tied", "teacher"}),
        ("num_ranks", {1, 2, 3, 4}), ("window", set(range(1, 7))),
        ("in_halves", {False, True}),
    ):  # fmt: skip
        assert {getattr(case, name) for case in ALL[:QUICK]} == values
