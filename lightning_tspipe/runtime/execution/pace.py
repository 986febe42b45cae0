"""Bounds how far ranks run ahead of those that read what they make."""

from __future__ import annotations

from itertools import pairwise

from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.channels import Channel


class Pace:
    """Keeps ranks from running ahead of those that read what they make: queues are bounded.

    A rank begins a step when those have begun the one that is ``slack`` steps before it.

    Args:
        transport: How to reach the other ranks.
        pipeline: Who holds what.
        slack: Steps that a rank may be ahead, at least 1.

    Attributes:
        slack: The same.
    """

    def __init__(self, transport: Transport, pipeline: Pipeline, slack: int) -> None:
        assert pipeline.teacher is not None
        stages = pipeline.teacher.ranks
        edges = [*pairwise(stages)]
        edges += [(stages[-1], rank) for rank in pipeline.loss_ranks]
        own = transport.rank
        self._transport = transport
        self._before = sorted({a for a, b in edges if b == own != a})
        self._behind = sorted({b for a, b in edges if a == own != b})
        self._num_begun = 0
        self.slack = slack

    def begin_step(self) -> None:
        """Wait until the step may begin; every rank calls it."""
        for rank in self._before:
            self._transport.send_object(None, rank, Channel.PACE)
        self._num_begun += 1
        if self._num_begun > self.slack:
            with waiting("the ranks that read what this one makes"):
                for rank in self._behind:
                    self._transport.receive_object(rank, Channel.PACE)
