"""Heads that are trained together on one device, and each alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from lightning_tspipe import ConfigurationError, HeadCheckpoint, HeadEarlyStopping, StudentFanout
from lightning_tspipe.cli.exporting import read_part
from tests.exactness.fanout import WIDTH, Loader, Tasks, make_batches, train_alone

# The trunk is in eval mode, which Lightning keeps.
pytestmark = pytest.mark.filterwarnings("ignore:Found .* in eval mode")

CLOSE = {"rtol": 1e-9, "atol": 1e-12}
VALIDATION = (4, 2)


def fit(module: Any, folder: Path, ckpt_path: Path | None = None, **kwargs: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 2, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "precision": "64-true", "num_sanity_val_steps": 0,
    }  # fmt: skip
    trainer = Trainer(default_root_dir=folder, **arguments | kwargs)
    trainer.fit(module, Loader(), Loader(make_batches(VALIDATION)), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize(
    ("accumulate", "clip"), [(1, None), (2, 0.3)], ids=["plain", "accumulated and clipped"]
)
def test_each_head_is_trained_as_if_it_were_alone(
    tmp_path: Path, accumulate: int, clip: float | None
) -> None:
    module = Tasks(6)
    trainer = fit(module, tmp_path, accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    for index, (name, head) in enumerate(module.student.heads.items()):
        weights, losses = train_alone(index, accumulate=accumulate, clip=clip)
        torch.testing.assert_close(dict(head.state_dict()), weights, **CLOSE)
        assert float(trainer.callback_metrics[f"{name}/loss_step"]) == pytest.approx(losses[-1])
    assert {f"task{i}/val_loss" for i in range(6)} <= trainer.callback_metrics.keys()


class _Counting(Tasks):
    def __init__(self) -> None:
        super().__init__(3)
        self.calls = 0
        first: Any = next(self.teacher.children())
        original = first.forward

        def forward(x: Any) -> Any:
            self.calls += 1
            return original(x)

        first.forward = forward


def test_the_trunk_runs_once_for_all_heads(tmp_path: Path) -> None:
    module = _Counting()
    fit(module, tmp_path, limit_val_batches=0)
    assert module.calls == 2 * len(make_batches())


@dataclass
class _Watched:
    """A head alone: its validation's losses, and when it is to stop."""

    patience: int
    min_delta: float
    losses: list[float] = field(default_factory=list)
    best: int = 0

    def stops(self, loss_of: Callable[[Any], float]) -> bool:
        parts = make_batches(VALIDATION)
        total = sum(len(labels) * loss_of((x, labels)) for x, labels in parts)
        self.losses.append(total / sum(VALIDATION))
        if self.losses[self.best] - self.losses[-1] > self.min_delta:
            self.best = len(self.losses) - 1
        return len(self.losses) - 1 - self.best >= self.patience


@pytest.mark.parametrize(("patience", "min_delta"), [(1, 0.02), (2, 0.1)])
def test_heads_stop_early_where_they_would_alone(
    tmp_path: Path, patience: int, min_delta: float
) -> None:
    module = Tasks(4)
    stopping = HeadEarlyStopping(patience=patience, min_delta=min_delta)
    trainer = fit(module, tmp_path, max_epochs=12, callbacks=[stopping, HeadCheckpoint()])
    num_epochs, bests = [], []
    for index, (name, head) in enumerate(module.student.heads.items()):
        alone = _Watched(patience, min_delta)
        weights, _ = train_alone(index, 12, stops=alone.stops)
        torch.testing.assert_close(dict(head.state_dict()), weights, **CLOSE)
        num_epochs.append(len(alone.losses))
        assert (name in module.student.stopped) == (len(alone.losses) < 12)
        # The best of all is kept, by however little it is better.
        best = alone.losses.index(min(alone.losses))
        bests.append(best)
        kept = read_part(tmp_path / "heads" / f"{name}.ckpt", f"student.heads.{name}")
        torch.testing.assert_close(dict(kept), train_alone(index, best + 1)[0], **CLOSE)
    assert trainer.current_epoch == max(num_epochs)
    assert len(set(num_epochs)) > 1


class _Diverging(Tasks):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss / 0 if self.head == "task1" and self.global_step >= 3 else loss


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_loss_that_is_not_finite_is_named_or_stops_its_head(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="head 'task1': its loss is inf"):
        fit(_Diverging(3), tmp_path)
    module = _Diverging(3, on_nan="stop")
    fit(module, tmp_path, max_epochs=1, enable_checkpointing=True)
    (path,) = tmp_path.rglob("*.ckpt")
    stopped, resumed = module.student.heads["task1"].state_dict(), Tasks(3)
    fit(resumed, tmp_path, path, enable_checkpointing=True)  # it would not diverge any more
    torch.testing.assert_close(resumed.student.heads["task1"].state_dict(), stopped)
    assert resumed.student.stopped == {"task1": "its loss is inf"}
    for index in (0, 2):
        weights, _ = train_alone(index)
        torch.testing.assert_close(
            dict(resumed.student.heads[f"task{index}"].state_dict()), weights, **CLOSE
        )


class _OtherInputs(Tasks):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, labels = batch
        return super().training_step((x + (self.head == "task1"), labels), batch_idx)


class _InPlace(Tasks):
    def __init__(self) -> None:
        super().__init__(1)
        wide = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, 3))
        self.student = StudentFanout({"task0": wide, "task1": nn.Linear(WIDTH, 2)})


class _Wide(Tasks):
    def __init__(self) -> None:
        super().__init__(1)
        self.student = StudentFanout([nn.Linear(WIDTH + 1, 3)])
        self.student = StudentFanout({"task0": nn.Sequential(nn.Linear(WIDTH + 1, 3))})


def _thawed() -> Tasks:
    module = Tasks(1)
    next(module.teacher.parameters()).requires_grad_(True)
    return module


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _OtherInputs(2), "head 'task1' gives the trunk a different input"),
        (_InPlace, "head 'task0' changes the features in place"),
        (_Wide, r"head 'task0' does not fit the trunk: the features have shape \(5, 6\), and 0 "),
        (_thawed, "parameters that require gradients: 0.weight"),
    ],
)
def test_says_what_is_wrong(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(make(), tmp_path, limit_val_batches=0)


def test_says_what_no_fanout_is() -> None:
    with pytest.raises(ConfigurationError, match="needs a head"):
        StudentFanout([])
    with pytest.raises(ConfigurationError, match="one module is given as two heads"):
        StudentFanout([layer := nn.Linear(2, 2), layer])
    with pytest.raises(ConfigurationError, match=r"'a/b' can't name a head"):
        StudentFanout({"a/b": nn.Linear(2, 2)})
    with pytest.raises(ConfigurationError, match="outside of a head's step"):
        StudentFanout([nn.Linear(2, 2)])(torch.zeros(1, 2))


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_an_optimizer_of_optimizers_saves_and_loads(tmp_path: Path) -> None:
    fit(Tasks(3), tmp_path, max_epochs=1, enable_checkpointing=True)
    (path,) = tmp_path.rglob("*.ckpt")
    resumed = Tasks(3)
    fit(resumed, tmp_path, enable_checkpointing=True, ckpt_path=path)
    for index, head in enumerate(resumed.student.heads.values()):
        torch.testing.assert_close(dict(head.state_dict()), train_alone(index)[0], **CLOSE)
