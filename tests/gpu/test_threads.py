"""Ranks as threads on one device, by NCCL's rules and in float64, as `make gpu` runs them."""

from __future__ import annotations

import pytest

from tests.choosing import some_of
from tests.device import DEVICE, HOST
from tests.exactness import test_fanout_threads as fans
from tests.exactness import test_relay as relays
from tests.exactness.compare import assert_same
from tests.exactness.fanout_threads import Fan, train_on_threads
from tests.exactness.grid import sample
from tests.exactness.pipelined import run_pipelined
from tests.exactness.reference import run_reference
from tests.exactness.relay_threads import EACH_MODE, Split
from tests.exactness.setting import OPTIMIZERS, Setting
from tests.exactness.test_asynchronous import Case, assert_equal

# On CPUs the tests of exactness run such ones.
pytestmark = pytest.mark.exhaustive if DEVICE == HOST else pytest.mark.slow

# As long as a machine without lightly draws none of its optimizers.
GRID = [s for s in sample(9_000, 90) if s.num_ranks > 1 and s.optimizer in OPTIMIZERS][:44]


@pytest.mark.parametrize("setting", some_of(GRID, slow=GRID[::6]), ids=str)
def test_grid(setting: Setting) -> None:
    assert_same(run_reference(setting), run_pipelined(setting))


@pytest.mark.parametrize(
    "case",
    [
        Case("pipeoptim", 2, (5, 4), "adamw"), Case("pipedream", 3, (6,), has_teacher=True),
        Case("2bw", 3, (8,), "adam", accumulate=3), Case("spectrain", 3, (7, 3)),
        Case("pipedream", 3, (7,), stop=4), Case("pipeoptim", 3, (6, 5), "adam", stop=3),
    ],
    ids=str,
)  # fmt: skip
def test_asynchronous_and_resumed(case: Case) -> None:
    assert_equal(case)


@pytest.mark.parametrize("fan", [Fan(2, 3, 1), Fan(3, 4, 2), Fan(2, 2, 0, pieces=2)], ids=str)
def test_heads(fan: Fan) -> None:
    fans.check(fan, train_on_threads(fan))


# On a GPU all backwards of a process run on one thread, where ranks can't wait for each other.
@pytest.mark.parametrize("split", [s for s in EACH_MODE if DEVICE == HOST or max(s.widths) == 1],
                         ids=str)  # fmt: skip
def test_relay(split: Split) -> None:
    relays.check(split)
