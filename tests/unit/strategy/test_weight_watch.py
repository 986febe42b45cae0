"""Modes that watch hooks, beside those that users enter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.strategy.training.gradient_watch import GradientWatch
from lightning_tspipe.strategy.training.weight_watch import WeightWatch


class Users(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [GradientWatch, WeightWatch])
def test_a_mode_that_one_hook_enters_and_another_leaves(kind: Any) -> None:
    """Before, it took the watch off, and stayed itself."""
    watch, mode = kind([torch.ones(2)]), Users()
    with torch.device("cpu"):
        mode.__enter__()  # type: ignore[no-untyped-call]
        watch.start()
        assert _get_current_function_mode_stack()[-1] is mode
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        assert _get_current_function_mode_stack()[-1] is watch
        mode.__enter__()  # type: ignore[no-untyped-call]
        watch.stop()
        assert _get_current_function_mode_stack()[-1] is mode
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    assert not _get_current_function_mode_stack()


def test_what_is_changed_by_weights_of_other_ranks() -> None:
    here, away = torch.ones(2), torch.ones(2, device="meta")
    watch = WeightWatch([here, away])
    watch.start()
    try:
        away.mul_(2).add_(here)  # another rank does this
        torch._foreach_add_([here, away], [torch.ones(2), away])
        for change in (
            lambda: here.add_(0.1 * away),
            lambda: here.detach().add_(other=away),
            lambda: torch._foreach_add_([away, here], [here, away.detach()]),
            lambda: here.__iadd__(away),
        ):
            with pytest.raises(ConfigurationError, match="lie on another rank"):
                change()
    finally:
        watch.stop()
    assert here.tolist() == [2, 2]
