"""BatchNorm that normalises over micro-batches says so, once."""

from __future__ import annotations

import logging

import pytest
import torch

from lightning_tspipe.capture.trace import Networks, Tracer
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.stages.network import networks_of
from lightning_tspipe.strategy.training.placing import _tell_of_batchnorm
from tests.exactness.modules import CASES


@pytest.mark.parametrize(("norm", "number", "is_told"), [
    ("batch", 2, True), ("batch", 1, False), ("group", 2, False),
])  # fmt: skip
def test_how_many_samples(
    norm: str, number: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    module, device = CASES[f"SimSiam-{norm}"].build(), torch.device("cpu")
    names = Networks(module.student_names)
    tracer = Tracer(module, names, device)
    plan = tracer.trace(lambda batch: module.training_step(batch, 0), module.batch(6, 0), 0)
    with caplog.at_level(logging.WARNING, logger="lightning_tspipe"):
        _tell_of_batchnorm(Captured(plan, networks_of(module, plan, device)), number)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == is_told
    for text in told:
        assert "over the 3 samples of a micro-batch, of 6 in a batch" in text
        assert "TSPipeStrategy(num_microbatches=1)" in text
