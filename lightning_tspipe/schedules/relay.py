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

from collections.abc import Sequence

from lightning_tspipe.ir.pipeline import Coupling, NetworkLayout, Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.schedules.phases import fill_and_drain


def relay_pipeline(groups: Sequence[Sequence[int]], *, is_relayed: bool = True) -> Pipeline:
    """The pipeline of blocks on groups of ranks.

    Args:
        groups: The ranks that share each stage.
        is_relayed: Whether each stage gets the output of the one before.
    """
    ranks, num_ranks = tuple(group[0] for group in groups), sum(map(len, groups))
    outputs = frozenset(range(len(groups)))
    layout = NetworkLayout(ranks, 1, 1, outputs, tuple(map(tuple, groups)))
    blockwise = Coupling.BLOCKWISE
    return Pipeline(num_ranks, layout, layout, num_ranks - 1, 0, blockwise, is_relayed)


def relay(pipeline: Pipeline) -> Schedule:
    """One step of every rank."""
    return fill_and_drain(pipeline)
