from __future__ import annotations

from pathlib import Path

import pytest

from lightning_tspipe.cli.main import main
from lightning_tspipe.planning.step_profile import StepProfile

SCRIPT = """
import torch
from lightning.pytorch import LightningModule
from torch import nn


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.teacher = nn.Sequential(nn.Linear(8, 4))

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            target = self.teacher(batch)
        return (self.student(batch) - target).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.student.parameters(), lr=0.1)


def module_and_data():
    return Module(), [torch.zeros(10, 8)]
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_a_device_that_is_not_here_is_planned_by_its_operations(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "profile.json"
    options = ["--devices", "2", "--flops", "2GFLOP/s", "--accelerator", "cpu"]
    assert main(["plan", str(script), *options, "--save-profile", str(saved)]) == 0
    assert "tspipe" in capsys.readouterr().out
    profile = StepProfile.from_json(saved.read_text())
    assert profile.teacher is not None
    seconds = [atom.forward[10] for atom in (*profile.student.atoms, *profile.teacher.atoms)]
    assert seconds == pytest.approx([10 * 8 * 16 / 1e9, 0, 10 * 16 * 4 / 1e9, 10 * 8 * 4 / 1e9])
    assert profile.student.atoms[2].backward[10] == pytest.approx(2 * seconds[2])


def test_a_saved_profile_has_its_costs_already(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    path.write_text("{}")
    assert main(["plan", str(path), "--devices", "2", "--flops", "1TFLOP/s"]) == 2
    assert "a saved profile already has costs" in capsys.readouterr().err


def test_a_rate_that_is_none_is_refused(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(script), "--devices", "2", "--flops", "fast"]) == 2
    assert "write '60TFLOP/s'" in capsys.readouterr().err
