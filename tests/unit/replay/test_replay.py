"""The step again after the trace: call inputs, effects of the prologue, and the replay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_tspipe.capture.plan import StepPlan, ValueRef
from lightning_tspipe.capture.trace import Networks, Tracer
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.replay.runner import StepRunner

NETWORKS = Networks(("student",), ("teacher",))
EMA = Callable[[nn.Module, nn.Module], None]


@torch.no_grad()
def in_place(teacher: nn.Module, student: nn.Module) -> None:
    for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
        old.mul_(0.9).add_(new, alpha=0.1)


def with_data(teacher: nn.Module, student: nn.Module) -> None:
    for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
        old.data = old.data * 0.9 + new.data * (1 - 0.9)


@torch.no_grad()
def with_copy(teacher: nn.Module, student: nn.Module) -> None:
    for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
        old.copy_(0.9 * old + 0.1 * new)


@torch.no_grad()
def with_lerp(teacher: nn.Module, student: nn.Module) -> None:
    for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
        old.lerp_(new, 0.1)


@torch.no_grad()
def with_foreach(teacher: nn.Module, student: nn.Module) -> None:
    old, new = list(teacher.parameters()), list(student.parameters())
    torch._foreach_mul_(old, 0.9)
    torch._foreach_add_(old, new, alpha=0.1)


@torch.no_grad()
def by_name(teacher: nn.Module, student: nn.Module) -> None:
    new = dict(student.named_parameters())
    for name, old in teacher.named_parameters():
        old *= 0.9  # noqa: PLW2901 - in place
        old += 0.1 * new[name]  # noqa: PLW2901


@torch.no_grad()
def by_state_dict(teacher: nn.Module, student: nn.Module) -> None:
    new = student.state_dict()
    for name, old in teacher.state_dict().items():
        old.copy_(old * 0.9 + new[name] * 0.1)


EMAS: tuple[EMA, ...] = (
    in_place, with_data, with_copy, with_lerp, with_foreach, by_name, by_state_dict,
)  # fmt: skip


class Module(nn.Module):
    """Counts, logs, updates a buffer, and calls its networks on inputs that it computes."""

    def __init__(self, ema: EMA = in_place) -> None:
        super().__init__()
        self.student = nn.Linear(3, 2)
        self.teacher = nn.Linear(3, 2).requires_grad_(requires_grad=False)
        self.register_buffer("center", torch.zeros(2))
        self.ema = ema
        self.count = 0
        self.history: list[int] = []
        self.logged: list[float] = []

    def log(self, _name: str, value: Tensor) -> None:
        self.logged.append(value.item())

    def training_step(self, batch: Any) -> Tensor:
        self.ema(self.teacher, self.student)
        self.count += 1
        self.history.append(self.count)
        x, weight = batch
        noise = torch.rand(3)
        p = self.student(x + noise)
        z = self.teacher(x.flip(0))
        self.center.mul_(0.5).add_(z.mean(0))
        loss = ((p - z - self.center) * weight).square().sum()
        self.log("loss", loss)
        return loss


def make(ema: EMA = in_place, *, is_loss_rank: bool = True) -> tuple[Module, StepPlan, StepRunner]:
    torch.manual_seed(0)
    module = Module(ema)
    tracer = Tracer(module, NETWORKS, torch.device("cpu"))
    plan = tracer.trace(module.training_step, make_batch(), seed=3)
    return module, plan, StepRunner(module, NETWORKS, plan, is_loss_rank=is_loss_rank)


def make_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)


def snapshot(module: Module) -> Any:
    state = copy.deepcopy(dict(module.state_dict()))
    return state, module.count, list(module.history), list(module.logged)


def assert_unchanged(module: Module, before: Any) -> None:
    state, *rest = snapshot(module)
    torch.testing.assert_close(state, before[0], rtol=0, atol=0)
    assert tuple(rest) == before[1:]


def test_only_what_the_step_reads_itself_is_a_field() -> None:
    _, plan, _ = make()
    assert plan.batch_fields == (1,)


def test_a_look_ahead_gives_the_inputs_and_changes_nothing() -> None:
    module, _, runner = make()
    before, random_state = snapshot(module), torch.random.get_rng_state()
    first = runner.inputs(module.training_step, make_batch(), seed=7, effects=False)
    again = runner.inputs(module.training_step, make_batch(), seed=7, effects=False)
    assert_unchanged(module, before)
    assert torch.equal(random_state, torch.random.get_rng_state())
    x, _ = make_batch()
    torch.manual_seed(7)
    torch.testing.assert_close(first, ((x + torch.rand(3),), (x.flip(0),)), rtol=0, atol=0)
    torch.testing.assert_close(first, again, rtol=0, atol=0)


@pytest.mark.parametrize("ema", EMAS)
def test_the_prologue_does_the_ema_once_on_every_rank(ema: EMA) -> None:
    module, plan, runner = make(ema)
    assert plan.has_effects
    expected = copy.deepcopy(module)
    ema(expected.teacher, expected.student)
    before = copy.deepcopy(dict(module.state_dict()))
    meta = tuple(torch.empty_like(t, device="meta") for t in make_batch())
    runner.effects(module.training_step, meta, seed=0)
    torch.testing.assert_close(module.teacher.weight, expected.teacher.weight)
    assert not torch.equal(module.teacher.weight, before["teacher.weight"])
    assert torch.equal(module.center, before["center"])
    assert (module.count, module.logged) == (0, [])  # the replay counts and logs


@pytest.mark.parametrize("ema", EMAS)
def test_the_prologue_touches_only_what_is_here(ema: EMA) -> None:
    """Parameters of other ranks are on the meta device."""
    module, _, runner = make(ema)
    for network in (module.student, module.teacher):
        bias = nn.Parameter(torch.empty(2, device="meta"), requires_grad=network.bias.requires_grad)
        torch.utils.swap_tensors(network.bias, bias)
    expected = 0.9 * module.teacher.weight + 0.1 * module.student.weight
    runner.effects(module.training_step, make_batch(), seed=0)
    torch.testing.assert_close(module.teacher.weight, expected)
    assert module.teacher.bias.is_meta


def test_a_rank_that_has_data_but_not_the_loss_keeps_count() -> None:
    module, _, runner = make(is_loss_rank=False)
    runner.inputs(module.training_step, make_batch(), seed=0, effects=True)
    assert module.history == [1]
    assert module.logged == []


def test_the_replay_is_the_step_with_given_outputs() -> None:
    module, plan, runner = make()
    weights = copy.deepcopy(dict(module.teacher.state_dict()))
    expected = copy.deepcopy(module)
    p, z = torch.randn(4, 2, requires_grad=True), torch.randn(4, 2)

    def outputs(call: int, ref: ValueRef) -> Tensor:
        assert ref == ValueRef(0, 0)
        return p if plan.calls[call].network == "student" else z

    x, weight = make_batch()
    loss = runner.replay(module.training_step, (x.to("meta"), weight), 0, outputs)
    expected.center.mul_(0.5).add_(z.mean(0))
    torch.testing.assert_close(loss, ((p - z - expected.center) * weight).square().sum())
    loss.backward()
    assert p.grad is not None
    torch.testing.assert_close(module.center, expected.center)
    assert (module.count, module.history, len(module.logged)) == (1, [1], 1)
    # The prologue did the EMA already.
    torch.testing.assert_close(dict(module.teacher.state_dict()), weights, rtol=0, atol=0)


@pytest.mark.parametrize(("num_calls", "message"), [
    (0, "made 1 calls of pipelined blocks, but 2 when it was traced: it did not call 'teacher'"),
    (2, "'teacher' once more than when it was traced, at .*test_replay.py:"),
])  # fmt: skip
def test_another_number_of_calls_than_traced(num_calls: int, message: str) -> None:
    module, plan, runner = make()

    def outputs(call: int, ref: ValueRef) -> Tensor:
        return torch.zeros(4, 2)

    def step(batch: Any) -> Any:
        z = module.student(batch[0])
        for _ in range(num_calls):
            z = module.teacher(batch[0])
        return z

    with pytest.raises(CaptureError, match=f"(?s){message}.*multiply what"):
        runner.replay(step, make_batch(), 0, outputs)
    assert len(plan.interceptions) == 2


class Warming(nn.Module):
    """Begins a second loss after a while."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
        self.late: Callable[..., Tensor] | None = None

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        features = self.student(x)
        made = self.head(features)
        loss = made.square().mean()
        return loss if self.late is None else loss + self.late(features, made, y).mean()


@pytest.mark.parametrize(
    ("late", "message"),
    [
        (lambda f, _p, _y: f.square(), "what the step returns is made of something that the step"),
        (lambda _f, p, y: p - y, r"test_replay\.py:\d+ .*asks for what is made of something"),
        (lambda _f, p, _y: p.abs(), ""),
    ],
    ids=["an output", "labels", "what was read before"],
)
def test_a_second_loss_reads_what_the_first_one_did_not(
    late: Callable[..., Tensor], message: str
) -> None:
    module, networks = Warming(), Networks(("student", "head"))
    tracer = Tracer(module, networks, torch.device("cpu"))
    x, y = torch.ones(4, 3), torch.ones(4, 2)
    plan = tracer.trace(module.training_step, (x, y), seed=3)
    runner = StepRunner(module, networks, plan, is_loss_rank=True)
    outputs, module.late = torch.full((4, 2), 3.0, requires_grad=True), late
    given = (x, y.to("meta"))
    if message:
        with pytest.raises(CaptureError, match=f"{message}.*may change"):
            runner.replay(module.training_step, given, 0, lambda *_: outputs)
    else:
        assert runner.replay(module.training_step, given, 0, lambda *_: outputs) == 12


def test_a_prologue_with_fewer_calls_than_traced() -> None:
    module, _, runner = make()
    with pytest.raises(CaptureError, match=r"1 calls of pipelined blocks, but 2.*may change"):
        runner.inputs(lambda batch: module.student(batch[0]), make_batch(), 0, effects=True)


def test_another_order_of_calls_than_traced() -> None:
    module, _, runner = make()
    with pytest.raises(CaptureError, match="calls 'teacher' where it called 'student'"):
        runner.inputs(lambda batch: module.teacher(batch[0]), make_batch(), 0, effects=True)


def test_an_error_of_the_user_in_the_prologue_stays_the_users() -> None:
    _, _, runner = make()

    def step(batch: Any) -> Any:
        raise KeyError(batch)

    with pytest.raises(KeyError):
        runner.inputs(step, make_batch(), 0, effects=True)


def test_values_that_a_rank_without_data_lacks() -> None:
    module, _, runner = make()

    def step(batch: Any) -> Any:
        return module.student(batch[0]) if batch[0].sum() > 0 else None

    meta = tuple(torch.empty_like(t, device="meta") for t in make_batch())
    with pytest.raises(CaptureError, match=r"without data.*test_replay\.py:\d+.*MomentumEMA"):
        runner.effects(step, meta, 0)


@pytest.mark.parametrize(
    "prepare",
    [
        lambda x, _m: x - torch.ones(3),
        lambda x, _m: torch.cat([x[:2], torch.ones(2, 3)]),
        lambda x, m: (x - m.center.mean()) / torch.tensor(2.0),
        lambda x, _m: x.to("cpu", non_blocking=True),
        lambda x, _m: x.to(device="cpu").cpu(),
        lambda x, _m: x.to(torch.ones(1)).double().float(),
        lambda x, _m: x.clone().sub_(torch.ones(3)),
        lambda x, _m: x[torch.randperm(4)],
        lambda x, _m: torch.where(torch.rand(4, 1) < 0.5, x, -x),
    ],
    ids=["minus", "cat", "buffer", "to", "cpu", "to-other", "in-place", "shuffle", "where"],
)
def test_inputs_that_are_made_of_the_batch_and_of_something_else(
    prepare: Callable[[Tensor, Module], Tensor],
) -> None:
    """The views stay on the data rank: the replay and the effects run without their values."""
    torch.manual_seed(0)
    module = Module()

    def step(batch: Any) -> Tensor:
        module.ema(module.teacher, module.student)
        x, weight = batch
        p = module.student(prepare(x, module))
        return (p * module.teacher(x) * weight * torch.rand(2)).sum()  # type: ignore[no-any-return]

    tracer = Tracer(module, NETWORKS, torch.device("cpu"))
    plan = tracer.trace(step, make_batch(), seed=3)
    runner = StepRunner(module, NETWORKS, plan, is_loss_rank=True)
    assert plan.batch_fields == (1,)
    x, weight = make_batch()
    teacher = module.teacher.weight.clone()
    runner.effects(step, (x.to("meta"), weight.to("meta")), 5)
    assert not torch.equal(teacher, module.teacher.weight)
    inputs = runner.inputs(step, (x, weight), 5, effects=False)
    torch.manual_seed(5)
    torch.testing.assert_close(inputs[0][0], prepare(x, module), rtol=0, atol=0)
    factor = torch.rand(2)  # the replay's random numbers go on where the inputs' ended
    loss = runner.replay(step, (x.to("meta"), weight), 5, lambda *_: torch.ones(4, 2))
    torch.testing.assert_close(loss, (weight * factor * torch.ones(4, 2)).sum(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "draw",
    [
        torch.rand_like,
        lambda x: torch.empty_like(x).normal_(),
        lambda x: nn.functional.dropout(x, 0.5),
    ],
    ids=["like", "normal_", "dropout"],
)
def test_what_random_numbers_are_drawn_for_is_a_field(draw: Callable[[Tensor], Tensor]) -> None:
    """Meta tensors draw nothing: on the loss rank all later random numbers would be others."""
    module = Module()

    def step(batch: Any) -> Tensor:
        x, _ = batch
        return (module.student(x + draw(x)) * module.teacher(x) * torch.rand(2)).sum()  # type: ignore[no-any-return]

    plan = Tracer(module, NETWORKS, torch.device("cpu")).trace(step, make_batch(), seed=3)
    assert 0 in plan.batch_fields


@pytest.mark.parametrize("is_late", [False, True])
def test_masks_are_made_where_the_batch_would_be(*, is_late: bool) -> None:
    """Nothing is sent for them, and the step may look at them (lightly's block masks)."""
    module = Module()

    def mask(x: Tensor) -> Tensor:
        made = torch.rand(len(x), 1, device=x.device) < 0.5
        made[int(made.sum().item()) % len(x)] = True
        return made

    def step(batch: Any) -> Tensor:
        x, _ = batch
        if not is_late:
            mask(x)
        module.ema(module.teacher, module.student)
        p = module.student(x) * module.teacher(x)
        return (p * mask(x) * torch.rand(2)).sum()  # type: ignore[no-any-return]

    plan = Tracer(module, NETWORKS, torch.device("cpu")).trace(step, make_batch(), seed=3)
    assert plan.batch_fields == ()
    runner = StepRunner(module, NETWORKS, plan, is_loss_rank=True)
    x, weight = make_batch()
    meta = x.to("meta"), weight.to("meta")
    teacher = module.teacher.weight.clone()
    runner.effects(step, meta, 5)
    assert not torch.equal(teacher, module.teacher.weight)
    losses = [
        runner.replay(step, batch, 5, lambda *_: torch.ones(4, 2)) for batch in (meta, (x, weight))
    ]
    assert losses[0].item() == losses[1].item() > 0


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_draws_for_its_dropout_only(dropout: float) -> None:
    module = Module()

    def step(batch: Any) -> Tensor:
        x, _ = batch
        y = x[None]
        seen = nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=dropout)[0]
        return (module.student(seen) * module.teacher(x)).sum()  # type: ignore[no-any-return]

    plan = Tracer(module, NETWORKS, torch.device("cpu")).trace(step, make_batch(), seed=3)
    assert plan.batch_fields == ((0,) if dropout else ())


def test_a_replay_can_be_left_for_a_while() -> None:
    """Optimizers work on the real networks, and the step goes on as if nothing had been."""
    module, _, runner = make()
    weight = module.student.weight
    drawn: list[Tensor] = []
    ambient: list[Tensor] = []

    def output(call: int, ref: ValueRef) -> Tensor:
        if call == 0:
            with runner.suspended(), runner.suspended():
                assert module.student.weight is weight
                assert "forward" not in vars(module.student)
                ambient.append(torch.rand(1))
            assert module.student.weight.is_meta
        return torch.ones(4, 2)

    def step(batch: Any) -> Tensor:
        loss = module.training_step(batch)
        drawn.append(torch.rand(2))
        return loss

    torch.manual_seed(11)
    runner.replay(step, make_batch(), 5, output)
    torch.manual_seed(5)
    torch.rand(3)  # the noise of the step
    assert torch.equal(drawn[0], torch.rand(2))
    torch.manual_seed(11)
    assert torch.equal(ambient[0], torch.rand(1))
    assert module.student.weight is weight
    assert "forward" not in vars(module.student)
