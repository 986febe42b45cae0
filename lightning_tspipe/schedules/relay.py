"""Teacher relaying (Jang et al., *Pipe-BD*, DATE 2023, sections 4.1 and 4.2).

Stage s holds some blocks of the teacher and the student's blocks that learn from them. It gets the
teacher's activation from the stage before, runs its part of the teacher, relays the result, and
only then trains its own blocks (forward, loss, backward, update), which nobody waits for::

    stage s:  T(n) | F(n) | L(n) | B(n) | O(n)        waits for T(n) of stage s - 1 only

Nothing is sent back, so upstream ranks run ahead by themselves, and the step takes as long as its
slowest stage (decoupled parameter update). Three stages (rank 2 holds stage 0), backwards of two
forwards, two steps::

    rank 0 |    T0F0B0──T0F0B0──|
    rank 1 |  T0F0B0──T0F0B0──  |
    rank 2 |T0F0B0──T0F0B0──    |

Ranks that share a stage divide each batch; a unit is one rank's share, and they sum their gradients
before the update (automatic hybrid distribution, section 4.3). Here ranks 1 and 2 share stage 0::

    rank 0 |  T0F0B0──T0F0B0──|
    rank 1 |T1F1B1──T1F1B1──  |
    rank 2 |T0F0B0──T0F0B0──  |

With a single stage, shared by all, nothing is relayed between ranks (internal relaying).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import Coupling, NetworkLayout, Pipeline
from lightning_tspipe.ir.schedule import Schedule


def relay_pipeline(groups: Sequence[Sequence[int]], *, is_relayed: bool = True) -> Pipeline:
    """The pipeline of blocks on groups of ranks.

    Args:
        groups: The ranks that share each stage.
        is_relayed: Whether each stage gets the output of the one before.
    """
    layout = NetworkLayout.shared(groups)
    num_ranks = sum(map(len, groups))
    return Pipeline(
        num_ranks,
        layout,
        layout,
        num_ranks - 1,
        coupling=Coupling.BLOCKWISE,
        is_relayed=is_relayed,
    )


def relay(pipeline: Pipeline) -> Schedule:
    """One step of every rank."""
    ranks = range(pipeline.num_ranks)
    return Schedule(pipeline, tuple(tuple(_rank(pipeline, rank)) for rank in ranks))


def _rank(pipeline: Pipeline, rank: int) -> Iterator[Action]:
    layout = pipeline.student
    cells = [
        (stage, unit)
        for stage in pipeline.stages_of(rank)
        for unit in layout.units_of(stage)
        if layout.holder(stage, unit) == rank
    ]
    yield Action(Op.EFFECTS, rank)
    if rank == pipeline.data_rank:
        yield Action(Op.DATA, rank)
    yield from (Action(Op.TEACHER, *cell) for cell in cells)
    yield from (Action(Op.FORWARD, *cell) for cell in cells)
    yield Action(Op.LOSS, rank)
    yield from (Action(Op.BACKWARD, *cell) for cell in cells)
    yield Action(Op.OPTIMIZER, rank)
