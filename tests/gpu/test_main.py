"""`make gpu` without a GPU: it says so, and what needs none runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.main import _PYTEST, ROOT, Seen, files_marked, main, parts_on, row

COMMAND = (sys.executable, "-m", "tests.gpu.main")


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "make gpu: this machine has no GPU that torch can use\n"


def test_all_parts_fit_into_their_time() -> None:
    """Those that a machine with one GPU has, with some room for what is between them."""
    assert sum(part.seconds for part in parts_on("cuda:0")) < 900
    assert all(part.seconds <= 180 for part in parts_on("cuda:0"))


def test_a_row_says_what_was_seen() -> None:
    machine = {"gpus": ["A", "A"], "python": "3.12", "torch": "2.11", "lightning": "2.6",
               "cuda": "13.0", "nccl": "2.30"}  # fmt: skip
    seen = {"one": Seen("passed"), "two": Seen("too slow"), "three": Seen("left out")}
    assert row(machine, seen) == (
        "| 2 x A | Python 3.12, torch 2.11, lightning 2.6, CUDA 13.0, NCCL 2.30 | 1 of 3 parts "
        "passed (too slow: two; left out: three) |"
    )


@pytest.mark.distributed
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("alone", "waits"), marks=pytest.mark.slow),
        pytest.param(("profile", "options", "overhead", "waits"), marks=pytest.mark.exhaustive),
    ],
)
def test_parts_that_need_no_gpu_run(names: tuple[str, ...], tmp_path: Path) -> None:
    """But those over threads, which run as tests of their own."""
    chosen = [word for name in names for word in ("--part", name)]
    done = subprocess.run(  # noqa: S603 - our own command
        [*COMMAND, "--device", "cpu", "--folder", str(tmp_path), *chosen], cwd=ROOT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "gpu.log").read_text()
    found = json.loads((tmp_path / "gpu.json").read_text())
    outcomes = {name: part["outcome"] for name, part in found["parts"].items()}
    assert outcomes.pop("waits of the host") == "left out"
    assert set(outcomes.values()) == {"passed"}
    assert len(outcomes) == len(names) - 1
    assert all(part["figures"] for name, part in found["parts"].items() if name in outcomes)
    assert "| CPU, " in done.stdout


@pytest.mark.slow
def test_it_needs_little_more_than_torch_and_lightning() -> None:
    """Neither lightly nor what only development needs."""
    lacking = ["lightly", "hypothesis", "pytest_timeout", "xdist", "torchdata", "tensorboardX"]
    files = [*files_marked("cuda"), "tests/gpu/test_threads.py"]
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({lacking})); import pytest; "
        f"sys.exit(pytest.main([*{_PYTEST[3:]}, '--collect-only', *{files}]))"
    )
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(  # noqa: S603 - our own
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_two_gpus_are_exact" in done.stdout
