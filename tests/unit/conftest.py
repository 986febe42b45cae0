from __future__ import annotations

from typing import Protocol

import pytest

from lightning_tspipe.ir.pipeline import NetworkLayout, Pipeline
from lightning_tspipe.planning.placement import default_ranks


class MakePipeline(Protocol):
    """Pipelines by their few numbers."""

    def __call__(  # noqa: PLR0913 -- as many as a pipeline has
        self,
        num_ranks: int,
        num_calls: int,
        num_microbatches: int,
        *,
        num_stages: int | None = None,
        teacher: bool = True,
        teacher_ranks: tuple[int, ...] | None = None,
        outputs: frozenset[int] = frozenset(),
    ) -> Pipeline: ...


def _pipeline(  # noqa: PLR0913 -- as above
    num_ranks: int,
    num_calls: int,
    num_microbatches: int,
    *,
    num_stages: int | None = None,
    teacher: bool = True,
    teacher_ranks: tuple[int, ...] | None = None,
    outputs: frozenset[int] = frozenset(),
) -> Pipeline:
    ranks = default_ranks(num_stages or num_ranks, num_ranks)

    def network(held: tuple[int, ...]) -> NetworkLayout:
        taps = frozenset(stage for stage in outputs if stage < len(held))
        return NetworkLayout(held, num_calls, num_microbatches, taps | {len(held) - 1})

    return Pipeline(
        num_ranks,
        network(ranks),
        network(teacher_ranks or ranks) if teacher else None,
        data_rank=ranks[0],
    )


@pytest.fixture(scope="session")
def make_pipeline() -> MakePipeline:
    """Stage s on rank (S - 1 - s) % P, for the teacher too unless its ranks are given."""
    return _pipeline
