"""What a type checker knows of the strategy: mypy reads this, and refuses ignores without error."""

from __future__ import annotations

from typing import assert_type

import lightning.pytorch
import pytorch_lightning

from lightning_tspipe import TSPipeStrategy
from lightning_tspipe.strategy.training.pipelined import Pipelined


def as_both_trainers_take_it() -> None:
    strategy = TSPipeStrategy(num_stages=2, schedule="1f1b", precision_plugin=None)
    assert_type(strategy, TSPipeStrategy)
    assert_type(strategy.pipelined, Pipelined)
    lightning.pytorch.Trainer(strategy=strategy)
    pytorch_lightning.Trainer(strategy=strategy)


def as_no_strategy_takes_it() -> None:
    TSPipeStrategy(num_stages=2, typo=1)  # type: ignore[call-arg] # nothing has this name
    TSPipeStrategy(num_stages="two")  # type: ignore[arg-type]
    TSPipeStrategy(schedule="tspip")  # type: ignore[arg-type]
