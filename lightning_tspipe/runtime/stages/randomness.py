"""Whether networks draw random numbers: then it matters which rank runs what."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_tspipe.capture.plan import StepPlan, TensorSpec
from lightning_tspipe.networks import swap
from lightning_tspipe.runtime.stages.network import ChainNetwork


class _Draws(TorchDispatchMode):
    """Notes whether an operation that draws was called."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags and not _is_off(func, args)
        return func(*args, **(kwargs or {}))


def _is_off(func: Any, args: Any) -> bool:
    """Whether it is an attention, which draws for its dropout only, without dropout."""
    schema = func._schema.arguments  # noqa: SLF001 - there is no public way to the names
    given = {argument.name: argument.default_value for argument in schema}
    given |= {argument.name: value for argument, value in zip(schema, args, strict=False)}
    return "dropout_p" in given and not given["dropout_p"]


def draws(modules: Iterable[nn.Module], run: Callable[[Tensor], object], spec: TensorSpec) -> bool:
    """Whether a forward draws random numbers, such as those of dropout; found on shapes.

    Args:
        modules: All that it runs, in the modes in which they will run.
        run: The forward.
        spec: Its input.

    Returns:
        Also True of a forward that can't be run without values.
    """
    mode: Any = _Draws()  # type: ignore[no-untyped-call]
    try:
        with swap.TensorSwap(list(modules), swap.meta_like)(), swap.random_stream(None), mode:
            run(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
    except Exception:  # noqa: BLE001 - what a network does without values can't be foreseen
        return True
    return bool(mode.seen)


def network_draws(network: ChainNetwork, plan: StepPlan) -> bool:
    """Whether a step draws random numbers in a network."""

    def run(x: Tensor) -> None:
        network.chain.run((x,), 0, len(network.atoms))

    calls = plan.calls_of(network.called_as)
    return any(draws(network.modules, run, plan.calls[index].input) for index in calls)
