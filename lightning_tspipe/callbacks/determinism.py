"""Checks that cached layers return the same for the same sample, whenever they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_tspipe.errors import ConfigurationError

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a structure."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def versions_of(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Identity of each tensor, and how often it was changed in place."""
    return [(id(tensor), tensor._version) for tensor in tensors]  # noqa: SLF001 - no other way


def check_deterministic(name: str, run: Callable[[], Any], tensors: Sequence[Tensor]) -> Any:
    """Run frozen layers twice and compare; returns their outputs.

    Args:
        name: Name of the network.
        run: Runs the layers on some inputs.
        tensors: Their parameters and buffers.

    Raises:
        ConfigurationError: They are random, or change when they run.
    """
    versions = versions_of(tensors)
    with torch.no_grad():
        first, second = run(), run()
    if versions != versions_of(tensors):
        why = "change their buffers when they run (BatchNorm in train mode)"
    elif not all(map(torch.equal, tensors_in(first), tensors_in(second))):
        why = "return something different each time (dropout)"
    else:
        return first
    raise ConfigurationError(
        f"the frozen layers of {name!r} {why}: put them into eval mode (module.eval() in "
        "on_train_epoch_start), or train without AutoCache (FreezeAndRepack(cache=None))"
    )


def check_unchanged_outputs(name: str, kept: Any, fresh: Any, dtype: torch.dtype | None) -> None:
    """Compare cached outputs of samples with what their inputs give now.

    Args:
        name: Name of the network.
        kept: Cached outputs.
        fresh: Outputs computed now.
        dtype: Type of the cached outputs; None: that of the outputs.

    Raises:
        ConfigurationError: They differ.
    """
    for one, other in zip(tensors_in(kept), tensors_in(fresh), strict=True):
        if not _is_close(one, other, dtype):
            raise ConfigurationError(
                f"the frozen layers of {name!r} get other inputs for the same sample than in the "
                "epoch before: random augmentation in training_step or in a hook, or ids that "
                "stand for other samples now. Augment behind the frozen layers, or train without "
                "AutoCache (FreezeAndRepack(cache=None))"
            )


def _is_close(one: Tensor, other: Tensor, kept: torch.dtype | None) -> bool:
    """Equal up to rounding: other batches may be computed by other kernels."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = _TOLERANCE.get(one.dtype if kept is None else kept, 2e-2)
    distance = (one.double() - other.double()).norm()
    return bool(distance <= tolerance * other.double().norm() + 1e-12)
