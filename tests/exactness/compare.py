"""What "the same" means: 1e-9 relative, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.exactness.setting import Record

RELATIVE = 1e-9
# Below: rounding of sums that cancel, such as the gradient of a bias that has no effect.
ABSOLUTE = 1e-12


def assert_same(
    expected: Record, actual: Record, *, exact: bool = False, relative: float = RELATIVE
) -> None:
    """Losses, gradients, weights, buffers and optimizer state agree, and none is missing."""
    tolerances = (0.0, 0.0) if exact else (relative, ABSOLUTE)
    _compare(vars(expected), vars(actual), "", tolerances)


def _compare(expected: Any, actual: Any, where: str, tolerances: tuple[float, float]) -> None:
    if isinstance(expected, dict):
        missing, extra = expected.keys() - actual.keys(), actual.keys() - expected.keys()
        assert not missing, f"{where} lacks {sorted(missing)}"
        assert not extra, f"{where} has {sorted(extra)} too many"
        for key, value in expected.items():
            _compare(value, actual[key], f"{where}[{key}]", tolerances)
    elif isinstance(expected, list):
        assert len(expected) == len(actual), where
        for index, (ours, theirs) in enumerate(zip(expected, actual, strict=True)):
            _compare(ours, theirs, f"{where}[{index}]", tolerances)
    else:
        relative, absolute = tolerances
        torch.testing.assert_close(
            actual, expected, rtol=relative, atol=absolute, msg=lambda text: f"{where}: {text}"
        )


def assert_learned(record: Record, before: nn.Module) -> None:
    """All trained parameters changed, and the losses differ: a guard against empty comparisons."""
    assert len(set(map(float, record.losses))) == len(record.losses) >= 6
    trained = [name for name, p in before.named_parameters() if p.requires_grad]
    assert trained
    for name in trained:
        assert not torch.equal(record.weights[name], before.state_dict()[name]), name
