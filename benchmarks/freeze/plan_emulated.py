"""The first plan of an emulated run, before anything is frozen."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.freeze.emulate import ACTION_SECONDS, BATCH_SIZE, FRACTION, LINK
from benchmarks.freeze.sleepers import vit_b


def main() -> None:
    """Arguments: devices, seconds of a step without waiting, the file to write."""
    devices, seconds = int(sys.argv[1]), float(sys.argv[2])
    profile = vit_b(BATCH_SIZE, seconds * devices, FRACTION)
    plan = profile.plan(devices, link=LINK, action_overhead=ACTION_SECONDS)
    print(plan, file=sys.stderr)
    Path(sys.argv[3]).write_text(plan.to_json(), encoding="utf-8")


if __name__ == "__main__":
    main()
