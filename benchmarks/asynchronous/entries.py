"""Which methods are compared."""

from __future__ import annotations

from benchmarks.throughput.entries import Entry, Option

POLICIES = ("pipeoptim", "pipedream", "2bw", "spectrain")
SYNCHRONOUS = "synchronous"
WINDOWS = {"resnet": 4, "emulated": 12}
"""Batches of a window; a round has whole ones."""
GPIPE_MICROBATCHES = 4
"""As the PipeOptim paper compares it."""
NUM_EMULATED = 4
"""Devices, as the paper has them."""


def _asynchronous(policy: str, num_ranks: int) -> Entry:
    options: tuple[Option, ...] = (("schedule", "1f1b"), ("weights", policy))
    return Entry(policy, "pipeline", options, num_ranks)


def _gpipe(num_ranks: int) -> Entry:
    options = (("schedule", "gpipe"), ("num_microbatches", GPIPE_MICROBATCHES))
    return Entry("gpipe4", "pipeline", options, num_ranks)


REAL = [
    _asynchronous("pipeoptim", 2),
    _asynchronous(SYNCHRONOUS, 2),
    _gpipe(2),
    Entry("ddp", "ddp"),
]
EMULATED = [
    *(_asynchronous(policy, NUM_EMULATED) for policy in (*POLICIES, SYNCHRONOUS)),
    _gpipe(NUM_EMULATED),
]
