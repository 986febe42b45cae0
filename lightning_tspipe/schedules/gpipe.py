"""Fill and drain, without running ahead: GPipe (Huang et al., NeurIPS 2019, figure 2c).

The teacher's forwards of the same batch are pipelined before the student's. Three stages (rank 2
holds stage 0), one view in two micro-batches, and a backward that costs two forwards::

    rank 0 |    T0T1F0F1B1──B0──        |
    rank 1 |  T0T1F0F1      B1──B0──    |
    rank 2 |T0T1F0F1            B1──B0──|
"""

from __future__ import annotations

from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.schedules.phases import fill_and_drain


def gpipe(pipeline: Pipeline) -> Schedule:
    """All teacher forwards of the batch, all student forwards, the loss, all backwards."""
    return fill_and_drain(pipeline)
