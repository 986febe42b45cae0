"""Steps that can't be captured: each gets an error that says where, and what to do instead."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_tspipe.capture.plan import StepPlan, ValueRef
from lightning_tspipe.capture.trace import Networks, Tracer
from lightning_tspipe.errors import CaptureError

Step = Callable[["Module", Any], Any]


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 3)
        self.student = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
        self.teacher = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
        self.teacher.requires_grad_(requires_grad=False)
        self.head_a = nn.Linear(3, 3)
        self.head_b = nn.Linear(3, 3)


def trace(step: Step, student: tuple[str, ...] = ("student",)) -> StepPlan:
    module = Module()
    tracer = Tracer(module, Networks(student, ("teacher",)), torch.device("cpu"))
    return tracer.trace(lambda batch: step(module, batch), torch.randn(4, 3), seed=0)


def fails_with(step: Step, *parts: str, student: tuple[str, ...] = ("student",)) -> None:
    """The message has these parts, in this order."""
    with pytest.raises(CaptureError, match="(?s)" + ".*".join(map(re.escape, parts))):
        trace(step, student)


def test_networks_that_are_not_called() -> None:
    fails_with(
        lambda m, x: m.stem(x).sum(),
        "never called 'student' or 'teacher'",
        "TSPipeStrategy(student=[...], teacher=[...])",
    )


def test_parts_are_called_past_forward() -> None:
    def step(m: Module, x: Tensor) -> Tensor:
        return m.student[2](m.student[0](x)).sum()  # type: ignore[no-any-return]

    plan = trace(step)
    (route,) = plan.routes["student"]
    assert [entry.title for entry in route.entries] == ["student.0", "student.2"]
    assert route.used == (ValueRef(1, 0),)


@pytest.mark.parametrize(
    "look",
    [
        lambda p: p.mean() > 0,
        lambda p: bool((p.detach() > 0).any()),
        lambda p: p.mean().item() > 0,
        lambda p: p.detach().sum().tolist() != 0,
        lambda p: float(p.detach()[0, 0]) > 0,
    ],
    ids=["bool", "any", "item", "tolist", "float"],
)
def test_control_flow_between_calls(look: Callable[[Tensor], Any]) -> None:
    def step(m: Module, x: Tensor) -> Tensor:
        p = m.student(x)
        if look(p):
            p = p * 2
        return (p - m.teacher(x)).sum()  # type: ignore[no-any-return]

    fails_with(step, "before its last call", "test_refusals.py:", "behind the last call")


def test_a_forward_that_decides_by_a_value() -> None:
    """Of what torch says, only what users can read is told."""

    class Decides(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x)
            return made * 2 if made.mean() > 0 else made

    def step(m: Any, x: Tensor) -> Tensor:
        return (m.student(x) - m.teacher(x)).sum()  # type: ignore[no-any-return]

    module = Module()
    module.student = Decides(3, 3)  # type: ignore[assignment]
    tracer = Tracer(module, Networks(("student",), ("teacher",)), torch.device("cpu"))
    told = r"test_refusals.py:\d+ \(return made \* 2.*\): it decides by the value of a tensor"
    with pytest.raises(CaptureError, match=told) as error:
        tracer.trace(lambda batch: step(module, batch), torch.randn(4, 3), seed=0)
    assert "TORCH_LOGS" not in str(error.value)


def test_values_may_be_looked_at_behind_the_last_call() -> None:
    def step(m: Module, x: Tensor) -> Tensor:
        p, z = m.student(x), m.teacher(x)
        return p.sum() if z.mean() > 0 else p.mean()  # type: ignore[no-any-return]

    assert len(trace(step).calls) == 2


@pytest.mark.parametrize(
    "edit",
    [
        lambda p: p.mul_(0.9),
        lambda p: p.data.mul_(0.9),
        lambda p: torch._foreach_mul_([p], 0.9),
        lambda p: p.copy_(torch.zeros(3)),
        nn.init.zeros_,
        lambda p: p.__setitem__(0, 1.0),
        lambda p: setattr(p, "data", torch.zeros(3)),
    ],
    ids=["mul_", "data.mul_", "foreach", "copy_", "init", "setitem", "data"],
)
def test_edits_after_the_last_call(edit: Callable[[Tensor], Any]) -> None:
    """A backward of the student is still to come; the teacher's are late effects."""

    def step(m: Module, x: Tensor, network: str = "student") -> Tensor:
        loss = (m.student(x) - m.teacher(x)).sum()
        with torch.no_grad():
            edit(m.get_submodule(network)[0].bias)  # type: ignore[arg-type,index]
        return loss  # type: ignore[no-any-return]

    assert trace(lambda m, x: step(m, x, "teacher")).has_late_effects
    fails_with(
        step, "changes a pipelined parameter after its last call", "test_refusals.py:",
        "before the last call", "on_train_batch_end", "MomentumEMA",
    )  # fmt: skip


@pytest.mark.parametrize("whose", ["the module's", "the optimizer's"])
def test_gradients_are_looked_at(whose: str) -> None:
    module = Module()
    held = list(module.student.parameters())  # as an optimizer holds them

    def step(x: Tensor) -> Tensor:
        loss: Tensor = module.student(x).sum()
        parameters = module.student.parameters() if whose == "the module's" else held
        nn.utils.clip_grad_norm_(parameters, 1.0)
        return loss

    tracer = Tracer(module, Networks(("student",)), torch.device("cpu"))
    with pytest.raises(CaptureError, match=r"(?s)gradient.*test_refusals.*clip_gradients"):
        tracer.trace(step, torch.randn(4, 3), seed=0)


def test_a_weight_used_past_forward() -> None:
    def step(m: Module, x: Tensor) -> Tensor:
        z = m.student(x)
        return nn.functional.linear(z, m.student[2].weight).sum()  # type: ignore[no-any-return, arg-type]

    assert trace(step).parameters == {"student.2.weight"}
    with torch.no_grad():
        assert trace(step).parameters == {"student.2.weight"}


def test_a_weight_of_the_teacher_in_the_loss() -> None:
    def step(m: Module, x: Tensor) -> Tensor:
        distance = (m.stem.weight - m.teacher.get_parameter("0.weight")).square().sum()
        return m.student(x).sum() + m.teacher(x).sum() + distance  # type: ignore[no-any-return]

    assert trace(step).parameters == {"teacher.0.weight"}

    def averages(m: Module, x: Tensor) -> Tensor:
        loss = step(m, x)
        with torch.no_grad():
            m.teacher.get_parameter("0.weight").mul_(0.9)
        return loss

    fails_with(averages, "'teacher.0.weight'", "on another rank", "keep a copy", "hook")


def test_what_is_computed_from_a_weight_may_be_written_into() -> None:
    def step(m: Module, x: Tensor) -> Tensor:
        made = nn.functional.linear(m.student(x), m.student[2].weight)  # type: ignore[index,arg-type]
        made.div_(2)
        made[0] = 0
        return made.sum()

    plan = trace(step)
    assert plan.parameters == {"student.2.weight"}
    assert not plan.has_effects
    assert not plan.has_late_effects


def test_an_input_from_a_module_that_is_not_declared() -> None:
    fails_with(
        lambda m, x: m.student(m.stem(x)).sum(),
        "input of 'student' depends on trained parameters outside", "test_refusals.py:",
        "TSPipeStrategy(student=['stem', 'student', ...])",
    )  # fmt: skip


def test_an_input_that_is_a_parameter() -> None:
    def step(m: Module, x: Tensor) -> Tensor:
        m.prompt = m.prompt if hasattr(m, "prompt") else nn.Parameter(torch.zeros(3))
        return m.student(x + m.prompt).sum()  # type: ignore[no-any-return, arg-type]

    fails_with(
        step, "depends on trained parameters", "the network that reads it: self.student.prompt"
    )


def test_gradients_with_respect_to_an_input() -> None:
    """Adversarial examples (FGSM)."""

    def step(m: Module, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (gradient,) = torch.autograd.grad(m.student(x).sum(), x)
        return m.student(x + 0.1 * gradient.sign()).sum()  # type: ignore[no-any-return]

    fails_with(step, "requires gradients itself", "test_refusals.py:", "not pipelined")


def test_an_input_from_a_frozen_module_is_fine() -> None:
    def step(m: Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = m.stem(x)
        return m.student(x).sum()  # type: ignore[no-any-return]

    assert len(trace(step).calls) == 1


def test_a_teacher_that_is_trained() -> None:
    def step(m: Module, x: Tensor) -> Tensor:
        m.teacher.requires_grad_(requires_grad=True)
        return (m.student(x) - m.teacher(x)).sum()  # type: ignore[no-any-return]

    fails_with(step, "teacher's output requires gradients", "torch.no_grad()")


def test_branches() -> None:
    def step(m: Module, x: Tensor) -> Tensor:
        features = m.student(x)
        return (m.head_a(features) - m.head_b(features.relu())).sum()  # type: ignore[no-any-return]

    plan = trace(step, ("student", "head_a", "head_b"))
    (route,) = plan.routes["student"]
    assert len(plan.calls) == 1
    assert str(route.entries[2]) == "head_b(*) of torch.Tensor.relu(*)[0](%0.0)"


def test_calls_that_go_different_ways() -> None:
    def step(m: Module, x: Tensor) -> Tensor:
        return m.head_a(m.student(x)).sum() + m.head_b(m.student(x)).sum()  # type: ignore[no-any-return]

    plan = trace(step, ("student", "head_a", "head_b"))
    assert [call.route for call in plan.calls] == [0, 1]


def test_a_student_that_reads_the_teacher() -> None:
    plan = trace(lambda m, x: m.student(m.teacher(x).softmax(0) + x).sum())
    assert "test_refusals.py:" in plan.fed_at
    assert plan.routes["teacher"][0].used == (ValueRef(0, 0),)
    assert not trace(lambda m, x: (m.student(x) - m.teacher(x)).sum()).fed_at


def test_a_teacher_that_reads_the_student() -> None:
    def step(m: Module, x: Tensor) -> Tensor:
        return m.teacher(m.student(m.teacher(x))).sum()  # type: ignore[no-any-return]

    fails_with(
        step, "'teacher' belongs to the teacher", "computed from the output of 'student'",
        "test_refusals.py:", "Leave it out of TSPipeStrategy(teacher=...)",
    )  # fmt: skip


def test_an_input_of_both_networks() -> None:
    plan = trace(
        lambda m, x: m.head_a(m.student(x) + m.teacher(x)).sum(), student=("student", "head_a")
    )
    assert [str(value) for value in plan.route(0).entries[1].values] == [
        "torch.Tensor.add(*, *)[0](%0.0, x1)"
    ]
    assert plan.joins
    assert "test_refusals.py:" in plan.fed_at


def test_two_outputs_in_one_input() -> None:
    """They are of one call, which goes through the network twice."""

    def step(m: Module, x: Tensor) -> Tensor:
        return m.head_a(m.student(x) + m.student(-x)).sum()  # type: ignore[no-any-return]

    plan = trace(step, ("student", "head_a"))
    (call,), (route,) = plan.calls, plan.routes["student"]
    assert len(call.inputs) == 2
    assert [entry.title for entry in route.entries] == ["student", "student", "head_a"]


def test_two_outputs_of_other_numbers_of_samples() -> None:
    plan = trace(
        lambda m, x: m.head_a(torch.cat([m.student(x), m.student(x[:2])])).sum(),
        student=("student", "head_a"),
    )
    assert [kind.is_bound for kind in plan.route(0).arguments.tensors] == [False, True]


def test_a_call_without_a_tensor() -> None:
    fails_with(lambda m, _: m.student(2).sum(), "'student' is called without a tensor")


def test_a_constant_with_as_many_rows_as_there_are_samples() -> None:
    """Another batch may have another number; what the step makes for each sample has a row."""

    def step(m: Module, x: Tensor) -> Tensor:
        with torch.no_grad():  # a network of which nothing is computed
            return m.student(x, m.table, torch.rand(len(x), 1)).sum()  # type: ignore[no-any-return]

    class Three(nn.Module):
        def forward(self, x: Tensor, table: Tensor, noise: Tensor) -> Tensor:
            return x @ table[:3] * noise

    module = Module()
    module.student = Three()  # type: ignore[assignment]
    module.register_buffer("table", torch.randn(4, 3))
    tracer = Tracer(module, Networks(("student",)), torch.device("cpu"))
    plan = tracer.trace(lambda batch: step(module, batch), torch.randn(4, 3), seed=0)
    kinds = plan.route(0).arguments.tensors
    assert [kind.is_whole for kind in kinds] == [False, True, False]
    assert not any(kind.is_bound for kind in kinds)


def test_calls_of_one_network_with_other_constants() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x) * scale

    def step(m: Module, x: Tensor) -> Tensor:
        return m.student(x, scale=2.0).sum() + m.student(x, scale=3.0).sum()  # type: ignore[no-any-return]

    module = Module()
    module.student = Scaled(3, 3)  # type: ignore[assignment]
    tracer = Tracer(module, Networks(("student",)), torch.device("cpu"))
    plan = tracer.trace(lambda batch: step(module, batch), torch.randn(4, 3), seed=0)
    assert [str(route) for route in plan.routes["student"]] == [
        "student(*, scale=2.0) of x", "student(*, scale=3.0) of x",
    ]  # fmt: skip


def test_one_tensor_by_name() -> None:
    plan = trace(lambda m, x: m.student(input=x).sum() + m.teacher(x).sum())
    assert [call.network for call in plan.calls] == ["student", "teacher"]


def test_memory_that_two_tensors_of_a_batch_share_is_not_written() -> None:
    module = Module()
    x = torch.randn(4, 3)

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        batch[0].sub_(1.0)
        return module.student(batch[1]).sum()  # type: ignore[no-any-return]

    tracer = Tracer(module, Networks(("student",), ("teacher",)), torch.device("cpu"))
    with pytest.raises(CaptureError, match=r"test_refusals\.py:\d+.*share that memory"):
        tracer.trace(step, (x, x), seed=0)


def test_a_copy_of_the_batch_may_be_changed_and_labels_behind_the_calls() -> None:
    def step(m: Module, x: Tensor) -> Tensor:
        copied = x.clone()
        copied.sub_(1.0)
        z = m.student(copied)
        x[0] = 1.0
        return (z * x).sum()  # type: ignore[no-any-return]

    assert trace(step).batch_fields == (0,)


def _by_index(features: Tensor) -> None:
    features[:, :2] = 0


def _by_a_view(features: Tensor) -> None:
    features[:, 0].zero_()


def _by_its_data(features: Tensor) -> None:
    features.data = features.data * 2


@pytest.mark.parametrize("write", [_by_index, _by_a_view, _by_its_data])
def test_what_is_written_between_two_calls_is_no_glue(write: Callable[[Tensor], None]) -> None:
    def step(m: Module, x: Tensor) -> Tensor:
        features = m.head_a(x).clone()
        write(features)
        return m.head_b(features).sum()  # type: ignore[no-any-return]

    parts = ("'head_b' is computed from the output of 'head_a'", "test_refusals.py", "a module")
    fails_with(step, *parts, student=("head_a", "head_b"))


def test_a_buffer_whose_data_come_from_an_output() -> None:
    """Between calls it may be written (DINO's centre), which looks at no value."""

    def step(m: Module, x: Tensor, *, names: str, feeds: bool = False) -> Tensor:
        first, second = map(m.get_submodule, names.split())
        m.stem.bias.data = first(x).detach().mean(0)
        return second(x + m.stem.bias.detach() if feeds else x).sum() + m.student(x).sum()  # type: ignore[no-any-return]

    forward, backward = (partial(step, names=n) for n in ("teacher student", "student teacher"))
    assert not trace(forward).fed_at
    assert not trace(backward).fed_at
    assert "test_refusals.py:" in trace(partial(forward, feeds=True)).fed_at
    fails_with(partial(backward, feeds=True), "'teacher' belongs to the teacher")


def test_an_input_into_which_an_output_was_written() -> None:
    def step(m: Module, x: Tensor) -> Tensor:
        mixed = x.clone()
        mixed[:, 0] = m.teacher(x)[:, 0]
        return m.student(mixed).sum()  # type: ignore[no-any-return]

    assert "test_refusals.py:" in trace(step).fed_at


def test_a_tensor_that_is_given_to_a_call_again_after_a_write_is_another() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, by: Tensor) -> Tensor:
            return x * by

    module = Module()
    module.head_b = Scaled()  # type: ignore[assignment]

    def step(x: Tensor) -> Tensor:
        own = x.clone()
        features = module.head_a(own)
        own.mul_(2)
        return module.head_b(features, own).sum()  # type: ignore[no-any-return]

    tracer = Tracer(module, Networks(("head_a", "head_b")), torch.device("cpu"))
    (route,) = tracer.trace(step, torch.randn(4, 3), seed=0).routes["student"]
    assert [str(entry.values[-1]) for entry in route.entries] == ["x", "x1"]


def test_what_is_made_of_an_output_is_not_written_into_a_network() -> None:
    """Networks run later, and on other ranks."""

    def between(m: Any, x: Tensor) -> Tensor:
        made = m.student(x)
        m.student[0].bias.data.lerp_(made.detach().mean(0), 0.1)
        return (made - m.teacher(x)).square().mean()  # type: ignore[no-any-return]

    def behind(m: Any, x: Tensor) -> Tensor:
        late, made = m.teacher(x), m.student(x)
        m.teacher[0].bias.mul_(0.9).add_(late.mean(0))
        return (made - late).square().mean()  # type: ignore[no-any-return]

    for step in (between, behind):
        fails_with(
            step, "writes what it computes from a network's output into a pipelined network",
            "test_refusals.py:", "in a buffer of the LightningModule itself",
        )  # fmt: skip


def test_an_error_of_the_user_keeps_its_line() -> None:
    def step(m: Module, x: Tensor) -> Tensor:
        z = m.student(x)
        return z @ torch.zeros(7, 7)  # the line in question

    with pytest.raises(CaptureError, match=r"test_refusals\.py:\d+ .*the line in question") as info:
        trace(step)
    assert isinstance(info.value.__cause__, RuntimeError)


def test_an_average_that_decides_by_its_counter() -> None:
    module: Any = Module()
    module.teacher = AveragedModel(module.student).requires_grad_(requires_grad=False)

    def step(x: Tensor) -> Tensor:
        module.teacher.update_parameters(module.student)
        return (module.student(x) - module.teacher(x)).sum()  # type: ignore[no-any-return]

    tracer = Tracer(module, Networks(("student",), ("teacher",)), torch.device("cpu"))
    with pytest.raises(CaptureError, match=r"(?s)test_refusals\.py:\d+.*AveragedModel.*on_train"):
        tracer.trace(step, torch.randn(4, 3), seed=0)


class Counted(nn.Module):
    """Returns how many samples there are."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x * 2, len(x)


def test_a_number_of_samples_that_a_network_returns() -> None:
    def step(m: Module, x: Tensor) -> Tensor:
        y, number = m.student[1](x)
        return y.sum() / number  # type: ignore[no-any-return]

    module = Module()
    module.student[1] = Counted()
    tracer = Tracer(module, Networks(("student",)), torch.device("cpu"))
    with pytest.raises(CaptureError, match="depends on the number of samples"):
        tracer.trace(lambda batch: step(module, batch), torch.randn(4, 3), seed=0)


def test_parts_have_the_signatures_of_what_they_stand_for() -> None:
    def step(m: Module, x: Tensor) -> Tensor:
        assert [*inspect.signature(m.student.forward).parameters] == ["input"]
        return m.student(x).sum()  # type: ignore[no-any-return]

    trace(step)
