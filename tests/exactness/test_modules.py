"""Pipelined training equals the sequential reference, for every way of writing a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.choosing import some_of
from tests.exactness.compare import assert_learned, assert_same
from tests.exactness.modules import CASES, RANDOM_CASE, Trained
from tests.exactness.pipelined import run_pipelined
from tests.exactness.reference import run_reference
from tests.exactness.setting import Setting


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


@dataclass(frozen=True)
class ChannelsLast(Setting):
    """A training whose weights and batches have their channels innermost."""

    def build(self) -> Trained:
        return super().build().to(memory_format=torch.channels_last)

    def epochs(self, module: Trained) -> list[list[Any]]:
        return [
            [pytree.tree_map_only(Tensor, _channels_last, batch) for batch in epoch]
            for epoch in super().epochs(module)
        ]


@pytest.mark.parametrize("case", some_of(CASES, slow=[*CASES][1::4], always=[*CASES][::3]))
def test_a_pipelined_training_equals_the_reference(case: str) -> None:
    setting = Setting(case, "adamw", num_ranks=3, num_stages=3, num_microbatches=2)
    expected = run_reference(setting)
    assert_learned(expected, setting.build())
    assert_same(expected, run_pipelined(setting))


@pytest.mark.parametrize(
    "case", ["Byol-batch-2-by hand", "Moco-batch", "Tap-batch-True", RANDOM_CASE]
)
def test_one_device_and_one_micro_batch_is_bit_equal(case: str) -> None:
    setting = Setting(case, num_ranks=1, num_stages=1, num_microbatches=1)
    assert_same(run_reference(setting), run_pipelined(setting), exact=True)


def test_cuts_keep_the_memory_format(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = ChannelsLast("Byol-batch-1-by hand", num_ranks=4, num_stages=4, num_microbatches=2)
    expected = run_reference(setting)
    run_conv, seen = nn.Conv2d._conv_forward, []

    def noted(self: nn.Conv2d, x: Tensor, *rest: Any) -> Tensor:
        if type(x) is Tensor:  # and not a stand-in
            seen.append(x.is_contiguous(memory_format=torch.channels_last))
        return run_conv(self, x, *rest)

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", noted)
    assert_same(expected, run_pipelined(setting))
    assert len(seen) > 20
    assert all(seen)
