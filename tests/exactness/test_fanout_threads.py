"""Heads on a trunk, ranks as threads: any number of them equals each head alone."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from lightning_tspipe.replay.purity import is_compared
from lightning_tspipe.runtime.transport.channels import Channel
from tests.choosing import some_of
from tests.device import DEVICE, HOST
from tests.exactness.fanout import make_batches, train_alone
from tests.exactness.fanout_threads import Fan, Found, train_on_threads

CLOSE = {"rtol": 1e-9, "atol": 1e-12}
EVERY = [
    Fan(num_ranks, num_heads, depth=(0, 1, 2, 3, 6)[number % 5], first=number % 3)
    for number, (num_ranks, num_heads) in enumerate(product((1, 2, 3, 4), (1, 2, 3, 4, 5, 6)))
]
OTHERS = [
    Fan(2, 3, 2, pieces=3),
    Fan(3, 4, 3, pieces=2, num_stages=2),
    Fan(4, 2, 4, num_stages=1),
    Fan(4, 6, 2, sizes=(3,)),
    Fan(3, 3, 5, sizes=(4, 4, 2), first=2),
    Fan(3, 4, 3, stops=1),
    Fan(2, 2, 0, stops=0, pieces=2),
    Fan(2, 3, 2, inside=(3, 2)),
    Fan(3, 2, 3, num_stages=2, inside=(1, 4)),
]
QUICK = [EVERY[8], EVERY[17], EVERY[22], *OTHERS[:2], OTHERS[5], OTHERS[7]]


def check(fan: Fan, found: Found) -> None:
    batches = make_batches(fan.sizes)
    totals = [[0.0] * (2 * len(batches)) for _ in range(fan.num_ranks)]
    assert len(found.weights) == fan.num_heads
    for index in range(fan.num_heads):
        stops = index == fan.stops
        weights, losses = train_alone(index, 1 if stops else 2, batches)
        own = found.weights[f"task{index}"]
        # In pieces, or on a GPU: features to the last digits, a gradient that is only rounding.
        if fan.pieces > 1 or fan.inside[0] or DEVICE != HOST:
            for each in (own, weights):
                for name in ("0.bias", "1.running_mean") if index == 1 else ():
                    del each[name]
        torch.testing.assert_close(own, weights, **CLOSE)
        total = totals[fan.head_ranks[index]]
        for step, loss in enumerate(losses):
            total[step] += loss
    for rank, total in enumerate(totals):
        assert found.losses[rank] == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("fan", QUICK, ids=str)
def test_some_numbers_of_ranks_heads_and_batches_ahead(fan: Fan) -> None:
    check(fan, train_on_threads(fan))


REST = [fan for fan in EVERY + OTHERS if fan not in QUICK]


@pytest.mark.parametrize("fan", some_of(REST, slow=REST[::2]), ids=str)
def test_every_number_of_ranks_heads_and_batches_ahead(fan: Fan) -> None:
    check(fan, train_on_threads(fan))


@pytest.mark.parametrize("fan", [Fan(2, 4, 2), Fan(3, 6, 3), Fan(3, 2, 1, first=1)], ids=str)
def test_labels_travel_once_to_each_rank_with_heads(fan: Fan) -> None:
    found = train_on_threads(fan)
    data_rank, batches = fan.num_ranks - 1, make_batches(fan.sizes) * 2  # in two epochs
    labels = sum(labels.nbytes for _, labels in batches)
    # Of the first batches, ranks with heads make the trunk's inputs once more, and compare them.
    images = sum(x.nbytes for n, (x, _) in enumerate(batches) if is_compared(n, 0, seed=0))
    sent = {
        (source, target): num_bytes
        for (source, target, channel), num_bytes in found.sent.items()
        if channel == Channel.EARLY_FIELDS
    }
    others = set(fan.head_ranks) - {data_rank}
    assert sent == {(data_rank, rank): labels + images for rank in others}


@pytest.mark.parametrize(("depth", "slack"), [(2, 1), (4, 3)])
def test_a_rank_waits_for_those_that_read_what_it_makes(depth: int, slack: int) -> None:
    fan = Fan(2, 2, depth, sizes=(4,) * 12, lead=slack + 1)
    found = train_on_threads(fan, num_epochs=1)
    begun = {0: -1, 1: -1}
    furthest = 0
    for rank, step in found.began:
        begun[rank] = step
        furthest = max(furthest, begun[1] - begun[0])
    # It announces that it begins, and then waits.
    assert furthest == slack + 1
