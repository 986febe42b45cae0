"""The examples, run as their users run them."""

from __future__ import annotations

import csv
import os
import runpy
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import torch

from tests.integration.jobs import run_job

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
DRAWING = ("dinov2",)
"""Those whose steps draw random numbers, which one device draws in another order."""
SELF_SUPERVISED = ("byol", "mocov3", "dino", *DRAWING)
DISTILLATION = ("kd", "feature_kd", "distilbert", "language_model")
FINE_TUNING = ("finetune_vit", "finetune_text")
NAMES = (*SELF_SUPERVISED, *DISTILLATION, "mean_teacher")


def command(folder: Path, *arguments: str, seconds: float = 200) -> str:
    """Run Python with some arguments in a folder; what it prints. Nothing of it is left."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(  # noqa: S603 - our own examples
        [sys.executable, *arguments], cwd=folder, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            output = process.communicate(timeout=seconds)[0]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-4000:]
    return output


def in_forks(folder: Path, name: str, *arguments: str, num_ranks: int = 2) -> str:
    """The same as ``python examples/NAME.py ARGUMENTS``, without the time that imports take."""
    job = run_job(
        _as_script, EXAMPLES / f"{name}.py", arguments, num_ranks=num_ranks, folder=folder
    )
    assert not any(job.errors), job.output[-4000:]
    return job.output


def _as_script(path: Path, arguments: tuple[str, ...]) -> None:
    torch.set_default_dtype(torch.float32)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def column(folder: Path, name: str, metric: str) -> list[float]:
    """What the CSVLogger of an example's last run wrote of one metric."""
    *_, last = sorted((folder / "runs" / name).glob("version_*"))
    with (last / "metrics.csv").open(encoding="utf-8") as file:
        return [float(row[metric]) for row in csv.DictReader(file) if row.get(metric)]
