"""An optimizer for each head, and one for Lightning, which takes no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


class HeadOptimizers(torch.optim.Optimizer):
    """Optimizers of any kinds, as one: each updates its own parameters.

    Args:
        optimizers: By the names of the heads.
    """

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self.optimizers = dict(optimizers)
        groups = [group for each in self.optimizers.values() for group in each.param_groups]
        super().__init__(groups, {})
        self._share()

    def _share(self) -> None:
        """Groups and state are the same objects in the parts and in the whole."""
        start = 0
        for each in self.optimizers.values():
            stop = start + len(each.param_groups)
            each.param_groups = self.param_groups[start:stop]
            each.state = self.state
            start = stop

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all heads that have gradients."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for each in self.optimizers.values():
            each.step()
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what ``state_dict`` gave."""
        super().load_state_dict(state_dict)
        self._share()
