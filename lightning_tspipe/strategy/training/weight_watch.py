"""Weights of other ranks, which have no values here: what is computed with them would be nothing.

Hooks run on every rank. torch leaves a tensor as it is if one without values is to be added to it
in place, without a word: an average would only shrink.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.networks.location import current_line
from lightning_tspipe.replay.meta import changes_first
from lightning_tspipe.strategy.training.gradient_watch import enter, is_own_code, leave


class WeightWatch(TorchFunctionMode):
    """While on, refuses to change in place what lies here by weights that lie on another rank.

    What torch refuses itself, as a copy of them, is told by torch.

    Args:
        weights: Parameters and buffers; those on other ranks are meta tensors.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self._weights = {id(tensor): tensor for tensor in weights}
        self._made: Any = {}  # from those on other ranks; it travels to workers, with the strategy
        self._process = 0
        self._is_idle = False
        self.is_on = False

    def start(self) -> None:
        """From now on."""
        if self._weights and not self.is_on:
            self.is_on, self._made, self._process = True, WeakIdKeyDictionary(), os.getpid()
            enter(self)

    def stop(self) -> None:
        """Until now."""
        if self.is_on:
            leave(self)
            self.is_on, self._made = False, {}

    @contextmanager
    def idle(self) -> Iterator[None]:
        """While inside, only this rank's own weights are worked on."""
        self._is_idle = True
        try:
            yield
        finally:
            self._is_idle = False

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # A worker that was forked meanwhile works on samples.
        if self._is_idle or self._process != os.getpid() or not self._is_away((args, kwargs)):
            return func(*args, **kwargs)
        if is_own_code():
            return func(*args, **kwargs)
        if changes_first(func) and self._is_lost(args, kwargs):
            raise _refusal()
        result = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            # A weight itself, changed in place, gets no weak reference: it could not be moved.
            if isinstance(leaf, Tensor) and leaf.is_meta and id(leaf) not in self._weights:
                self._made[leaf] = True
        return result

    def _is_away(self, given: Any) -> bool:
        """Whether something is, or is made of, a weight that lies on another rank."""
        leaves = (leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor))
        return any(
            leaf.is_meta and (id(leaf) in self._weights or leaf in self._made) for leaf in leaves
        )

    def _is_lost(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether values that lie here would be changed by values that don't."""
        target, *others = args
        others += kwargs.values()
        if isinstance(target, Tensor):
            return not target.is_meta and self._is_away(others)
        each = (  # of several, one after the other
            (one, [o[place] if isinstance(o, (list, tuple)) else o for o in others])
            for place, one in enumerate(target)
        )
        return any(
            isinstance(one, Tensor) and self._is_lost((one, *rest), {}) for one, rest in each
        )


def _refusal() -> ConfigurationError:
    return ConfigurationError(
        f"a tensor is changed at {current_line()} by weights that lie on another rank: on this one "
        "they have no values, and torch would leave it as it is. Of a pair that is averaged both "
        "must lie on one rank, which networks do not that are built differently, or of which only "
        "one is pipelined. Give both the same structure (copy.deepcopy) and let the training step "
        "call both, or use lightning_tspipe.MomentumEMA or Lightning's EMAWeightAveraging"
    )
