from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_tspipe.planning.cluster import Link
from lightning_tspipe.planning.overlap import (
    BUCKET,
    Block,
    Collectives,
    Ready,
    gathered_by_block,
    reduced_in_buckets,
)

# A sum of a bucket over two devices takes a second; gathering as many bytes takes half of one.
LINKS = Collectives.over(Link(0.0, BUCKET), 2)


def backward(num_bytes: float) -> list[Ready]:
    """Four layers, each of a second."""
    return [Ready(float(end), num_bytes) for end in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("bandwidth", "seconds"),
    [
        # device |b3|b2|b1|b0|        each bucket is through when the next one is full
        # link   |  |s3|s2|s1|s0|
        (BUCKET, 5.0),
        # link   |  |s3   |s2   |s1   |s0   |      the link is what takes long
        (BUCKET / 2, 9.0),
        (BUCKET * 10, 4.1),
    ],
)
def test_buckets_are_summed_while_the_backward_goes_on(bandwidth: float, seconds: float) -> None:
    links = Collectives.over(Link(0.0, bandwidth), 2)
    assert reduced_in_buckets(4.0, backward(BUCKET), links) == pytest.approx(seconds)
    # Where the cores that compute also communicate, nothing is hidden.
    alone = replace(links, overlap=0.0)
    assert reduced_in_buckets(4.0, backward(BUCKET), alone) == 4.0 + 4 * BUCKET / bandwidth


def test_what_fills_no_bucket_is_sent_at_the_end() -> None:
    late = Collectives.over(Link(0.125, BUCKET), 2)
    assert reduced_in_buckets(4.0, backward(BUCKET / 100), late) == pytest.approx(4.04 + 0.25)
    # The first megabyte leaves as soon as it is there.
    assert reduced_in_buckets(4.0, backward(BUCKET / 25), LINKS) == pytest.approx(4.0 + 3 / 25)
    assert reduced_in_buckets(4.0, [Ready(1.0, BUCKET), Ready(4.0, 0)], LINKS) == 4.0


def test_one_device_sums_nothing() -> None:
    assert reduced_in_buckets(4.0, backward(BUCKET), replace(LINKS, num_devices=1)) == 4.0


def test_a_sum_over_many_devices_sends_twice_what_each_holds() -> None:
    for number, share, rounds in ((2, 1.0, 2), (4, 1.5, 4), (5, 1.6, 6)):
        links = Collectives.over(Link(0.5, 100.0), number)
        assert links.sum_seconds(100) == pytest.approx(share + 0.5 * rounds)
        assert links.gather_seconds(100) == pytest.approx(links.sum_seconds(100) / 2)
        assert links.scatter_seconds(0) == 0


GATHERED = 2.0 * BUCKET
"""Bytes that are gathered, or summed into parts, in a second."""


def test_blocks_are_gathered_while_the_one_before_computes() -> None:
    # link   |g0|g1|g2|
    # device |  |F0|F1|F2|
    forwards = [Block(1.0, GATHERED)] * 3
    assert gathered_by_block(forwards, LINKS) == 4.0
    assert gathered_by_block(forwards, replace(LINKS, overlap=0.0)) == 6.0
    assert gathered_by_block(forwards, replace(LINKS, overlap=0.5)) == 5.0


def test_gradients_are_divided_while_the_next_block_computes() -> None:
    # link   |g1|g0|s1|s0|
    # device |  |B1|B0|
    assert gathered_by_block([Block(1.0, GATHERED, GATHERED)] * 2, LINKS) == 4.0
    # link   |g2|g1|  |s2|g0|  |s1|  |s0|      a block is asked for before gradients are sent
    # device |  |B2   |B1   |B0   |
    backwards = [Block(2.0, GATHERED, GATHERED)] * 3
    assert gathered_by_block(backwards, LINKS) == 8.0


def test_what_has_no_parameters_waits_for_nothing() -> None:
    assert gathered_by_block([Block(1.0), Block(1.0, GATHERED), Block(1.0)], LINKS) == 3.0
