"""The teacher in the gaps, and two phases: eight emulated devices, costs of Llama 8B and 1B.

    python benchmarks/language/emulated.py [--windows 8 16 32] [--json FILE]

README.md says what is emulated, and what the figures mean.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.emulated.world import ACTION_SECONDS, work_seconds
from benchmarks.environment import environment_of, show
from benchmarks.language.models import step
from benchmarks.schedules.main import BATCH_SECONDS, LINK, PACKAGES, emulate
from lightning_tspipe.planning.layout import Layout
from lightning_tspipe.planning.partition import Chain
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.step_profile import StepProfile

WINDOWS = (8, 16, 32)


def in_gaps(profile: StepProfile, window: int, devices: int) -> Plan:
    """The best plan of 1F1B, with whole backwards or with halves."""
    plans = (profile.plan(devices, **_options(window), split=split) for split in (False, True))
    return min(plans, key=lambda plan: plan.step_seconds)


def in_phases(profile: StepProfile, window: int, devices: int) -> Plan:
    """The best cuts of each network for its own phase: the student's beside the loss."""
    alone = replace(profile, teacher=None, num_calls=(1, 0), batch_sizes=profile.batch_sizes[:1])
    student = alone.plan(devices, **_options(window))
    assert profile.teacher is not None
    seconds = profile.teacher.sums("forward", max(profile.batch_sizes))
    costs = [stop - start for start, stop in pairwise(seconds)]
    teacher = Chain(costs, devices, joined=profile.teacher.joined).cut()
    workload = profile.problem(devices, **_options(window))
    layout = Layout(workload, student.student_cuts, 1, teacher_bounds=teacher)
    return Plan.of(layout, student.step_seconds, "cut for two phases")


def _options(window: int) -> dict[str, Any]:
    return {
        "schedule": "1f1b", "window": window, "weights": "synchronous", "link": LINK,
        "action_overhead": ACTION_SECONDS,
    }  # fmt: skip


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--windows", type=int, nargs="+", default=list(WINDOWS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    profile = step(BATCH_SECONDS * options.devices)
    figures: dict[str, Any] = {}
    with TemporaryDirectory(prefix="language-") as name:
        for window in options.windows:
            plan = in_gaps(profile, window, options.devices)
            ours = emulate(plan, Path(name))
            theirs = emulate(in_phases(profile, window, options.devices), Path(name), "two_phases")
            figures[f"window_{window}"] = found = {
                "over_two_phase": theirs / ours,
                "utilization": window * work_seconds(profile) / options.devices / ours,
                "simulated_over_emulated": plan.step_seconds * window / ours,
                "seconds": ours,
                "two_phase_seconds": theirs,
            }
            print(window, found, file=sys.stderr, flush=True)
    report = {
        "environment": environment_of(PACKAGES), "emulated": True, "devices": options.devices,
        "batch_seconds": BATCH_SECONDS, "figures": figures,
    }  # fmt: skip
    show(report, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
