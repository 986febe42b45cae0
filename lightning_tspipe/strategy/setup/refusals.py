"""Refuse what a pipeline can't do, before training, each with a remedy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.weights.policies import WeightPolicy, check_depth
from lightning_tspipe.runtime.weights.prediction import check_momentum, check_predictable

_REFUSED_IN_FITS = {
    "StochasticWeightAveraging": (
        "it trains another epoch for the statistics of a module that no rank holds. Use "
        "WeightAveraging, whose default is the same mean of weights, from the epoch on that its "
        "should_update says, and torch's SWALR in configure_optimizers"
    ),
    "BaseFinetuning": (
        "it compares parameters by their values (torch.equal), which are on several ranks. Do the "
        "same in on_train_epoch_start of the module: self.backbone.requires_grad_(True), and "
        "self.optimizers().add_param_group({'params': [*self.backbone.parameters()], 'lr': ...})"
    ),
    "ModelPruning": "it replaces parameters after the stages are cut. Prune before or after fit",
}
_REFUSED_CALLBACKS = {
    "ThroughputMonitor": (
        "it counts the samples of batches, which one rank reads, and waits for the device. Use "
        "lightning_tspipe.PipelineThroughputMonitor"
    ),
    "BatchSizeFinder": (
        "it tries batch sizes until one rank runs out of memory, and the others wait for it. "
        "`tspipe plan` counts the memory; or find the size with strategy='auto'"
    ),
}


def refuse(problems: Mapping[str, bool]) -> None:
    """Refuse the first problem that is there.

    Args:
        problems: Descriptions, with remedies; whether each is there.

    Raises:
        ConfigurationError: One is.
    """
    for problem, is_there in problems.items():
        if is_there:
            raise ConfigurationError(problem)


def refuse_module(trainer: Any, module: Any, optimizers: Iterable[Any]) -> None:
    """Refuse ways of training that the pipeline can't see into, or sees too late.

    Raises:
        ConfigurationError: A step that reads the loader itself; optimization by hand, and a
            callback that begins at an optimizer step; or optimizers that run the step several times
            per batch (LBFGS), or divide themselves (ZeRO's).
    """
    delayed = (one for one in trainer.callbacks if getattr(one, "delay", 0))
    starts = {type(one).__name__: getattr(one, "start_step", 0) for one in delayed}
    plain = [getattr(optimizer, "_optimizer", optimizer) for optimizer in optimizers]
    refuse({
        f"{type(module).__name__}.training_step takes dataloader_iter, but one rank reads the "
        "batches for all. Write training_step(self, batch, batch_idx)":
        "dataloader_iter" in inspect.signature(module.training_step).parameters,
        **{
            f"{name}(start_step={start}) counts optimizer steps, but with manual optimization "
            "(automatic_optimization = False) their number per batch is known too late. "
            "Leave start_step out": start > 0 and not module.automatic_optimization
            for name, start in starts.items()
        },
        "ZeroRedundancyOptimizer divides parameters among processes that hold all of them, but "
        "a pipeline's stages already divide them. Use the optimizer that it wraps":
        any(base.__name__ == "ZeroRedundancyOptimizer" for o in plain for base in type(o).__mro__),
        "LBFGS runs the step several times per batch, as often as each rank decides. Use an "
        "optimizer that runs it once, such as SGD or AdamW":
        any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in plain),
    })  # fmt: skip


def refuse_divided(optimizers: Iterable[Any]) -> None:
    """Refuse to divide the state of optimizers that change parameters by it outside of a step.

    Raises:
        ConfigurationError: One does: an average that it holds takes the weights' place (with
            schedule-free optimizers, say), on the replica that has it only.
    """
    plain = [getattr(optimizer, "_optimizer", optimizer) for optimizer in optimizers]
    refuse({
        f"zero_stage=1 with {type(each).__name__}, whose eval() changes parameters by what it "
        "keeps for them: another replica has most of that, and the replicas would differ. Leave "
        "zero_stage out": callable(getattr(each, "eval", None))
        for each in plain
    })  # fmt: skip


def refuse_trainer(trainer: Any, device: torch.device) -> None:
    """Refuse arguments of the Trainer that a pipeline would not follow.

    Raises:
        ConfigurationError: Another accelerator, SyncBatchNorm, validation by the clock; or a
            callback that needs the whole module or all batches, or changes what is trained.
    """
    refused = _REFUSED_CALLBACKS | (_REFUSED_IN_FITS if trainer.state.fn == "fit" else {})
    layer_sync = trainer.strategy._layer_sync  # noqa: SLF001 - no public way
    refuse({
        f"the pipeline runs on accelerator='cpu' and 'cuda', not on {device.type!r} devices":
        device.type not in {"cpu", "cuda"},
        "sync_batchnorm=True has nothing to synchronise: each BatchNorm is on one rank of a "
        "pipeline, and normalises a micro-batch. Remove it; TSPipeStrategy(num_microbatches=1) "
        "normalises whole batches": layer_sync is not None,
        "val_check_interval is a time: each rank would look at its own clock, and they would not "
        "validate after the same batch. Give a number of batches or a fraction of the epoch":
        getattr(trainer, "_val_check_time_interval", None) is not None,
        **{
            f"{type(callback).__name__} does not work under a pipeline: {refused[base.__name__]}":
            "callbacks" in base.__module__
            for callback in trainer.callbacks
            for base in type(callback).__mro__
            if base.__name__ in refused
        },
    })  # fmt: skip


def refuse_changes(before: list[Any], after: list[Any], *, has_stopped: bool) -> None:
    """Refuse a step that ends the training or writes into optimizers.

    It runs on one rank, and the others would go on, and update too.

    Args:
        before: The groups of all optimizers, without their parameters.
        after: The same after the step.
        has_stopped: Whether it has ended the training.

    Raises:
        ConfigurationError: It did one of them.
    """
    old, new = pytree.tree_leaves(before), pytree.tree_leaves(after)
    refuse({
        "training_step set trainer.should_stop, but the step runs on one rank, and the others "
        "would go on. Set it in a hook, which all ranks run, based on what all ranks know "
        "(such as batch_idx), or use EarlyStopping": has_stopped,
        "training_step changed the learning rate or another value of an optimizer, but the step "
        "runs on one rank, and the others update their parameters too. Change it in a hook, which "
        "all ranks run (on_train_batch_start, on_before_optimizer_step), or use a scheduler":
        len(old) != len(new) or any(bool(a != b) for a, b in zip(old, new, strict=True)),
    })  # fmt: skip


def refuse_compiled(module: nn.Module, names: Iterable[str]) -> None:
    """Refuse networks that are compiled as a whole, or in parts of their own.

    Raises:
        ConfigurationError: One is.
    """
    for name in names:
        for path, child in module.get_submodule(name).named_modules():
            if hasattr(child, "_orig_mod") or child._compiled_call_impl is not None:  # noqa: SLF001
                raise ConfigurationError(
                    f"{f'{name}.{path}'.rstrip('.')!r} is already compiled, so it can't be "
                    "cut into stages. Remove torch.compile there and have the stages compiled: "
                    "TSPipeStrategy(compile=True)"
                )


def refuse_fused(optimizers: Iterable[Any]) -> None:
    """Refuse optimizers that skip a step by themselves, by what one rank sees of the gradients.

    Raises:
        ConfigurationError: There is one, and gradients are scaled.
    """
    refuse({
        f"a fused {type(optimizer).__name__} decides on each rank whether a step of "
        "precision='16-mixed' is skipped. Use fused=False, or precision='bf16-mixed', which skips "
        "none": getattr(optimizer, "_step_supports_amp_scaling", False)
        for optimizer in optimizers
    })  # fmt: skip


def refuse_loaders(trainer: Any) -> None:
    """Refuse several training loaders: which batch comes next is not known.

    Raises:
        ConfigurationError: There are several.
    """
    combined = trainer.fit_loop._combined_loader  # noqa: SLF001 - no public way
    number = 0 if combined is None else len(combined.flattened)
    refuse({
        f"{number} training loaders: a pipeline reads ahead in only one. Combine the datasets in "
        "one loader (torch.utils.data.ConcatDataset, StackDataset)": number > 1
    })  # fmt: skip


def refuse_result(result: Any) -> None:
    """Refuse a step without a loss: the other ranks have begun their part of the backward.

    Raises:
        ConfigurationError: There is none.
    """
    refuse({
        "training_step returned no loss. A pipeline can't skip a batch: return a loss of zero that "
        "depends on the outputs, such as 0 * output.sum(), or leave such batches out in the loader":
        result is None or (isinstance(result, dict) and result.get("loss") is None)
    })  # fmt: skip


def refuse_training(
    policy: WeightPolicy, trainer: Any, module: Any, student: Iterable[str], num_ranks: int
) -> None:
    """Refuse trainings that a policy can't follow.

    Raises:
        ConfigurationError: Optimization by hand, scaled losses, optimizers that can't be
            predicted, sparse gradients, or too few batches per update.
    """
    parts = [
        (name, *part) for name in student for part in module.get_submodule(name).named_modules()
    ]
    refuse({
        "automatic_optimization=False with a schedule that has batches in flight ('1f1b', "
        "'interleaved', 'zbv'): updates can't be known in advance. Use automatic optimization, or "
        "another schedule": not module.automatic_optimization,
    })  # fmt: skip
    if policy.is_synchronous:
        return
    sparse = [
        f"{name}.{path}".rstrip(".")
        for name, path, part in parts
        if getattr(part, "sparse", False) is True
    ]
    refuse({
        "schedule='1f1b' with precision='16-mixed': all ranks would have to agree on skipping a "
        "step, and so wait for each other. Use precision='bf16-mixed', or weights='synchronous'":
        getattr(trainer.precision_plugin, "scaler", None) is not None,
        f"{next(iter(sparse), '')!r} makes sparse gradients, and updates by them can't be "
        "predicted. Use sparse=False, or weights='synchronous'": bool(sparse),
    })  # fmt: skip
    optimizers = [getattr(o, "_optimizer", o) for o in trainer.strategy.optimizers]
    if policy.name == "spectrain":
        check_momentum(optimizers)
    elif policy.predicts:
        check_predictable(optimizers)
    check_depth(policy, num_ranks, trainer.accumulate_grad_batches)


def check_epochs(trainer: Any, num_ranks: int) -> None:
    """Refuse epochs behind which the next one can't begin at once.

    Raises:
        ConfigurationError: Their length isn't known, or too small, or no multiple of what is
            accumulated, or each has a loader of its own.
    """
    length, every = trainer.fit_loop.max_batches, trainer.accumulate_grad_batches
    refuse({
        "drain_epochs=False needs to know how long an epoch is: give the loader a length, or the "
        "Trainer limit_train_batches": length == float("inf"),
        f"drain_epochs=False with epochs of {length} batches and {num_ranks} ranks: work would "
        "begin on the epoch after the next one. Remove drain_epochs, or make epochs longer":
        length < num_ranks,
        f"drain_epochs=False with accumulate_grad_batches={every} and epochs of {length} batches: "
        "the last update of an epoch would come early. Make one a multiple of the other, or remove "
        "drain_epochs": bool(length % every),
        "drain_epochs=False with reload_dataloaders_every_n_epochs: an epoch is read before the "
        "previous one has ended. Remove one of them":
        bool(trainer.reload_dataloaders_every_n_epochs),
    })  # fmt: skip


def teacher_check(parameters: Iterable[Tensor]) -> Callable[[], None]:
    """What notices a teacher that is averaged although its parts can't follow the student's.

    Networks that are built differently are cut independently, so the two halves of a pair may be
    on different ranks; adding a parameter that is not there changes nothing, and an average would
    only shrink the teacher, silently.

    Args:
        parameters: The teacher's parameters on this rank, just placed.

    Returns:
        A function that compares with how they were placed, and raises a ConfigurationError.
    """
    held = [parameter for parameter in parameters if not parameter.is_meta]

    def sums() -> list[float]:
        return [float(parameter.detach().double().sum()) for parameter in held]

    before = sums()

    def check() -> None:
        refuse({
            "the teacher's parameters are updated, but teacher and student are built differently, "
            "so a pair of them may be on different ranks. Give the teacher the same "
            "structure as the beginning of the student (copy.deepcopy), or don't update it":
            sums() != before
        })  # fmt: skip

    return check
