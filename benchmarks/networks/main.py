"""Which networks can be recorded and cut, exactly? And what does that cost?

    python benchmarks/networks/main.py [--groups hugging_face,timm] [--only Llama] [--json FILE]

Each network is recorded with 2 samples, cut into stages, and run with 3, in one process: whole, and
stage by stage. The exit status is 1 if one fails, or differs by more than the order of sums does.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import environment_of
from benchmarks.networks import hugging_face, vision
from benchmarks.networks.checking import Entry, Outcome, check
from benchmarks.networks.overhead import capture_seconds, guard_overhead

GROUPS: dict[str, Callable[[], dict[str, Entry]]] = {
    "hugging_face": hugging_face.entries,
    "torchvision": vision.torchvision_entries,
    "timm": vision.timm_entries,
}
ROUNDING = 1e-6
"""Relative to the largest number, in float64; of networks that compute in float32 inside."""
PACKAGES = ("torch", "transformers", "torchvision", "timm")


def main() -> int:
    """Check, print and write; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--groups", default=",".join([*GROUPS, "overhead"]))
    parser.add_argument("--only", default="", help="names of networks; all if empty")
    parser.add_argument("--stages", default="2,4")
    parser.add_argument("--traceback", action="store_true", help="of what fails")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    stages = [int(word) for word in options.stages.split(",")]
    figures: dict[str, Any] = {}
    for group in options.groups.split(","):
        if group == "overhead":
            figures |= {"guard_overhead": guard_overhead(), "capture_seconds": capture_seconds()}
            continue
        found: dict[str, Outcome] = {}
        for name, entry in GROUPS[group]().items():
            if not options.only or name in options.only.split(","):
                found[name] = _checked(entry, name, stages, tells_all=options.traceback)
                print(_line(group, name, found[name]), flush=True)
                gc.collect()  # some networks take gigabytes
        figures[group] = summary(found)
    told = {name: _without_networks(figure) for name, figure in figures.items()}
    print(json.dumps(told, indent=2))
    if options.json is not None:
        content = {"environment": environment_of(PACKAGES), "figures": figures}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return int(any(figure.get("wrong") for figure in figures.values()))


def _without_networks(figure: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figure.items() if name != "networks"}


def _checked(entry: Entry, name: str, stages: list[int], *, tells_all: bool) -> Outcome:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what libraries deprecate in each other
            return check(entry, name, stages)
    except Exception as error:  # noqa: BLE001 - the next network is checked all the same
        if tells_all:
            traceback.print_exc()
        return Outcome(
            worst=math.inf, reason=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        )


def _line(group: str, name: str, found: Outcome) -> str:
    return (
        f"{group:12} {name:40} {'exact' if found.exact else '-':5} atoms {found.atoms:4} "
        f"blocks {found.cut_blocks:3}/{found.blocks:<3} largest {found.largest_atom_share:.2f} "
        f"({found.largest_block_share:.2f}) {found.capture_seconds:5.2f} s  {found.reason}"
    )


def summary(found: dict[str, Outcome]) -> dict[str, Any]:
    """Figures of a group.

    Args:
        found: What became of its networks, by name.
    """
    return {
        "exact": sum(outcome.exact for outcome in found.values()),
        "of": len(found),
        "not_exact": {name: each.reason for name, each in found.items() if not each.exact},
        "wrong": [name for name, each in found.items() if each.worst > ROUNDING],
        "not_cut_between_blocks": [
            name for name, each in found.items() if each.cut_blocks < each.blocks
        ],
        "atom_larger_than_block_and_embedding": [
            name
            for name, each in found.items()
            if each.largest_atom_share > each.largest_block_share
        ],
        "slowest_capture_seconds": max((e.capture_seconds for e in found.values()), default=0.0),
        "networks": {name: asdict(outcome) for name, outcome in found.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
