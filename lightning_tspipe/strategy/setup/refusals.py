"""Refuse what a pipeline can't do, before training, each with a remedy."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_tspipe.errors import ConfigurationError

_REFUSED_IN_FITS = {
    "WeightAveraging": (
        "it copies the whole module, which no rank holds. Use lightning_tspipe.MomentumEMA with a "
        "`teacher`"
    ),
    "StochasticWeightAveraging": (
        "it copies the whole module, which no rank holds. Use lightning_tspipe.MomentumEMA with a "
        "`teacher`"
    ),
    "BaseFinetuning": (
        "it changes what is trained after the stages are cut. Freeze submodules before fit with "
        "requires_grad_(False)"
    ),
    "ModelPruning": "it replaces parameters after the stages are cut. Prune before or after fit",
}
_REFUSED_CALLBACKS = {
    "ThroughputMonitor": (
        "it counts the samples of batches, which one rank reads, and waits for the device. Use "
        "lightning_tspipe.PipelineThroughputMonitor"
    ),
    "BatchSizeFinder": (
        "it tries sizes until memory runs out, which one rank notices and the others wait for. "
        "`tspipe plan` counts the memory; or find the size with strategy='auto'"
    ),
}


def refuse_callbacks(trainer: Any) -> None:
    """Refuse callbacks that need the whole module or all batches, or change what is trained.

    Raises:
        ConfigurationError: There is one.
    """
    refused = _REFUSED_CALLBACKS | (_REFUSED_IN_FITS if trainer.state.fn == "fit" else {})
    for callback in trainer.callbacks:
        for base in type(callback).__mro__:
            if base.__name__ in refused and "callbacks" in base.__module__:
                raise ConfigurationError(
                    f"{type(callback).__name__} does not work under a pipeline: "
                    f"{refused[base.__name__]}"
                )


def refuse_module(module: Any) -> None:
    """Refuse ways of training that the pipeline can't see into.

    Raises:
        ConfigurationError: A step that reads the loader itself.
    """
    name = type(module).__name__
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ConfigurationError(
            f"{name}.training_step takes dataloader_iter, but one rank reads the batches for all. "
            "Write training_step(self, batch, batch_idx)"
        )


def refuse_trainer(trainer: Any, device: torch.device) -> None:
    """Refuse arguments of the Trainer that a pipeline would not follow.

    Raises:
        ConfigurationError: Another accelerator, SyncBatchNorm, or validation by the clock.
    """
    if device.type not in {"cpu", "cuda"}:
        raise ConfigurationError(
            f"the pipeline runs on accelerator='cpu' and 'cuda', not on {device.type!r} devices"
        )
    if trainer.strategy._layer_sync is not None:  # noqa: SLF001 - no public way
        raise ConfigurationError(
            "sync_batchnorm=True has nothing to synchronise: each BatchNorm is on one rank of a "
            "pipeline, and normalises a micro-batch. Remove it; TSPipeStrategy(num_microbatches=1) "
            "normalises whole batches"
        )
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        raise ConfigurationError(
            "val_check_interval is a time: each rank would look at its own clock, and they would "
            "not validate after the same batch. Give a number of batches or a fraction of the epoch"
        )


def refuse_stop(trainer: Any, before: bool) -> None:
    """Refuse a step that ends the training: it runs on one rank, and the others would go on.

    Raises:
        ConfigurationError: It did.
    """
    if trainer.should_stop and not before:
        raise ConfigurationError(
            "training_step set trainer.should_stop, but the step runs on one rank, and the others "
            "would go on. Set it in a hook, which all ranks run, by something that all ranks know "
            "(such as batch_idx), or use EarlyStopping"
        )


def refuse_hyperparameters(before: list[Any], after: list[Any]) -> None:
    """Refuse a step that writes into optimizers: it runs on one rank, and the others update too.

    Args:
        before: The groups of all optimizers, without their parameters.
        after: The same after the step.

    Raises:
        ConfigurationError: They differ.
    """
    leaves = [pytree.tree_leaves(groups) for groups in (before, after)]
    if len(leaves[0]) != len(leaves[1]) or any(bool(a != b) for a, b in zip(*leaves, strict=True)):
        raise ConfigurationError(
            "training_step changed the learning rate or another value of an optimizer, but the "
            "step runs on one rank, and the others update their parameters too. Change it in a "
            "hook, which all ranks run (on_train_batch_start, on_before_optimizer_step), or use a "
            "scheduler"
        )


def refuse_compiled(module: nn.Module, names: Iterable[str]) -> None:
    """Refuse networks that are compiled as a whole, or in parts of their own.

    Raises:
        ConfigurationError: One is.
    """
    for name in names:
        for path, child in module.get_submodule(name).named_modules():
            if hasattr(child, "_orig_mod") or child._compiled_call_impl is not None:  # noqa: SLF001
                raise ConfigurationError(
                    f"{f'{name}.{path}'.rstrip('.')!r} is compiled already, so that it can't be "
                    "cut into stages. Remove torch.compile there and have the stages compiled: "
                    "TSPipeStrategy(compile=True)"
                )


def refuse_optimizers(optimizers: Iterable[Any]) -> None:
    """Refuse optimizers that run the step several times per batch, or divide themselves.

    Raises:
        ConfigurationError: LBFGS, or ZeRO's.
    """
    for optimizer in optimizers:
        if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
            raise ConfigurationError(
                "ZeroRedundancyOptimizer divides parameters among processes that hold all of them, "
                "and the stages of a pipeline are divided already. Use the optimizer that it wraps"
            )
        if isinstance(getattr(optimizer, "_optimizer", optimizer), torch.optim.LBFGS):
            raise ConfigurationError(
                "LBFGS runs the step several times per batch, as often as each rank finds fit. Use "
                "an optimizer that runs it once, such as SGD or AdamW"
            )


def refuse_delay(trainer: Any, module: Any) -> None:
    """Refuse a delay that begins at an optimizer step whose number is known too late.

    Raises:
        ConfigurationError: Optimization by hand, and ``DelayedTeacherUpdate(start_step=...)``.
    """
    if module.automatic_optimization:
        return
    for callback in trainer.callbacks:
        if getattr(callback, "delay", 0) and getattr(callback, "start_step", 0) > 0:
            raise ConfigurationError(
                f"{type(callback).__name__}(start_step={callback.start_step}) counts optimizer "
                "steps, and how many of them a batch has is seen too late where the module "
                "optimizes by hand (automatic_optimization = False). Leave start_step out"
            )


def refuse_fused(optimizers: Iterable[Any]) -> None:
    """Refuse optimizers that skip a step by themselves, by what one rank sees of the gradients.

    Raises:
        ConfigurationError: There is one, and gradients are scaled.
    """
    for optimizer in optimizers:
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ConfigurationError(
                f"a fused {type(optimizer).__name__} decides on each rank whether a step of "
                "precision='16-mixed' is skipped. Use fused=False, or precision='bf16-mixed', "
                "which skips none"
            )


def refuse_loaders(trainer: Any) -> None:
    """Refuse several training loaders: which batch comes next is not known.

    Raises:
        ConfigurationError: There are several.
    """
    combined = trainer.fit_loop._combined_loader  # noqa: SLF001 - no public way
    if combined is not None and len(combined.flattened) > 1:
        raise ConfigurationError(
            f"{len(combined.flattened)} training loaders: a pipeline reads ahead in one. Combine "
            "the datasets in one loader (torch.utils.data.ConcatDataset, StackDataset)"
        )


def refuse_result(result: Any) -> None:
    """Refuse a step without a loss: the other ranks have begun their part of the backward.

    Raises:
        ConfigurationError: There is none.
    """
    if result is None or (isinstance(result, dict) and result.get("loss") is None):
        raise ConfigurationError(
            "training_step returned no loss. A pipeline can't skip a batch: return a loss of zero "
            "that depends on the outputs, such as 0 * output.sum(), or leave such batches out in "
            "the loader"
        )


class TeacherWatch:
    """Notices a teacher that is averaged although its parts can't follow the student's.

    Networks that are built differently are cut independently, so the two halves of a pair may be
    on different ranks; adding a parameter that is not there changes nothing, and an average would
    only shrink the teacher, silently.

    Args:
        parameters: The teacher's parameters on this rank, just placed.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [p for p in parameters if not p.is_meta]
        self._before = self._measure()

    def _measure(self) -> list[float]:
        return [float(p.detach().double().sum()) for p in self._parameters]

    def check(self) -> None:
        """Compare with how they were placed.

        Raises:
            ConfigurationError: They changed.
        """
        if self._measure() != self._before:
            raise ConfigurationError(
                "the teacher's parameters are updated, but teacher and student are built "
                "differently, so that the parts of a pair may be on different ranks. Give the "
                "teacher the same structure as the beginning of the student (copy.deepcopy), or "
                "don't update it"
            )
