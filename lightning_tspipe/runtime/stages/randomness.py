"""Whether networks draw random numbers: then it matters which rank runs what."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from lightning_tspipe.capture.plan import StepPlan, TensorSpec
from lightning_tspipe.capture.provenance import DrawCounter
from lightning_tspipe.networks import swap
from lightning_tspipe.runtime.stages.network import ChainNetwork


def draws(modules: Iterable[nn.Module], run: Callable[[Tensor], object], spec: TensorSpec) -> bool:
    """Whether a forward draws random numbers, such as those of dropout; found on shapes.

    Args:
        modules: All that it runs, in the modes in which they will run.
        run: The forward.
        spec: Its input.

    Returns:
        Also True of a forward that can't be run without values.
    """
    found = DrawCounter()
    try:
        with swap.TensorSwap(list(modules), swap.meta_like)(), swap.random_stream(None), found:
            run(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
    except Exception:  # noqa: BLE001 - what a network does without values can't be foreseen
        return True
    return found.count > 0


def network_draws(network: ChainNetwork, plan: StepPlan) -> bool:
    """Whether a step draws random numbers in a network."""

    def run(x: Tensor) -> None:
        network.chain.run((x,), 0, len(network.atoms))

    calls = plan.calls_of(network.called_as)
    return any(draws(network.modules, run, plan.calls[index].input) for index in calls)
