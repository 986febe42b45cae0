from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_tspipe.cli.checking import DifferenceError, Record, _train, compare, draw_alike
from lightning_tspipe.cli.modules import Batches

WEIGHTS = {"a": torch.ones(2), "b": torch.ones(3)}


def record(*gradients: float) -> Record:
    steps = [{"a": torch.ones(2), "b": torch.full((3,), value)} for value in gradients]
    return Record([0.5] * len(gradients), WEIGHTS, steps)


def test_gradients_are_compared_step_by_step() -> None:
    same = compare(record(1.0, 2.0), record(1.0, 2.0))
    assert same.endswith("the same")
    assert "of gradients" in same
    with pytest.raises(DifferenceError, match="the gradients of b at update 1 differ") as caught:
        compare(record(1.0, 2.0), record(1.0, 3.0))
    assert "5.0e-01" in str(caught.value).splitlines()[2]


class Scheduled(LightningModule):
    """Its weight goes to 0 with the epochs, of which ten are a warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Tensor) -> Tensor:
        return self.weight * batch.sum() * (1 - self.current_epoch / self.trainer.max_epochs)  # type: ignore[operator,no-any-return]

    def configure_optimizers(self) -> Any:
        num_steps = self.trainer.estimated_stepping_batches
        assert self.trainer.max_epochs is not None
        assert num_steps / self.trainer.max_epochs * 10 <= num_steps == 3
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_schedules_know_how_many_epochs_there_are() -> None:
    found = _train(Scheduled(), Batches([torch.ones(2)] * 3), [], strategy="auto", devices=1)
    assert found.losses == pytest.approx([2.0, 1.6, 1.2])


class Drawing(LightningModule):
    """Its step draws a number, from a generator of its own too."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(2, 2)
        self.generator = torch.Generator().manual_seed(5)

    def training_step(self, batch: Tensor) -> Tensor:
        noise = torch.rand(()) + torch.rand((), generator=self.generator)
        return (self.student(batch) * noise).square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.distributed
def test_one_device_draws_what_a_pipeline_draws() -> None:
    losses = []
    for strategy in ("auto", "tspipe"):
        torch.manual_seed(1)
        module = Drawing()
        if strategy == "auto":
            draw_alike(module)
        losses.append(
            _train(module, Batches([torch.ones(4, 2)] * 3), [], strategy=strategy, devices=1).losses
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len(set(losses[0])) == 3


def test_a_gradient_that_only_one_run_has_is_a_difference() -> None:
    other = record(1.0)
    del other.gradients[0]["b"]
    with pytest.raises(DifferenceError, match="only one of the two runs has b"):
        compare(record(1.0), other)
