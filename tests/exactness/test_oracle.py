"""The gradients of ``torch.distributed.pipelining``'s GPipe are those of this pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.exactness.oracle import torch_gpipe
from tests.exactness.pipelined import run_pipelined
from tests.exactness.setting import Setting
from tests.integration import jobs


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["Classifier-batch", "Classifier-group"])
def test_gradients_equal_those_of_torch(case: str, tmp_path: Path) -> None:
    jobs.preload()
    # Torch averages over micro-batches of equal size, so the batch divides.
    setting = Setting(case, sizes=((8,),), num_microbatches=4, schedule="gpipe", split=True)
    (_, first), (loss, last) = jobs.run(torch_gpipe, setting, (0, 5, 11), folder=tmp_path)
    ours = run_pipelined(setting)
    assert loss == pytest.approx(float(ours.losses[0]), rel=1e-9)
    assert first.keys().isdisjoint(last)
    torch.testing.assert_close({**first, **last}, ours.gradients[0], rtol=1e-9, atol=1e-12)
