"""A part of the grid on real processes: gloo instead of queues, a random generator for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exactness.compare import assert_same
from tests.exactness.grid import sample
from tests.exactness.modules import RANDOM_CASE
from tests.exactness.pipelined import merge, train_on_gloo
from tests.exactness.reference import run_reference
from tests.exactness.setting import Setting
from tests.integration import jobs

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module", autouse=True)
def forks() -> None:
    jobs.preload()


def drawn(num_ranks: int, count: int) -> list[Setting]:
    return [s for s in sample(5_000, 300) if s.num_ranks == num_ranks][:count]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_processes_train_as_the_reference_does(num_ranks: int, tmp_path: Path) -> None:
    settings = drawn(num_ranks, 10)
    settings += [
        Setting(RANDOM_CASE, num_ranks=num_ranks, num_stages=num_ranks, num_microbatches=u)
        for u in (1, 2)
    ]
    ranks = jobs.run(train_on_gloo, settings, num_ranks=num_ranks, folder=tmp_path)
    for setting, *records in zip(settings, *ranks, strict=True):
        assert_same(run_reference(setting), merge(records))
