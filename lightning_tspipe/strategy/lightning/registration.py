"""The names of the strategies in both copies of Lightning."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from lightning_tspipe.runtime.weights.policies import POLICIES
from lightning_tspipe.schedules.registry import SCHEDULES
from lightning_tspipe.schedules.windows import ACROSS_STEPS
from lightning_tspipe.strategy.lightning.namespaces import installed_namespaces


def register_all() -> None:
    """Register the strategies by name; they are imported when one of them is made."""
    for namespace in installed_namespaces():
        registry = namespace.strategies.StrategyRegistry
        if "tspipe" not in registry:
            register(registry, _made)


def register(registry: Any, make: Callable[..., Any]) -> None:
    """Register a class, or a function that makes a strategy, by the names of its options.

    Args:
        registry: Of a copy of Lightning.
        make: Gets ``schedule`` and ``weights``.
    """
    options: dict[str, dict[str, str]] = {
        **{schedule: {"schedule": schedule} for schedule in (*SCHEDULES, *ACROSS_STEPS)},
        **{
            "1f1b" if policy.is_synchronous else name: {"schedule": "1f1b", "weights": name}
            for name, policy in POLICIES.items()
        },
    }
    for option, given in options.items():
        name = option if option == "tspipe" else f"tspipe_{option}"
        description = f"Pipeline parallelism with {given}"
        registry.register(name, make, description=description, **given)


def _made(**options: Any) -> Any:
    # It takes half a second to import, and uses what stands here.
    return resolve_name("lightning_tspipe.strategy.strategy:TSPipeStrategy")(**options)
