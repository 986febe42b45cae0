"""Numbers in what a step does between two calls: of samples, or constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_tspipe.capture.plan import Glue, StepPlan
from lightning_tspipe.capture.trace import Networks, Tracer
from lightning_tspipe.errors import CaptureError

Between = Callable[[Tensor, Tensor], Tensor]


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(4, 4), nn.Linear(4, 2)


def trace(between: Between, batch: Any = None) -> StepPlan:
    module = Module()

    def step(batch: Any) -> Tensor:
        x = batch[0]
        made = module.head(between(module.backbone(x), x))
        return made.sum()  # type: ignore[no-any-return]

    tracer = Tracer(module, Networks(("backbone", "head")), torch.device("cpu"))
    return tracer.trace(step, (torch.randn(4, 4),) if batch is None else batch, seed=0)


def glue_of(between: Between) -> Glue:
    (value,) = trace(between).glue
    return value


def test_constants_stay() -> None:
    """Of 4 samples, with 4 features: the same number, which only one of them has."""
    glue = glue_of(lambda z, x: z.view(len(x), 4))
    assert str(glue) == "torch.Tensor.view(*, samples, 4)[0](%0.0)"
    assert glue.is_divisible
    assert str(glue_of(lambda z, _: z * 8)) == "torch.Tensor.mul(*, 8)[0](%0.0)"


def test_multiples_and_slices() -> None:
    def between(z: Tensor, x: Tensor) -> Tensor:
        return z.reshape(2 * len(x), 2)[: 2 * x.shape[0] : 2].repeat(1, 2)

    glue = glue_of(between)
    assert "2*samples, 2)" in str(glue)
    assert "slice(None, 2*samples, 2)" in str(glue)
    assert glue.is_divisible


def test_sums_that_are_divided_by_it_need_whole_batches() -> None:
    glue = glue_of(lambda z, x: (z / len(x)).tanh())
    assert "div(*, samples)" in str(glue)
    assert not glue.is_divisible


@pytest.mark.parametrize(
    "between",
    [lambda z, x: z * (1 / len(x)), lambda z, x: z + len(x) // 2, lambda z, x: z.add(len(x) ** 2)],
    ids=["inverse", "part", "square"],
)
def test_other_numbers_that_depend_on_it(between: Between) -> None:
    with pytest.raises(CaptureError, match=r"'head', at .*test_numbers.py.*for twice as many"):
        trace(between)


def test_another_computation_for_more_samples() -> None:
    with pytest.raises(CaptureError, match="depends on the number of samples"):
        trace(lambda z, x: z * 2 if len(x) < 6 else z + 2)


def test_a_batch_that_can_not_be_doubled() -> None:
    """What might be the number of samples is refused, and others are constants."""
    batch = torch.randn(4, 4), ["a", "b", "c", "d"]

    def numbered(factor: int) -> Between:
        def between(z: Tensor, x: Tensor) -> Tensor:
            names = dict(zip(range(len(x)), batch[1], strict=True))
            return z * (factor + 0 * len(names))

        return between

    assert "mul(*, 3)" in str(trace(numbered(3), batch).glue[0])
    with pytest.raises(CaptureError, match="perhaps: 8 for 4"):
        trace(numbered(8), batch)
