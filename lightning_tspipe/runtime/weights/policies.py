"""Which version of a stage's weights a batch meets, where forwards run ahead of updates.

Between the forward of a batch at a stage and its backward there, the stage makes s updates (s is
the number of ranks between it and the loss, fewer just after a drain and with accumulation). Drawn
for a stage with s = 2; F and B of batch 5, and the versions that they read::

                     v3  v4  v5
    PipeDream        F5      B5     both read v3, which is kept until then
    PipeDream-2BW    F5      B5     both read the version before the batch's own; two are kept
    PipeOptim        F5 ~~►  B5     F reads v3 moved on by two predicted updates, B reads v5
    SpecTrain        F5 ~~►  B5 ~►  both read predictions of the version at the batch's end
    synchronous      -              there is no update between the two: the pipeline is drained

References: Narayanan et al., *PipeDream*, SOSP 2019; Narayanan et al., *Memory-Efficient
Pipeline-Parallel DNN Training* (2BW), ICML 2021; Guan et al., *PipeOptim*, 2023; Chen et al.,
SpecTrain, 2018.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_tspipe.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class WeightPolicy:
    """One policy; a frozen table that ``StageWeights`` interprets.

    Attributes:
        name: As in ``TSPipeStrategy(weights=...)``.
        keeps: Whether a backward reads the version that its forward read.
        delay: How many updates the version that a batch reads is older than its own.
        predicts_forward: Whether the forward reads weights moved on by s predicted updates.
        predicts_backward: Whether the backward reads predictions too: of the version at the time
            when the batch leaves the pipeline.
        is_synchronous: Whether no batch is in flight when an update is made.
    """

    name: str
    keeps: bool = False
    delay: int | None = None
    predicts_forward: bool = False
    predicts_backward: bool = False
    is_synchronous: bool = False

    @property
    def predicts(self) -> bool:
        """Whether it needs to know how optimizers go on."""
        return self.predicts_forward or self.predicts_backward


POLICIES = {
    policy.name: policy
    for policy in (
        WeightPolicy("pipeoptim", predicts_forward=True),
        WeightPolicy("pipedream", keeps=True),
        WeightPolicy("2bw", keeps=True, delay=1),
        WeightPolicy("spectrain", predicts_forward=True, predicts_backward=True),
        WeightPolicy("synchronous", is_synchronous=True),
    )
}


def policy_of(name: str) -> WeightPolicy:
    """A policy by its name.

    Raises:
        ConfigurationError: There is none.
    """
    if name not in POLICIES:
        raise ConfigurationError(f"weights={name!r}: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]


def check_depth(policy: WeightPolicy, num_ranks: int, batches_per_update: int) -> None:
    """Refuse updates that come faster than two versions allow.

    Raises:
        ConfigurationError: 2BW, and fewer batches per update than ranks.
    """
    if policy.delay is not None and num_ranks > 1 and batches_per_update < num_ranks:
        raise ConfigurationError(
            "weights='2bw' keeps two versions of the weights, which needs at least as many batches "
            f"per update as stages: accumulate_grad_batches={batches_per_update} for {num_ranks} "
            f"stages. Use accumulate_grad_batches={num_ranks} or more (with batches smaller by "
            "the same factor), or weights='pipedream'"
        )
