"""How well do synchronous schedules use devices, in windows of 16 batches? Emulated and real.

    python benchmarks/schedules/main.py [--models vit_l] [--devices 8] [--json FILE]

README.md says what is emulated, and what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.emulated.world import ACTION_SECONDS, work_seconds
from benchmarks.environment import environment_of, show
from benchmarks.schedules.models import MODELS, step
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.step_profile import StepProfile

WINDOW = 16
BATCH_SECONDS = 0.5
"""What each device works for a batch, if none ever waits."""
LINK = (4e-4, 2e9)
"""Seconds and bytes per second between two processes of this machine."""
METHODS = ("gpipe", "1f1b", "interleaved", "zbv")
PACKAGES = ("torch", "torchvision", "transformers", "lightning")


def planned(profile: StepProfile, method: str, num_devices: int) -> Plan:
    """The best plan; for GPipe, whose micro-batches are those of a large batch, of all of it."""
    options: dict[str, Any] = {"window": WINDOW, "weights": "synchronous"}
    if method == "gpipe":
        sizes = tuple(WINDOW * size for size in profile.batch_sizes)
        profile = replace(profile, batch_sizes=sizes)
        options = {"num_microbatches": WINDOW, "num_stages": num_devices}
    return profile.plan(
        num_devices, schedule=method, link=LINK, action_overhead=ACTION_SECONDS, **options
    )


def emulate(plan: Plan, folder: Path, *order: str) -> float:
    """Seconds of a window in a run of as many processes as there are devices."""
    file, found = folder / "plan.json", folder / "seconds.json"
    file.write_text(plan.to_json(), encoding="utf-8")
    found.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "benchmarks.schedules.emulation",
        str(file),
        str(found),
        *order,
    ]
    subprocess.run(  # noqa: S603 - our own program
        command, check=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    seconds: list[float] = json.loads(found.read_text(encoding="utf-8"))
    return median(seconds[1:])


def measure(name: str, num_devices: int, *, teacher: bool, folder: Path) -> dict[str, Any]:
    """Figures of one model."""
    profile = step(name, BATCH_SECONDS * num_devices, teacher=teacher)
    work = WINDOW * work_seconds(profile)
    rows: dict[str, Any] = {}
    for method in METHODS[1:] if teacher else METHODS:
        plan = planned(profile, method, num_devices)
        seconds = emulate(plan, folder)
        simulated = plan.step_seconds * (1 if method == "gpipe" else WINDOW)
        assert plan.memory is not None
        rows[method] = {
            "seconds": seconds,
            "utilization": work / num_devices / seconds,
            "simulated_over_emulated": simulated / seconds,
            "stages": plan.pipeline.student.num_stages,
            "activation_bytes": max(plan.memory.activations),
        }
        print(name, "with a teacher" * teacher, method, rows[method], file=sys.stderr, flush=True)
    if "gpipe" in rows:
        flat, ours = rows["gpipe"], rows["1f1b"]
        rows["1f1b_over_gpipe_memory"] = ours["activation_bytes"] / flat["activation_bytes"]
        rows["1f1b_over_gpipe_time"] = ours["seconds"] / flat["seconds"]
    return rows


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    with TemporaryDirectory(prefix="schedules-") as folder:
        for name in options.models:
            for teacher in (False, True):
                label = f"{name}.teacher" if teacher else name
                figures[label] = measure(
                    name, options.devices, teacher=teacher, folder=Path(folder)
                )
    report = {
        "environment": environment_of(PACKAGES), "emulated": True, "devices": options.devices,
        "window": WINDOW, "batch_seconds": BATCH_SECONDS, "figures": figures,
    }  # fmt: skip
    show(report, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
