"""A step gives its networks the same inputs whenever it runs on a batch, or it is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_tspipe.capture.held import generators_of, held_by
from lightning_tspipe.capture.plan import Inputs, StepPlan, ValueRef
from lightning_tspipe.capture.trace import Networks, Tracer
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.replay.purity import Comparisons, Fingerprint, fingerprints, is_compared
from lightning_tspipe.replay.runner import StepRunner

NETWORKS = Networks(("student",))


class Augmentation:
    def __init__(self) -> None:
        self.generators = [np.random.RandomState(1)]

    def __call__(self, x: Tensor) -> Tensor:
        return x * float(self.generators[0].rand())


class Module(nn.Module):
    """Augments its batch, by whatever is set."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(3, 2)
        self.center = nn.Buffer(torch.zeros(3))
        self.torch = torch.Generator().manual_seed(3)
        self.twins = (random.Random(1), random.Random(1))  # noqa: S311
        self.numpy = {"a": np.random.default_rng(4)}
        self.augmentation = Augmentation()
        self.scale = 1.0


def capture(step: Callable[[Any], Tensor], batch: Any) -> tuple[Module, StepPlan, StepRunner]:
    (module,) = step.__defaults__ or ()
    plan = Tracer(module, NETWORKS, torch.device("cpu")).trace(step, batch, seed=3)
    return module, plan, StepRunner(module, NETWORKS, plan, is_loss_rank=True)


def ones(_call: int, _ref: ValueRef) -> Tensor:
    return torch.ones(4, 2)


def replayed(runner: StepRunner, step: Callable[[Any], Tensor], batch: Any, inputs: Inputs) -> Any:
    return runner.replay(step, batch, 7, ones, fingerprints(inputs))


def torch_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


DRAWS: dict[str, Callable[[Module], float]] = {
    "torch": lambda _: float(torch.rand(1)),
    "python": lambda _: random.random(),  # noqa: S311
    "numpy": lambda _: float(np.random.rand()),  # noqa: NPY002 - users do
    "held by torch": lambda m: float(torch.rand(1, generator=m.torch)),
    "held by numpy": lambda m: float(m.numpy["a"].random()),
    "held in an object": lambda m: float(m.augmentation(torch.ones(1))),
    "held in a tuple": lambda m: m.twins[0].random(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_whatever_is_drawn_is_drawn_again(draw: Callable[[Module], float]) -> None:
    def step(x: Tensor, m: Module = Module()) -> Tensor:  # noqa: B008
        return (m.student(x * draw(m)) * draw(m)).sum()  # type: ignore[no-any-return]

    module, _, runner = capture(step, torch.ones(4, 3))
    before = generators_of([module]).state()
    ((early,),) = runner.inputs(step, torch.ones(4, 3), 7, effects=False)
    ((late,),) = runner.inputs(step, torch.ones(4, 3), 7, effects=True)
    torch.testing.assert_close(early, late, rtol=0, atol=0)
    loss = replayed(runner, step, torch.ones(4, 3), ((early,),))
    assert repr(before) == repr(generators_of([module]).state())
    assert 0 < float(loss) / 8 < 1
    ((other,),) = runner.inputs(step, torch.ones(4, 3), 8, effects=False)
    assert not torch.equal(other, early)


@pytest.mark.parametrize("make", [np.random.default_rng, random.Random, torch_generator])
def test_a_generator_in_the_batch_goes_on_from_where_it_is(make: Callable[[int], Any]) -> None:
    def step(batch: Any, m: Module = Module()) -> Tensor:  # noqa: B008
        own = batch["generator"]
        number = own.random() if hasattr(own, "random") else float(torch.rand((), generator=own))
        return m.student(batch["x"] * number).sum()  # type: ignore[no-any-return]

    batch = {"x": torch.ones(4, 3), "generator": make(5)}
    _, _, runner = capture(step, batch)
    ((inputs,),) = runner.inputs(step, batch, 7, effects=False)
    ((again,),) = runner.inputs(step, batch, 7, effects=True)
    assert torch.equal(inputs, again)
    replayed(runner, step, batch, ((inputs,),))
    assert 0 < float(inputs[0, 0]) < 1


def test_generators_that_agree_go_on_to_agree() -> None:
    module = Module()
    one, other = module.twins
    with generators_of([module]).stream(5):
        drawn = one.random(), other.random(), module.augmentation.generators[0].rand()
    assert drawn[0] == drawn[1] != drawn[2]


def test_long_lists_are_data_and_not_looked_into() -> None:
    module = nn.Module()
    module.data = [random.Random(1)] * 2000  # type: ignore[assignment] # noqa: S311
    assert not any(isinstance(value, random.Random) for _, value in held_by([module]))


def test_a_generator_that_nobody_seeds() -> None:
    def step(x: Tensor, m: Module = Module()) -> Tensor:  # noqa: B008
        return m.student(x * np.random.default_rng().random()).sum()  # type: ignore[no-any-return]

    _, _, runner = capture(step, torch.ones(4, 3))
    inputs = runner.inputs(step, torch.ones(4, 3), 7, effects=False)
    with pytest.raises(CaptureError, match=r"(?s)test_purity\.py:\d+.*call 0.*differs each time"):
        replayed(runner, step, torch.ones(4, 3), inputs)


@pytest.mark.parametrize(
    "change",
    [lambda m: setattr(m, "scale", 2.0), lambda m: m.center.add_(1.0)],
    ids=["attribute", "buffer"],
)
def test_something_that_changes_in_between(change: Callable[[Module], None]) -> None:
    def step(x: Tensor, m: Module = Module()) -> Tensor:  # noqa: B008
        return m.student((x - m.center) * m.scale).sum()  # type: ignore[no-any-return]

    module, _, runner = capture(step, torch.ones(4, 3))
    inputs = runner.inputs(step, torch.ones(4, 3), 7, effects=False)
    replayed(runner, step, torch.ones(4, 3), inputs)
    change(module)
    with pytest.raises(CaptureError, match="depends on something that a step or a hook changes"):
        replayed(runner, step, torch.ones(4, 3), inputs)


def numbers() -> Iterator[float]:
    yield from range(9)


@pytest.mark.parametrize(
    "hold", [lambda it: it, lambda it: [it], lambda it: {"a": it}], ids=["itself", "list", "dict"]
)
def test_an_iterator_is_refused_and_not_advanced(hold: Callable[[Any], Any]) -> None:
    def step(x: Tensor, m: Any = Module()) -> Tensor:  # noqa: B008
        found = m.held
        while isinstance(found, (list, dict)):
            found = found["a"] if isinstance(found, dict) else found[0]
        return (m.student(x) * next(found)).sum()  # type: ignore[no-any-return]

    iterator = numbers()
    step.__defaults__[0].held = hold(iterator)  # type: ignore[index]
    with pytest.raises(CaptureError, match=r"next item of an iterator, at .*test_purity\.py:\d+"):
        capture(step, torch.ones(4, 3))
    assert next(iterator) == 0


def put(batch: Any) -> Tensor:
    batch["x"] = batch["x"] * 2
    return batch["x"]  # type: ignore[no-any-return]


def pop(batch: Any) -> Tensor:
    return batch.pop("x") * 2  # type: ignore[no-any-return]


def write(batch: Any) -> Tensor:
    batch["x"].mul_(2)
    return batch["x"]  # type: ignore[no-any-return]


def append(batch: Any) -> Tensor:
    batch["list"].append(batch["x"] * 2)
    assert len(batch["list"]) == 2
    return batch["list"][-1]  # type: ignore[no-any-return]


def change_object(batch: Any) -> Tensor:
    batch["object"].scale *= 2
    return batch["x"] * batch["object"].scale  # type: ignore[no-any-return]


class Scale:
    scale = 1


@pytest.mark.parametrize("change", [put, pop, write, append, change_object])
def test_a_run_of_the_step_gets_a_batch_of_its_own(change: Callable[[Any], Tensor]) -> None:
    def step(batch: Any, m: Module = Module()) -> Tensor:  # noqa: B008
        return m.student(change(batch)).sum() + batch["y"].sum()  # type: ignore[no-any-return]

    def make() -> Any:
        return {"x": torch.ones(4, 3), "y": torch.ones(4), "list": [1], "object": Scale()}

    batch = make()
    _, plan, runner = capture(step, batch)
    assert plan.writes_batch == (change is write)
    for (given,) in (
        *runner.inputs(step, batch, 7, effects=False),
        *runner.inputs(step, batch, 7, effects=True),
    ):
        assert torch.equal(given, torch.full((4, 3), 2.0))
    assert batch.keys() == make().keys()
    assert torch.equal(batch["x"], torch.ones(4, 3))
    assert replayed(runner, step, batch, ((torch.full((4, 3), 2.0),),)) == 12


def test_what_a_network_returned_may_be_written_into() -> None:
    def step(x: Tensor, m: Module = Module()) -> Tensor:  # noqa: B008
        z = m.student(x)
        z /= 2
        return z.sum()  # type: ignore[no-any-return]

    _, plan, runner = capture(step, torch.ones(4, 3))
    assert plan.writes_outputs
    given = torch.ones(4, 2, requires_grad=True)
    loss = runner.replay(step, torch.ones(4, 3), 7, lambda *_: given)
    loss.backward()
    assert given.grad is not None
    assert torch.equal(given.grad, torch.full((4, 2), 0.5))
    assert torch.equal(given, torch.ones(4, 2))


def test_a_selection_by_a_mask_needs_values() -> None:
    def step(batch: Any, m: Module = Module()) -> Tensor:  # noqa: B008
        x, y, z = batch
        chosen = y[[2, 0]]  # a selection by places doesn't
        return m.student(x[x[:, 0] > 0]).sum() + m.student(chosen).sum() + m.student(z).sum()  # type: ignore[no-any-return]

    _, plan, _ = capture(step, (torch.ones(4, 3), torch.ones(4, 3), torch.ones(4, 3)))
    assert plan.batch_fields == (0,)


# Comparing


def test_a_fingerprint_tells_tensors_apart() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 4)
    changed = x.clone()
    changed[2, 1, 3] += 0.01
    for other in (x.flip(0), x.flip(2), x * 1.001, changed, x[:4], x.roll(1, 1)):
        assert not Fingerprint.of(x).agrees(Fingerprint.of(other))
    for same in (x.clone(), x * (1 + 1e-7)):
        assert Fingerprint.of(x.float()).agrees(Fingerprint.of(same.float()))


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.bfloat16])
def test_a_fingerprint_of_any_type(kind: torch.dtype) -> None:
    x = torch.arange(6).remainder(2).reshape(2, 3).to(kind)
    assert Fingerprint.of(x).agrees(Fingerprint.of(x.clone()))
    assert not Fingerprint.of(x).agrees(Fingerprint.of(x.flip(0).flip(1)))


def test_numbers_that_are_none_equal_themselves() -> None:
    x = torch.tensor([1.0, float("nan"), float("inf")])
    assert Fingerprint.of(x).agrees(Fingerprint.of(x.clone()))
    compared = Comparisons()
    compared.add("x", [x], [x.clone()], [0])
    assert compared.first_difference() is None
    compared.add("y", [x, x], [x, x.flip(0)], [0, 0])
    assert compared.first_difference() == ("y", 1)


def test_a_tensor_that_was_written_into_is_another_one() -> None:
    x = torch.ones(3)
    compared = Comparisons()
    compared.add("x", [x], [x], [x._version])
    assert compared.first_difference() is None
    x.mul_(1)
    compared.add("x", [x], [x], [0])
    assert compared.first_difference() == ("x", 0)


def test_which_batches_are_compared() -> None:
    compared = [n for n in range(5, 2000) if is_compared(n, 5, seed=1)]
    assert compared[:3] == [5, 6, 7]
    assert 5 < len(compared) < 40
    assert compared == [n for n in range(5, 2000) if is_compared(n, 5, seed=1)]
