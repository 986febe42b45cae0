"""Asynchronous training (schedule='1f1b'): refuse what it can't follow, announce updates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.weights.policies import WeightPolicy, check_depth, policy_of
from lightning_tspipe.runtime.weights.prediction import check_momentum, check_predictable
from lightning_tspipe.runtime.weights.versions import StageWeights
from lightning_tspipe.strategy.setup.options import SetupOptions


def policy_for(options: SetupOptions) -> WeightPolicy | None:
    """The policy of a training; None where there is only one version of the weights."""
    if options.schedule != "1f1b":
        return None
    return policy_of(options.weights or "pipeoptim")


def refuse_training(
    policy: WeightPolicy, trainer: Any, module: Any, student: Iterable[str], num_ranks: int
) -> None:
    """Refuse trainings that a policy can't follow.

    Raises:
        ConfigurationError: Optimization by hand, scaled losses, optimizers that can't be
            predicted, sparse gradients, or too few batches per update.
    """
    if not module.automatic_optimization:
        raise ConfigurationError(
            "schedule='1f1b' with automatic_optimization=False: when an update comes can't be "
            "known ahead. Use automatic optimization, or another schedule"
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ConfigurationError(
            "schedule='1f1b' with precision='16-mixed': all ranks would have to agree on skipping "
            "a step, and so wait for each other. Use precision='bf16-mixed'"
        )
    optimizers = [getattr(o, "_optimizer", o) for o in trainer.strategy.optimizers]
    if policy.name == "spectrain":
        check_momentum(optimizers)
    elif policy.predicts:
        check_predictable(optimizers)
    for name in student:
        _refuse_sparse(module.get_submodule(name), name)
    check_depth(policy, num_ranks, trainer.accumulate_grad_batches)


def _refuse_sparse(network: nn.Module, name: str) -> None:
    for path, child in network.named_modules():
        if getattr(child, "sparse", False) is True:
            raise ConfigurationError(
                f"{f'{name}.{path}'.rstrip('.')!r} makes sparse gradients, and updates by them "
                "can't be predicted. Use sparse=False"
            )


def check_epochs(trainer: Any, num_ranks: int) -> None:
    """Refuse epochs behind which the next one can't begin at once.

    Raises:
        ConfigurationError: Their length isn't known, or too small, or no multiple of what is
            accumulated, or each has a loader of its own.
    """
    length, every = trainer.fit_loop.max_batches, trainer.accumulate_grad_batches
    if length == float("inf"):
        raise ConfigurationError(
            "drain_epochs=False needs to know how long an epoch is: give the loader a length, or "
            "the Trainer limit_train_batches"
        )
    if length < num_ranks:
        raise ConfigurationError(
            f"drain_epochs=False with epochs of {length} batches and {num_ranks} ranks: work would "
            "begin on the epoch after the next one. Remove drain_epochs, or make epochs longer"
        )
    if length % every:
        raise ConfigurationError(
            f"drain_epochs=False with accumulate_grad_batches={every} and epochs of {length} "
            "batches: the last update of an epoch would come early. Make one a multiple of the "
            "other, or remove drain_epochs"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise ConfigurationError(
            "drain_epochs=False with reload_dataloaders_every_n_epochs: an epoch is read before "
            "the one before it has ended. Remove one of them"
        )


def begin_step(weights: StageWeights, batches_per_update: int, batch_idx: int) -> None:
    """Tell the weights when updates will come.

    Raises:
        ConfigurationError: They come too often for two versions.
    """
    if weights.batches_per_update != batches_per_update:
        check_depth(weights.policy, weights.num_ranks, batches_per_update)
        weights.batches_per_update = batches_per_update
    weights.position = batch_idx


def use_optimizers(weights: StageWeights, optimizers: Iterable[Optimizer]) -> None:
    """The optimizers whose updates are predicted."""
    weights.optimizers = list(optimizers)
