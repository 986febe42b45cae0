"""The wheel that users install: built from the source distribution, used outside the tree."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_tspipe"

SCRIPT = """\
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

import lightning_tspipe


class Distillation(LightningModule):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        self.teacher = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    def training_step(self, batch):
        with torch.no_grad():
            target = self.teacher(batch)
        return nn.functional.mse_loss(self.student(batch), target)

    def configure_optimizers(self):
        return torch.optim.SGD(self.student.parameters(), lr=0.1)


trainer = Trainer(
    strategy="tspipe", accelerator="cpu", devices=2, max_steps=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Distillation(), torch.randn(2, 8, 4))
assert trainer.global_step == 1
if trainer.is_global_zero:
    print(Path(lightning_tspipe.__file__).parent)
"""


def run(*command: object, cwd: Path, **environment: str) -> str:
    """What a command prints; it finds installed packages, and nothing of this tree."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(  # noqa: S603 - commands of this file
        list(map(str, command)),
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    # Without isolation, which would ask a registry for hatchling.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    files = (file for file in PACKAGE.rglob("*") if file.is_file())
    expected = {str(f.relative_to(ROOT)) for f in files if "__pycache__" not in f.parts}
    assert expected == {name for name in names if name.startswith("lightning_tspipe/")}
    others = {name.split("/")[0] for name in names} - {"lightning_tspipe"}
    assert [name.endswith(".dist-info") for name in others] == [True], others


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(500)
def test_wheel_works_outside_the_tree(wheel: Path, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet")
    run(*pip, "--target", target, wheel, cwd=elsewhere)
    script = elsewhere / "one_step.py"
    script.write_text(SCRIPT)
    settings = {"PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}
    printed = run(sys.executable, script, cwd=elsewhere, **settings)
    assert printed.splitlines()[-1] == str(target / "lightning_tspipe")
    assert "find the fastest pipeline" in run(
        target / "bin/tspipe", "--help", cwd=elsewhere, **settings
    )
