"""Which methods are compared, and in which variants."""

from __future__ import annotations

from dataclasses import dataclass

Option = tuple[str, int | float | str]

STATE_LIMIT = 0.6
"""Share of one whole replica's parameters, gradients, optimizer state and teacher that a rank of
TSPipe may hold: memory and speed are figures of the same run. The other pipelines are cut for speed
alone."""
TINY_MICROBATCHES = 8
"""Micro-batches per view where the executor's overhead is weighed: many actions per step."""
TINY_ACTIONS = 3 * 2 * TINY_MICROBATCHES
"""What one rank executes in such a step: F, B and T of two views; receives, sends, loss, update
and the Trainer's own work come on top, and are part of what an action is said to cost."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One variant of one method in a comparison.

    Attributes:
        name: Of the method, as in the figures. Of entries with one name the fastest counts.
        method: What its processes run, see ``methods.METHODS``.
        options: For the method.
        num_ranks: How many processes it has.
        copies: How many trainings it is, each with batches of its own.
    """

    name: str
    method: str
    options: tuple[Option, ...] = ()
    num_ranks: int = 2
    copies: int = 1

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options)
        return f"{self.name}({options})" if options else self.name


def comparison(num_microbatches: tuple[int, ...]) -> list[Entry]:
    """All methods on two processes; the GPipes once for each number of micro-batches."""
    return [
        Entry("tspipe", "tspipe", (("schedule", "tspipe"), ("state_limit", STATE_LIMIT))),
        Entry("ddp", "ddp"),
        Entry("fsdp2", "fsdp2"),
        Entry("sequential", "tspipe", (("schedule", "sequential"),)),
        *(
            Entry("gpipe", "tspipe", (("schedule", "gpipe"), ("num_microbatches", number)))
            for number in num_microbatches
        ),
        *(
            Entry("torch_gpipe", "torch_gpipe", (("num_microbatches", number),))
            for number in num_microbatches
        ),
        # Two trainings that share nothing but the machine: what no pipeline over it can exceed.
        Entry("twins", "alone", copies=2),
    ]


def windows() -> list[Entry]:
    """Windows of batches between two updates, on two processes."""
    limit = ("state_limit", STATE_LIMIT)
    return [
        # The first layers compute, the last ones have the parameters: only two stages for each
        # rank divide both equally.
        Entry("tspipe", "tspipe", (("schedule", "interleaved"), limit)),
        Entry("1f1b", "tspipe", (("schedule", "1f1b"), ("weights", "synchronous"), limit)),
        Entry("gpipe", "tspipe", (("schedule", "gpipe"), ("num_microbatches", 1))),
        Entry("ddp", "ddp"),
        Entry("twins", "alone", copies=2),
    ]


def single_device() -> list[Entry]:
    """The strategy with one process, and Lightning without it."""
    return [
        Entry("tspipe1", "tspipe", (("schedule", "tspipe"),), num_ranks=1),
        Entry("plain", "plain", num_ranks=1),
    ]


def overhead() -> list[Entry]:
    """A pipeline of nearly nothing, and one rank's arithmetic without the pipeline."""
    options: tuple[Option, ...] = (
        ("schedule", "tspipe"),
        ("num_microbatches", TINY_MICROBATCHES),
        ("split_backward", False),  # else the number of actions is the planner's choice
    )
    return [Entry("tspipe", "tspipe", options), Entry("half", "half", num_ranks=1)]
