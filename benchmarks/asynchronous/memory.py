"""What each policy's processes hold at most, with and without recomputation."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from itertools import product

from benchmarks.asynchronous.entries import NUM_EMULATED, POLICIES
from benchmarks.crews.crew import Crew, worker_context
from benchmarks.crews.job import Job
from benchmarks.environment import environment_of

PROGRAM = "benchmarks.asynchronous.weighing"
BATCH_SIZE = 16
NUM_STEPS = 16
"""Batches that are read; the steps are behind by as many as there are ranks."""

Held = dict[tuple[str, bool], list[int]]
"""Bytes of each rank, by policy, and whether forwards are done again."""


def measure(options: Namespace) -> int:
    """Measure, print and write; returns the exit status."""
    # Large blocks go back to the system when they are freed, whatever was freed before.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    context = worker_context(PROGRAM)
    held: Held = {}
    for policy, again in product(POLICIES, (False, True)):
        chosen = (("schedule", "1f1b"), ("weights", policy), ("activation_checkpointing", again))
        job = Job(PROGRAM, "resnet50", policy, chosen, BATCH_SIZE, NUM_EMULATED, 0, 0)
        with Crew(job, context) as crew:
            crew.start()
            crew.turn(NUM_STEPS)
            held[policy, again] = [rank.notes["resident"] for rank in crew.weigh()]
        print(f"{policy} {again}: {held[policy, again]}", file=sys.stderr, flush=True)
    text = table_of(held)
    print(text)
    if options.json is not None:
        content = {
            "environment": environment_of(("torch", "torchvision", "lightning")),
            "figures": figures_of(held),
            "rows": [
                {"policy": policy, "recomputes": again, "resident": ranks}
                for (policy, again), ranks in held.items()
            ],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        options.json.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
    return 0


def figures_of(held: Held) -> dict[str, float]:
    """``memory.{policy}.rank{number}`` in MB; ``.recomputed`` where forwards are done again."""
    return {
        f"memory.{policy}.rank{rank}{'.recomputed' * again}": size / 1e6
        for (policy, again), ranks in held.items()
        for rank, size in enumerate(ranks)
    }


def table_of(held: Held) -> str:
    """A line for each policy, with and without recomputation."""
    lines = ["policy     recomputes  MB at most: rank 0 (loss), ..., the first stage"]
    for (policy, again), ranks in held.items():
        sizes = " ".join(f"{size / 1e6:6.0f}" for size in ranks)
        lines.append(f"{policy:<10} {'yes' if again else 'no':<10} {sizes}")
    return "\n".join(lines)
