"""Memory of batches in flight: activations and weight versions of asynchronous schedules.

A rank that is w ranks before the loss has w + 1 batches between forward and backward, and as many
versions of its weights as its weight policy reads. For three ranks (rank 0 has the loss)::

    copies beside the current weights    rank 0    rank 1    rank 2
    pipedream                                 0         1         2    one for each batch ahead
    2bw                                       1         1         1    the version before
    pipeoptim                                 0         1         1    a prediction, in a forward
    spectrain                                 1         1         1    the last stage predicts too
"""

from __future__ import annotations


def num_batches(rank: int, num_ranks: int) -> int:
    """The most batches that a rank has between forward and backward."""
    return rank + 1 if num_ranks > 1 else 1


def num_copies(policy: str, rank: int, num_ranks: int) -> int:
    """The most copies of a rank's trained weights, beside the current ones.

    Args:
        policy: Name of the weight policy.
        rank: The rank, which is also the number of ranks between it and the loss.
        num_ranks: Ranks of the pipeline.
    """
    if num_ranks == 1:
        return 0
    if policy == "pipedream":
        return rank
    if policy == "2bw":
        return 1
    predicts_backward = policy == "spectrain" and (num_ranks - 1 - rank) // 2 > 0
    return int(rank > 0 or predicts_backward)
