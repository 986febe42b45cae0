"""Blockwise distillation: blocks beside blocks, each with a loss of its own, relayed between ranks.

Its steps are those of ``relay.engine``; an evaluation walks both networks from end to end, which
then are a chain.
"""

from __future__ import annotations

from typing import final

from typing_extensions import override

from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.runtime.modes.chain import OneStep
from lightning_tspipe.runtime.stages.captured import Captured, Division


@final
class Blockwise(OneStep):
    """Blocks on groups of ranks.

    Args:
        pipeline: Which ranks share which stage.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    @override
    def layout(self, captured: Captured, division: Division) -> Pipeline:
        return self._pipeline
