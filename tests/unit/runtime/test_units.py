from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_tspipe.capture.plan import TensorSpec, ValueRef
from lightning_tspipe.capture.trace import Networks, Tracer
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.runtime.stages.captured import Captured, StepUnits, split_sizes
from lightning_tspipe.runtime.stages.frozen import FrozenPart
from lightning_tspipe.runtime.stages.network import ChainNetwork, networks_of

CPU = torch.device("cpu")


class Tapped(nn.Module):
    """The first block's output is used twice, and some calls end there."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.head: nn.Module = nn.Linear(4, 2)

    def training_step(self, x: Tensor) -> Tensor:
        features = self.body(x)
        alone = self.body(x[: len(x) // 2])
        return self.head(features).sum() + features.sum() + alone.sum()  # type: ignore[no-any-return]


class Rows(nn.Module):
    """Does something with rows."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def layers_between_rows(x: Tensor) -> Tensor:
    rows = x.unflatten(1, (2, -1)).flatten(0, 1)
    return rows + nn.functional.relu(nn.functional.linear(rows, torch.ones(2, 2)))


class Halving(nn.Module):
    """Leaves out every other row of a sample, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.halves = False

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, ::2] if self.halves else x
        return self.second(self.first(x))  # type: ignore[no-any-return]


def test_shapes_are_those_of_the_network_as_it_is_now() -> None:
    module = nn.Module()
    module.body = body = Halving()
    tracer = Tracer(module, Networks(("body",)), CPU)
    plan = tracer.trace(lambda x: body(x).sum(), torch.randn(2, 6, 3), seed=0)
    (chain,) = networks_of(module, plan, CPU)["student"].routes
    spec = TensorSpec((2, 6, 3), torch.float32)
    for halves, rows in ((False, 6), (True, 3), (False, 6)):
        body.halves = halves
        _, (passed,), _ = chain.shapes(spec, grad=True).boundaries
        assert passed.shape == (2, rows, 4)
    body.first.requires_grad_(requires_grad=False)
    _, (passed,), _ = chain.shapes(spec, grad=True).boundaries
    assert not passed.requires_grad


class Windows(nn.Module):
    """Rows per sample, a transposed tensor, a channels-last one, and one without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.norm(self.conv(x))
        rows = x.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1).flatten(2)
        y = self.head(rows).relu_()
        return y, x.flatten(2).transpose(1, 2), y.detach().argmax(-1)


@pytest.mark.parametrize(("known", "asked"), [(2, 3), (5, 2), (1, 4), (4, 1)])
@pytest.mark.parametrize("grad", [True, False])
def test_shapes_of_other_numbers_of_samples_are_those_that_run(
    known: int, asked: int, *, grad: bool
) -> None:
    module = nn.Module()
    module.body = body = Windows()
    tracer = Tracer(module, Networks(("body",)), CPU)
    plan = tracer.trace(lambda x: sum(y.sum() for y in body(x)), torch.randn(4, 3, 8, 8), seed=0)
    seen, fresh = (networks_of(module, plan, CPU)["student"].routes[0] for _ in range(2))
    specs = {n: TensorSpec((n, 3, 8, 8), torch.float32) for n in (known, asked)}
    seen.shapes(specs[known], grad=grad)
    assert seen.shapes(specs[asked], grad=grad) == fresh.shapes(specs[asked], grad=grad)


def make_units(
    size: int, num_microbatches: int, module: Tapped | None = None
) -> tuple[StepUnits, ChainNetwork]:
    module = module or Tapped()
    tracer = Tracer(module, Networks(("body", "head")), CPU)
    plan = tracer.trace(module.training_step, torch.randn(size, 3), seed=0)
    network = networks_of(module, plan, CPU)["student"]
    inputs = [(TensorSpec((n, 3), torch.float32),) for n in (size, size // 2)]
    captured = Captured(plan, {"student": network})
    placement = Placement(2, (0, 2, len(network.atoms)), (1, 0), num_microbatches=num_microbatches)
    units = StepUnits(captured, placement, inputs)
    return units, network


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("count", range(1, 5))
def test_sizes_are_those_of_tensor_split(size: int, count: int) -> None:
    parts = torch.tensor_split(torch.zeros(size), count)
    assert split_sizes(size, count) == tuple(map(len, parts))


def test_units_of_two_calls() -> None:
    units, network = make_units(5, 3)
    assert len(network.atoms) == 3
    found = units.units["student"]
    assert [(u.call, u.start, u.size) for u in found] == [
        (0, 0, 2), (0, 2, 2), (0, 4, 1), (1, 0, 1), (1, 1, 1), (1, 2, 0),
    ]  # fmt: skip
    assert [u.shapes is None for u in found] == [False] * 5 + [True]
    assert not any(u.is_only for u in found)


def test_a_batch_of_one_is_one_micro_batch() -> None:
    units, _ = make_units(2, 3)
    assert [u.is_only for u in units.units["student"] if u.call == 1 and u.size] == [True]


def test_a_stage_skips_calls_that_ended_before_it_and_empty_micro_batches() -> None:
    units, _ = make_units(5, 3)
    assert [units.span(Action(Op.FORWARD, 0, unit)) for unit in range(5)] == [(0, 2)] * 5
    assert not units.runs(Action(Op.FORWARD, 0, 5))
    first, last = units.span(Action(Op.FORWARD, 1, 3))
    assert first == last
    assert not units.runs(Action(Op.FORWARD, 1, 3))
    assert units.microbatches_at(Action(Op.FORWARD, 0, 0)) == {0: 3, 1: 2}
    assert units.microbatches_at(Action(Op.FORWARD, 1, 0)) == {0: 3}


def test_what_a_unit_hands_to_the_loss_and_gets() -> None:
    units, _ = make_units(5, 3)
    features, head = ValueRef(0, 0), ValueRef(1, 0)
    assert units.outputs(Action(Op.FORWARD, 0, 0)) == {}  # the head reads them first
    assert list(units.outputs(Action(Op.FORWARD, 1, 0))) == [features, head]
    assert list(units.outputs(Action(Op.FORWARD, 0, 3))) == [features]
    assert units.outputs(Action(Op.FORWARD, 1, 3)) == {}
    (spec,) = units.input_specs(Action(Op.FORWARD, 1, 2))
    assert spec == TensorSpec((1, 4), torch.float32, requires_grad=True)
    assert units.input_specs(Action(Op.FORWARD, 1, 3)) == ()


@pytest.mark.parametrize(
    ("known", "spans", "runs"),
    [
        (0, [(0, 1), (1, 2)], [True, True]),
        (1, [(3, 3), (1, 2)], [False, True]),
        (2, [(3, 3), (2, 2)], [False, True]),  # the last stage reads what comes out
    ],
)
def test_frozen_stages_before_what_is_known_have_nothing_to_do(
    known: int, spans: list[tuple[int, int]], runs: list[bool]
) -> None:
    whole, network = make_units(4, 1)
    part = FrozenPart(network, 2)
    units = StepUnits(
        Captured(whole._plan, {"student": network, "teacher": part}),
        Placement(2, (2, 3), (0,), (0, 1, 2), (1, 0)), whole.inputs, known,
    )  # fmt: skip
    stages = [Action(Op.TEACHER, stage, 0) for stage in range(2)]
    assert [units.span(action) for action in stages] == spans
    assert [units.runs(action) for action in stages] == runs
    # Whoever reads what is known gets nothing from the stage before it.
    assert [bool(units.input_specs(action)) for action in stages] == [not known, not known]
    assert units.microbatches_at(stages[0]) == ({} if known else {0: 1, 1: 1})
    assert units.span(Action(Op.FORWARD, 0, 0)) == (2, 3)


class Averaging(nn.Module):
    """Keeps a mean of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


def test_a_buffer_that_the_forward_changes_needs_one_micro_batch() -> None:
    module = Tapped()
    module.head = Averaging()
    make_units(4, 1, module)
    with pytest.raises(ConfigurationError, match=r"'head.mean', at .*test_units\.py.*=1"):
        make_units(4, 2, module)
    make_units(4, 2, module.eval())


def tapped_by(function: Callable[[Tensor], Tensor]) -> Tapped:
    module = Tapped()
    module.head = Rows(function)
    return module


def joined(function: Callable[[Tensor], Tensor], num_microbatches: int) -> Tensor:
    """The outputs of micro-batches of four samples, one after the other."""
    torch.manual_seed(0)
    _, network = make_units(4, num_microbatches, tapped_by(function))
    chain, x = network.routes[0], torch.randn(4, 3)
    parts = x.tensor_split(num_microbatches)
    made = [chain.run((part,), 0, len(chain.atoms), grad=False)[1] for part in parts]
    return torch.cat([each[ValueRef(1, 0)] for each in made])


@pytest.mark.parametrize(
    "function",
    [layers_between_rows, lambda x: x.view(len(x), 2, 2), lambda x: x.reshape(-1, 2)],
    ids=["layers", "several dimensions", "reshaped"],
)
def test_outputs_of_micro_batches_are_joined(function: Callable[[Tensor], Tensor]) -> None:
    # Not bit by bit: kernels for other numbers of rows may round differently.
    torch.testing.assert_close(joined(function, 1), joined(function, 2))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(0),
        lambda x: x.sum(),
        lambda x: x.unflatten(1, (2, -1)).transpose(0, 1),
        lambda x: x.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 1),
        lambda x: torch.cat([x, 2 * x]),
        lambda x: x.repeat(2, 1),
    ],
    ids=["sums", "one number", "samples second", "samples second, flat", "two views", "repeated"],
)
def test_outputs_without_their_rows_in_order_need_one_micro_batch(
    function: Callable[[Tensor], Tensor],
) -> None:
    make_units(4, 1, tapped_by(function))
    with pytest.raises(ConfigurationError, match=r"'head'.*test_units\.py.*num_microbatches=1"):
        make_units(4, 2, tapped_by(function))
