"""The precisions: the pipeline computes what one device computes, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from tests.integration.comparing import alone, both, labelled
from tests.integration.jobs import run
from tests.integration.trainings import (
    CLOSE,
    Session,
    Trained,
    Training,
    delayed,
)
from tests.integration.trainings import train as train_plainly

DTYPES = {
    "32-true": torch.float32, "64-true": torch.float64, "bf16-true": torch.bfloat16,
    "bf16-mixed": torch.float32, "16-true": torch.float16,
}  # fmt: skip


BYOL = Training(
    "Byol-batch-2-by hand", "instance", {"num_microbatches": 1}, callbacks=delayed,
    sizes=((5, 5, 4, 2), (5, 5, 4, 2)),
)  # fmt: skip


def validate(module: Any) -> None:
    def step(batch: Any, batch_idx: int) -> None:
        output = module.student(batch[0])
        module.log("dtype", float(output.dtype.itemsize))
        module.log("val", output.float().square().mean())

    module.validation_step = step


def train(training: Training) -> tuple[Trained, set[torch.dtype]]:
    torch.set_default_dtype(torch.float32)
    it = Session(training, change=validate).fit(validation=labelled(50))
    state = it.trainer.optimizers[0].state.values()
    return it.trained, {v.dtype for values in state for v in values.values() if v.ndim}


def train_each(trainings: list[Training]) -> list[tuple[Trained, set[torch.dtype]]]:
    return [train(training) for training in trainings]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_bits_are_those_of_one_device(num_ranks: int, tmp_path: Path) -> None:
    trainings = [replace(BYOL, num_ranks=num_ranks, trainer={"precision": name}) for name in DTYPES]
    expected = run(train_each, [alone(t) for t in trainings], num_ranks=1, folder=tmp_path)[0]
    results = run(train_each, trainings, num_ranks=num_ranks, folder=tmp_path)
    for index, (name, dtype) in enumerate(DTYPES.items()):
        theirs, ours = expected[index][0], results[0][index][0]
        assert len(set(map(float, theirs.losses))) > 4, name
        torch.testing.assert_close(ours.losses, theirs.losses, rtol=0, atol=0, msg=name)
        assert ours.weights.keys() == theirs.weights.keys()
        for key, value in theirs.weights.items():
            # A teacher that ran ahead has left its statistics in the type of its buffers, and they
            # are added later: one rounding more.
            late = "teacher" in key and "running" in key
            bound = 4 * torch.finfo(dtype).eps if late else 0.0
            torch.testing.assert_close(
                ours.weights[key], value, rtol=bound, atol=bound, msg=f"{name} {key}"
            )
        assert ours.metrics == theirs.metrics, name
        floats = {v.dtype for v in ours.weights.values() if v.is_floating_point()}
        assert floats == {dtype}, name
        for rank in results:
            assert rank[index][1] <= {dtype}, name


class Doubled(nn.Linear):
    """A layer of a plugin's own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Replacing(Precision):
    """Replaces layers, as plugins for 8-bit precisions do."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    new = Doubled(child.in_features, child.out_features)
                    new.load_state_dict(child.state_dict())
                    new.requires_grad_(child.weight.requires_grad)
                    setattr(parent, name, new)
        return module


def train_replaced(training: Training) -> Trained:
    return train_plainly(replace(training, trainer={"plugins": [Replacing()]}))


def test_a_plugin_that_replaces_layers(tmp_path: Path) -> None:
    training = replace(BYOL, case="Byol-group-2-by hand")
    plain = run(train_plainly, alone(training), num_ranks=1, folder=tmp_path)[0]
    expected, results = both(train_replaced, training, tmp_path)
    assert expected.losses[0] != plain.losses[0]
    torch.testing.assert_close(results[0].losses, expected.losses, **CLOSE)
    torch.testing.assert_close(results[0].weights, expected.weights, **CLOSE)
