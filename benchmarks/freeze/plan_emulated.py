"""The costs of an emulated run, and its first plan, before anything is frozen."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.freeze.costs import vit_b
from benchmarks.freeze.emulate import ACTION_SECONDS, BATCH_SIZE, FRACTION, LINK


def main() -> None:
    """Arguments: devices, seconds of a step without waiting, atoms, files for costs and plan.

    Atoms: ``blocks``, or ``fine`` ones, which can be balanced better.
    """
    devices, seconds, atoms = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    profile = vit_b(BATCH_SIZE, seconds * devices, FRACTION, fine=atoms == "fine")
    plan = profile.plan(devices, link=LINK, action_overhead=ACTION_SECONDS)
    print(plan, file=sys.stderr)
    Path(sys.argv[4]).write_text(profile.to_json(), encoding="utf-8")
    Path(sys.argv[5]).write_text(plan.to_json(), encoding="utf-8")


if __name__ == "__main__":
    main()
