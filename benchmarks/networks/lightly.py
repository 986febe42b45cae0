"""``lightly.exact``: which of lightly's modules train exactly, without a word about their networks.

Each module of a folder that holds lightly's repository is trained by ``tspipe check`` for some
steps, in float64: on one device, and on two ranks whose networks are found by the first step::

    python -m benchmarks.networks.lightly /path/to/lightly
    {"module": "examples/pytorch_lightning/byol", "exact": true, "seconds": 14.2}
    {"module": "benchmarks/vitb16/ibot", "exact": false, "reason": "CaptureError: ..."}
    {"exact": 23, "of": 24, "not_exact": {"benchmarks/vitb16/ibot": "CaptureError: ..."}}
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.environment import environment_of

MODULES = {
    "examples/pytorch_lightning": (
        "byol", "moco", "dino", "dinov2", "ibot", "msn", "pmsn", "tico", "mmcr", "capi", "densecl",
        "smog", "aim", "mae",
    ),
    "benchmarks/resnet50": ("byol", "mocov2", "dino", "tico"),
    "benchmarks/vitb16": ("dino", "dinov2", "ibot", "capi", "aim", "mae"),
}  # fmt: skip
_TARGET = """
import warnings
from pathlib import Path
from benchmarks.networks.modules import batch, built
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")


def target():
    file = Path({file!r})
    return built(file), DataLoader([batch(file, n) for n in range({steps})], batch_size=None)
"""
_ROOT = Path(__file__).resolve().parents[2]
_WORDS = 300


def checked(file: Path, steps: int, seconds: float) -> dict[str, object]:
    """What ``tspipe check`` says of one module."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "target.py"
        target.write_text(_TARGET.format(file=str(file), steps=steps), encoding="utf-8")
        command = [
            sys.executable, "-m", "lightning_tspipe.cli", "check", f"{target}:target",
            "--schedule", "gpipe", "--steps", str(steps),
        ]  # fmt: skip
        started = time.perf_counter()
        try:
            done = subprocess.run(  # noqa: S603 - this project's own command
                command, capture_output=True, text=True, timeout=seconds, cwd=_ROOT, check=False
            )
        except subprocess.TimeoutExpired:
            return {"exact": False, "reason": f"took more than {seconds} seconds"}
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    found: dict[str, object] = {"exact": done.returncode == 0 and "the same" in lines}
    found["seconds"] = round(time.perf_counter() - started, 1)
    if not found["exact"]:
        found["reason"] = lines[-1][:_WORDS] if lines else f"exit code {done.returncode}"
    return found


def main() -> None:
    """One line of JSON for each module, and one for all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="lightly's repository")
    parser.add_argument("--only", nargs="*", help="files, such as byol")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300, help="at most, for each module")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    modules: dict[str, dict[str, object]] = {}
    for folder, names in MODULES.items():
        for name in names:
            if options.only and name not in options.only:
                continue
            file = options.folder / folder / f"{name}.py"
            found = checked(file, options.steps, options.seconds)
            modules[f"{folder}/{name}"] = found
            print(json.dumps({"module": f"{folder}/{name}", **found}), flush=True)
    figures = summary(modules)
    print(json.dumps(figures))
    if options.json is not None:
        environment = environment_of(("torch", "lightly", "timm", "torchvision"))
        content = {
            "environment": environment,
            "figures": {"lightly": {**figures, "modules": modules}},
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def summary(modules: dict[str, dict[str, object]]) -> dict[str, object]:
    """How many are exact, and why the others aren't.

    Args:
        modules: What :func:`checked` found of each.
    """
    return {
        "exact": sum(bool(found["exact"]) for found in modules.values()),
        "of": len(modules),
        "not_exact": {name: each["reason"] for name, each in modules.items() if not each["exact"]},
    }


if __name__ == "__main__":
    main()
