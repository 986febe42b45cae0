"""Asynchronous 1F1B equals its sequential emulation, for every weight policy."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lightning_tspipe.capture.trace import Networks
from lightning_tspipe.planning.layout import num_copies
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.runtime.execution.engine import Rank as RankOf
from lightning_tspipe.runtime.execution.engine import Stopped
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.weights.policies import policy_of
from lightning_tspipe.runtime.weights.versions import Read
from tests.choosing import some_of
from tests.device import DEVICE, on_device, on_host
from tests.exactness.asynchronous import Emulated, Recurrent, emulate
from tests.strict import StrictNetwork
from tests.threads import run_on_threads

POLICIES = ("pipedream", "2bw", "pipeoptim", "spectrain")
NUM_CLASSES = 3
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


@dataclass(frozen=True)
class Case:
    """One training: each epoch as many batches of five images as said."""

    policy: str
    num_stages: int
    epochs: tuple[int, ...]
    optimizer: str = "momentum"
    accumulate: int = 1
    again: bool = False
    has_teacher: bool = False
    recurrent: bool = False
    stop: int = 0

    def __str__(self) -> str:
        epochs = ",".join(map(str, self.epochs))
        more = f" x{self.accumulate}" * (self.accumulate > 1) + " again" * self.again
        teacher = " teacher" * self.has_teacher + " lstm" * self.recurrent
        more += f" stop {self.stop}" * (self.stop > 0)
        return f"{self.policy} {self.num_stages} {self.optimizer} {epochs}{more}{teacher}"


class Module(nn.Module):
    """A classifier whose student is a list of stages, and perhaps a frozen teacher."""

    def __init__(
        self, num_stages: int, *, has_teacher: bool = False, recurrent: bool = False
    ) -> None:
        super().__init__()
        self.student = recurrent_student(num_stages) if recurrent else student(num_stages)
        if has_teacher:
            self.teacher = nn.Sequential(nn.Flatten(), nn.Linear(75, NUM_CLASSES)).eval()
            self.teacher.requires_grad_(requires_grad=False)

    def training_step(self, batch: Any, _index: int) -> Tensor:
        images, labels = batch
        output = self.student(images)
        if not hasattr(self, "teacher"):
            return loss_of(output, labels)
        with torch.no_grad():
            taught = self.teacher(images)
        return loss_of(output, labels) + F.mse_loss(output, taught)


def student(num_stages: int) -> nn.Sequential:
    """Convolutions and BatchNorm."""
    middle = [
        nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.GELU(),
            nn.Conv2d(4, 4, 1),
        )
        for _ in range(num_stages - 2)
    ]
    first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    last = nn.Sequential(
        nn.Conv2d(4, 5, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(20, NUM_CLASSES)
    )
    parts = [first, *middle, last] if num_stages > 1 else [nn.Sequential(*first, *last)]
    return nn.Sequential(*parts)


def recurrent_student(num_stages: int) -> nn.Sequential:
    """LSTMs over the colours of an image."""
    stages = [nn.Sequential(Recurrent(6, 6), nn.Tanh()) for _ in range(num_stages - 1)] + [
        nn.Sequential(Recurrent(6, 6), nn.Flatten(), nn.Linear(18, NUM_CLASSES))
    ]
    first = [nn.Flatten(2), nn.Linear(25, 6)]
    return nn.Sequential(nn.Sequential(*first, *stages[0]), *stages[1:])


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels) + 0.1 * output.mean(0).square().sum()


def make(case: Case) -> tuple[Module, list[list[Any]]]:
    torch.manual_seed(case.num_stages)
    module = Module(case.num_stages, has_teacher=case.has_teacher, recurrent=case.recurrent)
    numbers = torch.Generator().manual_seed(1)
    epochs = [
        [
            (
                torch.randn(5, 3, 5, 5, generator=numbers),
                torch.randint(NUM_CLASSES, (5,), generator=numbers),
            )
            for _ in range(length)
        ]
        for length in case.epochs
    ]
    return module, epochs


def run_emulated(case: Case) -> tuple[Emulated, dict[str, Tensor]]:
    module, epochs = make(case)
    optimizer = OPTIMIZERS[case.optimizer](module.student.parameters())
    labelled = epochs
    if case.has_teacher:  # its outputs are labels too: it is frozen
        labelled = [[(x, (y, module.teacher(x))) for x, y in batches] for batches in epochs]
    found = emulate(
        list(module.student), with_teacher if case.has_teacher else loss_of, labelled, optimizer,
        case.policy, accumulate=case.accumulate, again=case.again,
    )  # fmt: skip
    return found, module.state_dict()


def with_teacher(output: Tensor, labels: Any) -> Tensor:
    return loss_of(output, labels[0]) + F.mse_loss(output, labels[1])


@dataclass
class Rank:
    losses: list[Tensor]
    gradients: list[dict[str, Tensor]]
    state: dict[str, Tensor]
    trace: list[Read]
    most_versions: int


def run_pipelined(case: Case) -> list[Rank]:
    network = StrictNetwork(case.num_stages, timeout=20)
    made = [make(case) for _ in range(case.num_stages)]

    def work(rank: int) -> Rank:
        return train(case, *made[rank], network.transport(rank))

    return run_on_threads(work, case.num_stages)


def train(case: Case, module: Module, epochs: list[list[Any]], transport: Transport) -> Rank:
    engine = place(case, module, epochs, transport)
    optimizer = OPTIMIZERS[case.optimizer](module.student.parameters())
    weights = engine.weights
    assert weights is not None
    weights.optimizers, weights.batches_per_update, weights.trace = [optimizer], case.accumulate, []
    own = own_parameters(module)
    losses, gradients = [], []
    for batches in epochs:
        engine.drain()
        for index, batch in enumerate(batches):
            weights.position = index
            later = range(index + 1, min(index + 1 + engine.lookahead, len(batches)))
            ahead = [(on_device(batches[i]), partial(step, module, i)) for i in later]
            is_data = engine.is_data_rank
            loss = engine.forward(
                partial(step, module, index),
                on_device(batch) if is_data else None,
                ahead if is_data else [],
            )
            updates = (index + 1) % case.accumulate == 0 or index + 1 == len(batches)
            run = None if loss is None else (loss / case.accumulate).backward
            engine.backward(run, reduce=updates)
            if loss is not None:
                losses.append(on_host(loss))
            found = {n: p.grad.clone() for n, p in own.items() if p.grad is not None}
            gradients.append(on_host(found))
            if updates:
                optimizer.step()
                weights.updated()
                optimizer.zero_grad()
            if len(gradients) == case.stop:
                module, engine, optimizer = on_others(case, module, engine, optimizer, epochs)
                weights, own = engine.weights, own_parameters(module)
    state = engine.shards.state_dict(engine.rank, transport)
    return Rank(losses, gradients, dict(state), weights.trace, weights.most_versions)


def own_parameters(module: Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.student.named_parameters() if not p.is_meta}


def on_others(
    case: Case,
    module: Module,
    engine: PipelineEngine,
    optimizer: torch.optim.Optimizer,
    epochs: list[list[Any]],
) -> tuple[Module, PipelineEngine, torch.optim.Optimizer]:
    """Between two steps: everything goes through a file, into other objects."""
    file = io.BytesIO()
    gradients = engine.shards.gradients(engine.rank)
    torch.save([engine.position, engine.flights(), optimizer.state_dict(), gradients], file)
    file.seek(0)
    position, flights, state, gradients = torch.load(file, weights_only=True)
    all_flights = engine.transport.broadcast_object(engine.transport.gather_object(flights), 0)
    trace, made = engine.weights.trace, make(case)[0]
    new = place(case, made, epochs, engine.transport)
    for mine, theirs in zip(made.state_dict().values(), module.state_dict().values(), strict=True):
        if not mine.is_meta:
            mine.copy_(theirs)
    new_optimizer = OPTIMIZERS[case.optimizer](made.student.parameters())
    new_optimizer.load_state_dict(state)
    new.weights.optimizers, new.weights.trace = [new_optimizer], trace
    new.weights.batches_per_update = case.accumulate
    new.resume(Stopped(position, None, all_flights))
    new.shards.put_gradients(gradients, new.rank)
    return made, new, new_optimizer


def step(module: Module, index: int, batch: Any) -> Tensor:
    return module.training_step(batch, index)


def place(
    case: Case, module: Module, epochs: list[list[Any]], transport: Transport
) -> PipelineEngine:
    networks = Networks(("student",), ("teacher",) if case.has_teacher else ())
    here = RankOf(module, networks, transport, DEVICE)
    captured = here.capture(partial(step, module, 0), on_device(epochs[0][0]))
    atoms = captured.networks["student"].atoms
    starts = [
        next(i for i, atom in enumerate(atoms) for n in atom.parameter_names
             if n.startswith(f"student.{stage}."))
        for stage in range(case.num_stages)
    ]  # fmt: skip
    starts[0] = 0
    ranks = tuple(reversed(range(case.num_stages)))
    teacher = ((0, len(captured.networks["teacher"].atoms)), ranks[:1]) if case.has_teacher else ()
    again = frozenset(range(len(atoms))) if case.again else frozenset()
    placement = Placement(
        case.num_stages, (*starts, len(atoms)), ranks, *(teacher or ((), ())), recomputed=again
    )
    policy = policy_of(case.policy)
    return PipelineEngine(here, captured, placement, "1f1b", policy=policy)


def assert_equal(case: Case) -> list[Rank]:
    expected, state = run_emulated(case)
    ranks = run_pipelined(case)
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)
    for mine, theirs in zip(ranks[0].losses, expected.losses, strict=True):
        close(mine, theirs)
    for number, gradients in enumerate(expected.gradients):
        found = {name: g for rank in ranks for name, g in rank.gradients[number].items()}
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            close(found[name], gradient)
    for name, value in state.items():
        close(ranks[0].state[name], value, msg=lambda text, name=name: f"{name}: {text}")
    return ranks


def cases() -> list[Case]:
    found = []
    for policy in POLICIES:
        for num_stages in (1, 2, 3, 4):
            every = num_stages if policy == "2bw" else 1
            lengths = (1, num_stages, 3 * num_stages * every)
            found.append(Case(policy, num_stages, lengths, accumulate=every))
    found += [
        Case("pipeoptim", 3, (7, 5), name)
        for name in ("nesterov", "sgd", "adam", "adamw", "rmsprop")
    ]
    found += [Case(policy, 3, (8, 5), "momentum", accumulate=3) for policy in POLICIES]
    found += [Case(policy, 3, (8, 3), again=True, accumulate=1 + 2 * (policy == "2bw"))
              for policy in POLICIES]  # fmt: skip
    found += [Case("pipedream", 3, (6, 3), "adamw", has_teacher=True)]
    found += [
        Case(
            policy,
            3,
            (7, 2),
            "sgd" if policy != "spectrain" else "momentum",
            accumulate=1 + 2 * (policy == "2bw"),
            recurrent=True,
            again=again,
        )
        for policy in POLICIES
        for again in (False, True)
    ]
    return found


def marked(cases: list[Case]) -> list[Any]:
    """Pipelines of three stages, and of one; the others take longer than they tell."""
    rest = [case for case in cases if not is_quick(case)]
    return some_of(cases, slow=rest[::2], always=filter(is_quick, cases))


def is_quick(case: Case) -> bool:
    if case.stop:
        return case.stop == 4 and case.again == (case.policy in {"pipeoptim", "2bw"})
    if case.num_stages == 2 or (case.num_stages == 4 and case.policy != "pipeoptim"):
        return False
    return not (case.recurrent and (case.again or case.policy == "2bw"))


@pytest.mark.parametrize("case", marked(cases()), ids=str)
def test_a_pipelined_training_equals_its_emulation(case: Case) -> None:
    ranks = assert_equal(case)
    if case.optimizer == "momentum" and max(case.epochs) > case.num_stages > 1:
        assert [rank.most_versions for rank in ranks] == most_versions(case)


def stopped_cases() -> list[Case]:
    found = [
        Case(policy, 3, (8, 5), accumulate=1 + 2 * (policy == "2bw"), stop=stop, again=again)
        for policy in POLICIES
        for stop in (1, 4, 10)
        for again in (False, True)
    ]
    found += [Case("pipedream", 3, (6, 3), "adamw", has_teacher=True, stop=2)]
    found += [Case("pipeoptim", 4, (7, 3), "sgd", recurrent=True, stop=3)]
    found += [Case("pipeoptim", 3, (8, 5), "adam", accumulate=3, stop=4)]
    return found


@pytest.mark.parametrize("case", marked(stopped_cases()), ids=str)
def test_a_run_goes_on_with_the_batches_in_flight(case: Case) -> None:
    whole, again = run_pipelined(replace(case, stop=0)), run_pipelined(case)
    equal = partial(torch.testing.assert_close, rtol=0, atol=0)
    for mine, theirs in zip(again, whole, strict=True):
        equal(
            [mine.losses, mine.gradients, mine.state],
            [theirs.losses, theirs.gradients, theirs.state],
        )
        assert mine.trace == theirs.trace


def most_versions(case: Case) -> list[int]:
    """Copies of the weights on each rank, the current one among them."""
    if case.policy == "pipedream" and case.accumulate > 1:  # updates are rarer than batches
        return [1] + [2] * (case.num_stages - 1)
    ranks = range(case.num_stages)
    return [1 + num_copies(case.policy, rank, case.num_stages) for rank in ranks]


def test_what_is_read_is_what_the_policy_says() -> None:
    """Stage 0 of 3: two updates between a forward and its backward, fewer at first."""
    reads = {
        policy: run_pipelined(Case(policy, 3, (5,), accumulate=3 if policy == "2bw" else 1))[2]
        for policy in POLICIES
    }

    def seen(policy: str, *, forward: bool) -> list[tuple[int, int]]:
        trace = reads[policy].trace
        return [(r.version, r.predicted) for r in trace if r.forward is forward]

    moved_on = [(0, 0), (0, 1), (0, 2), (1, 2), (2, 2)]
    assert seen("pipeoptim", forward=True) == seen("spectrain", forward=True) == moved_on
    assert seen("pipeoptim", forward=False) == [(version, 0) for version in range(5)]
    kept = [(0, 0), (0, 0), (0, 0), (1, 0), (2, 0)]
    assert seen("pipedream", forward=True) == seen("pipedream", forward=False) == kept
    assert seen("2bw", forward=True) == seen("2bw", forward=False) == [(0, 0)] * 5
