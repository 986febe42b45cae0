"""Every way of training on tensors of a GPU that is not there: devices, reads and copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests import fake_cuda
from tests.choosing import some_of
from tests.exactness.fanout_threads import Fan, train_on_threads
from tests.exactness.grid import sample
from tests.exactness.pipelined import run_pipelined
from tests.exactness.relay_threads import EACH_MODE, Split, run_split
from tests.exactness.setting import Setting
from tests.exactness.test_asynchronous import Case
from tests.exactness.test_asynchronous import run_pipelined as run_asynchronous
from tests.strict import StrictNetwork
from tests.threads import run_on_threads

# Where the package asks whether memory is the same, which is no look at its values.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Of what runs within a test, nothing may be copied to the host."""
    found = fake_cuda.install(monkeypatch)
    yield found
    assert not found


# Some look at values themselves: a queue at its place, LARS at each norm.
DRAWN = [s for s in sample(5_000, 40) if s.optimizer != "lars" and not s.case.startswith("Moco")]
QUICK = 6


@pytest.mark.parametrize(
    "setting", some_of(DRAWN, slow=DRAWN[QUICK::6], always=DRAWN[:QUICK]), ids=str
)
def test_steps_and_schedules(setting: Setting) -> None:
    run_pipelined(setting)


@pytest.mark.parametrize("again", ["all", "some"])
def test_what_runs_again(again: str) -> None:
    run_pipelined(Setting("Byol-batch-2-by hand", "adamw", num_ranks=3, num_stages=3, again=again))


def test_a_predicted_teacher() -> None:
    run_pipelined(Setting("Byol-group-2-by hand", predict=True))


@pytest.mark.parametrize(
    "case",
    [
        Case("pipeoptim", 3, (5,), "adamw"), Case("pipeoptim", 2, (5,), "rmsprop"),
        Case("spectrain", 4, (7,)), Case("pipedream", 3, (5,), has_teacher=True),
        Case("2bw", 3, (8,), "adam", accumulate=3), Case("pipedream", 2, (5,), again=True),
    ],
    ids=str,
)  # fmt: skip
def test_asynchronous(case: Case) -> None:
    run_asynchronous(case)


@pytest.mark.parametrize(
    "fan", [Fan(2, 3, 1), Fan(3, 4, 2), Fan(2, 2, 0, pieces=2), Fan(2, 3, 1, stops=1)], ids=str
)
def test_heads(fan: Fan) -> None:
    train_on_threads(fan)


@pytest.mark.parametrize("split", EACH_MODE, ids=str)
def test_relay(split: Split) -> None:
    run_split(split)


def test_clipping_by_the_norm_over_all_ranks() -> None:
    network = StrictNetwork(3, timeout=30)

    def work(rank: int) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            square = torch.ones((), dtype=torch.float64, device=fake_cuda.CUDA)
            total = network.transport(rank).sum_over_ranks(square)
            gradients = [nn.Parameter(torch.ones(3, device=fake_cuda.CUDA))]
            gradients[0].grad = torch.ones_like(gradients[0])
            nn.utils.clip_grads_with_norm_(gradients, 1.0, total.sqrt())
            assert total.device == fake_cuda.CUDA

    run_on_threads(work, 3)


def test_reads_are_noticed(copies: Counter[str]) -> None:
    """A read raises, and so do mixed devices; copies that would be waited for are counted."""
    with FakeTensorMode(), fake_cuda.Copies(copies):
        there = torch.ones(3, device="cuda")
        for read in (there.sum().item, there.tolist, there.any().__bool__):
            with pytest.raises(Exception, match=r"_local_scalar_dense|nonzero"):
                read()
        with pytest.raises(RuntimeError, match="device"):
            there + torch.ones(3)
        there.cpu()
    assert len(copies) == 1
    copies.clear()
