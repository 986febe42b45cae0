"""k-NN and linear classification after training, as functions and as a command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tspipe import knn_evaluation, linear_evaluation
from lightning_tspipe.callbacks import KNNEvaluator
from lightning_tspipe.cli.main import main
from lightning_tspipe.errors import ConfigurationError

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def images(num):
    points = torch.randn(num, 4, generator=torch.Generator().manual_seed(num))
    return TensorDataset(points, (points[:, 0] > 0).long())

class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Linear(4, 4, bias=False)
        nn.init.zeros_(self.student.weight)

def module_and_images():
    return Module(), images(64), images(50)
"""


class Images(TensorDataset):
    """Points on two sides of a plane."""

    def __init__(self, num: int) -> None:
        points = torch.randn(num, 4, generator=torch.Generator().manual_seed(num))
        super().__init__(points, (points[:, 0] > 0).long())


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Dropout(0.9))
        nn.init.eye_(self.student[0].weight)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return 0 * self.student(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_features_that_tell_the_classes_apart() -> None:
    module, train, validation = Module(), Images(64), Images(50)
    state = torch.random.get_rng_state()
    losses: list[float] = []
    found = linear_evaluation(
        module, train, validation, epochs=30, lr=10, batch_size=16,
        on_epoch=lambda _, loss: losses.append(loss),
    )  # fmt: skip
    assert found["linear_top1"] > 0.95
    assert found["linear_top5"] == 1.0
    assert len(losses) == 30
    assert losses[-1] < losses[0]
    assert module.training
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.testing.assert_close(module.student[0].weight, nn.Parameter(torch.eye(4)))


def test_augmentation_is_drawn_anew_in_each_epoch() -> None:
    seen: list[float] = []

    class Augmented(Images):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            image, label = (tensor[index] for tensor in self.tensors)
            image = image + torch.rand(())
            if index == 0:
                seen.append(float(image[0]))
            return image, label

    linear_evaluation(Module(), Augmented(8), Images(8), epochs=3, num_classes=2)
    assert len(set(seen)) == len(seen) == 3


def test_knn_as_in_training() -> None:
    module, bank, queries = Module(), Images(64), Images(50)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[KNNEvaluator(bank, queries, k=7)],
    )  # fmt: skip
    trainer.fit(module, DataLoader(Images(4), batch_size=4))
    found = knn_evaluation(module, DataLoader(bank, batch_size=9), queries, k=7)
    assert found["knn_top1"] == pytest.approx(trainer.callback_metrics["val_knn_top1"].item())
    assert 0.5 < found["knn_top1"] < 1.0


@pytest.mark.parametrize("what", [knn_evaluation, linear_evaluation])
def test_nothing_to_learn_from(what: object) -> None:
    assert callable(what)
    with pytest.raises(ConfigurationError, match=r"bank is empty|nothing to train on"):
        what(Module(), [], Images(4))
    with pytest.raises(ConfigurationError, match="this one is a Tensor"):
        what(Module(), [torch.ones(3, 4)], [torch.ones(3, 4)])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "features_of_points.py"
    path.write_text(SCRIPT)
    return path


def test_the_command(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, result = tmp_path / "last.ckpt", tmp_path / "result.json"
    torch.save({"state_dict": {"student.weight": torch.eye(4)}}, checkpoint)
    seed_everything(0, verbose=False)
    arguments = ["--epochs", "20", "--lr", "30", "--k", "5", "--json", str(result)]
    try:
        status = main(["evaluate", str(script), "--checkpoint", str(checkpoint), *arguments])
    finally:
        sys.modules.pop("features_of_points", None)
    assert status == 0
    found = json.loads(result.read_text())
    assert found["linear_top1"] > 0.9
    assert found["knn_top1"] > 0.6
    assert f"linear_top1  {found['linear_top1']:7.2%}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--features", "teacher"], "no submodule 'teacher'"),
        (["--checkpoint", "other.ckpt"], "belongs to another module"),
    ],
)
def test_the_command_refuses(
    arguments: list[str],
    message: str,
    script: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.save({"state_dict": {"head.weight": torch.eye(4)}}, script.with_name("other.ckpt"))
    found = [argument.replace("other.ckpt", str(script.with_name("other.ckpt")))
             for argument in arguments]  # fmt: skip
    assert main(["evaluate", str(script), *found]) == 2
    assert message in capsys.readouterr().err


def test_a_function_that_returns_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "returns_a_number.py"
    path.write_text("def module_and_images():\n    return 3\n")
    assert main(["evaluate", str(path)]) == 2
    assert "returned int" in capsys.readouterr().err
