"""Memory of batches in flight: activations and weight versions of asynchronous schedules.

The rank that is w ranks before the loss has w + 1 batches between forward and backward, and as
many versions of its weights as the weight policy reads. By rank, of three (rank 0 has the loss)::

    copies beside the current weights    rank 0    rank 1    rank 2
    pipedream                                 0         1         2    one for each batch ahead
    2bw                                       1         1         1    the version before
    pipeoptim                                 0         1         1    a prediction, in a forward
    spectrain                                 1         1         1    the last stage predicts too
"""

from __future__ import annotations


def num_batches(rank: int, num_ranks: int) -> int:
    """Batches that a rank has between their forward and their backward, at most."""
    return rank + 1 if num_ranks > 1 else 1


def num_copies(policy: str, rank: int, num_ranks: int) -> int:
    """Copies of a rank's trained weights beside the current ones, at most.

    Args:
        policy: Name of the weight policy.
        rank: The rank; as many ranks lie between it and the end of the pipeline.
        num_ranks: In the pipeline.
    """
    if num_ranks == 1:
        return 0
    if policy == "pipedream":
        return rank
    if policy == "2bw":
        return 1
    predicts_backward = policy == "spectrain" and (num_ranks - 1 - rank) // 2 > 0
    return int(rank > 0 or predicts_backward)
