from __future__ import annotations

import os
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_tspipe.caching import ActivationCache, Boundary, Segment, fingerprint
from lightning_tspipe.caching.cache import Counts
from lightning_tspipe.caching.keys import digests
from lightning_tspipe.errors import ConfigurationError
from tests.unit.caching.networks import Layer, inputs, segments

NUM = 24


def epoch(
    cache: ActivationCache, data: Tensor, parts: list[Segment], seed: int, batch_size: int = 7
) -> dict[int, Tensor]:
    """Each sample's output in a shuffled epoch."""
    order = torch.randperm(NUM, generator=torch.Generator().manual_seed(seed))
    found = {}
    for ids in order.split(batch_size):
        for sample, output in zip(ids.tolist(), cache.outputs(ids, data[ids], parts), strict=True):
            assert sample not in found
            found[sample] = output
    return found


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_second_epoch_reads_the_same_bits_and_computes_nothing(where: str) -> None:
    layer, data = Layer(5, 3, seed=0), inputs()
    expected = Layer(5, 3, seed=0)(data)
    cache = ActivationCache(NUM, **{where: 10**6})  # type: ignore[arg-type]
    for number in range(3):
        cache.can_skip(range(NUM))  # what is on disk is prefetched
        found = epoch(cache, data, segments(layer), seed=number)
        assert all(torch.equal(found[sample], expected[sample]) for sample in range(NUM))
    assert layer.num_rows == NUM
    assert (cache.counts.misses, cache.counts.hits) == (NUM, 2 * NUM)
    assert cache.counts.hit_rate == pytest.approx(2 / 3)
    cache.close()


def test_a_hit_does_not_read_the_inputs() -> None:
    layer, data = Layer(5, 3, seed=0), inputs()
    cache = ActivationCache(NUM, memory=10**6)
    before = epoch(cache, data, segments(layer), seed=0)
    after = epoch(cache, torch.full_like(data, torch.nan), segments(layer), seed=1)
    assert all(torch.equal(before[sample], after[sample]) for sample in range(NUM))


def test_inputs_that_were_not_loaded_are_not_computed_with() -> None:
    cache, layers = ActivationCache(NUM, memory=10**6), segments(Layer(5, 3, seed=0))
    cache.let_skip(layers)
    with pytest.raises(ConfigurationError, match="were not loaded"):
        cache.outputs([0, 1], torch.full((2, 5), torch.nan), layers)


def test_entries_are_pushed_through_newly_frozen_layers_only() -> None:
    first, second, third = Layer(5, 4, seed=0), Layer(4, 6, seed=1), Layer(6, 2, seed=2)
    data = inputs()
    expected = Layer(6, 2, seed=2)(Layer(4, 6, seed=1)(Layer(5, 4, seed=0)(data)))
    cache = ActivationCache(NUM, memory=10**6)
    epoch(cache, data, segments(first), seed=0)
    for seed in (1, 2):
        found = epoch(cache, data, segments(first, second, third), seed=seed)
        assert all(torch.equal(found[sample], expected[sample]) for sample in range(NUM))
    assert [layer.num_rows for layer in (first, second, third)] == [NUM, NUM, NUM]
    assert (cache.counts.misses, cache.counts.pushed, cache.counts.hits) == (NUM, NUM, NUM)


def test_what_is_rounded_is_so_whether_it_is_read_or_computed_or_pushed() -> None:
    """In float32, of float64."""
    first, second, data = Layer(5, 4, seed=0), Layer(4, 6, seed=1), inputs()
    parts = [
        replace(part, boundary=replace(part.boundary, dtype=torch.float32))
        for part in segments(first, second)
    ]
    expected = data
    for layer in (Layer(5, 4, seed=0), Layer(4, 6, seed=1)):
        expected = layer(expected).to(torch.float32).to(data.dtype)
    cache, small = ActivationCache(NUM, memory=10**6), ActivationCache(NUM, memory=100)
    epoch(cache, data, parts[:1], seed=0)
    for seed in (1, 2):
        for found in (epoch(each, data, parts, seed=seed) for each in (cache, small)):
            assert all(torch.equal(found[sample], expected[sample]) for sample in range(NUM))
    assert (cache.counts.misses, cache.counts.pushed, cache.counts.hits) == (NUM, NUM, NUM)
    assert small.counts.misses > NUM


def test_batches_of_hits_pushed_ones_and_misses_keep_their_order() -> None:
    first, second, data = Layer(5, 4, seed=0), Layer(4, 4, seed=1), inputs()
    expected = Layer(4, 4, seed=1)(Layer(5, 4, seed=0)(data))
    cache = ActivationCache(NUM, memory=10**6)
    cache.outputs(torch.arange(8), data[:8], segments(first))
    cache.outputs(torch.arange(4), data[:4], segments(first, second))
    ids = torch.tensor([9, 2, 6, 20, 0, 7])
    assert torch.equal(cache.outputs(ids, data[ids], segments(first, second)), expected[ids])
    assert (cache.counts.hits, cache.counts.pushed, cache.counts.misses) == (2, 4 + 2, 8 + 2)


def test_without_space_samples_are_computed_each_time() -> None:
    layer, data = Layer(5, 8, seed=0), inputs()
    expected = Layer(5, 8, seed=0)(data)
    cache = ActivationCache(NUM, memory=64 * 10)  # an entry has 64 bytes
    for seed in range(2):
        found = epoch(cache, data, segments(layer), seed)
        assert all(torch.equal(found[sample], expected[sample]) for sample in range(NUM))
    assert cache.counts.hits == 10
    assert cache.counts.refused == 2 * (NUM - 10)


def test_the_disk_takes_what_memory_does_not() -> None:
    layer, data = Layer(5, 8, seed=0), inputs()
    cache = ActivationCache(NUM, memory=64 * 10, disk=64 * 100)
    for seed in range(2):
        epoch(cache, data, segments(layer), seed)
    assert cache.counts.hits == NUM
    assert cache.num_bytes == (64 * 10, 64 * (NUM - 10))


def test_a_full_disk_costs_entries_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, data = Layer(5, 3, seed=0), inputs()
    cache = ActivationCache(NUM, disk=10**6)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    cache.outputs(torch.arange(4), data[:4], segments(layer))
    for arena in cache._arenas:
        if arena is not None:
            arena._claimed = cache.num_bytes[1]
    monkeypatch.setattr(os, "posix_fallocate", full)
    cache.outputs(torch.arange(8), data[:8], segments(layer))
    assert (cache.counts.hits, cache.counts.refused) == (4, 4)
    monkeypatch.undo()
    found = epoch(cache, data, segments(layer), seed=0)
    assert all(torch.equal(found[n], Layer(5, 3, seed=0)(data)[n]) for n in range(NUM))


def test_activations_can_be_kept_in_bfloat16() -> None:
    layer, data = Layer(5, 16, seed=0), inputs()
    cache = ActivationCache(NUM, memory=10**6)
    full = cache.outputs(range(NUM), data, segments(layer, dtype=torch.bfloat16))  # type: ignore[arg-type]
    kept = cache.outputs(range(NUM), data, segments(layer, dtype=torch.bfloat16))  # type: ignore[arg-type]
    assert kept.dtype == torch.float64
    assert torch.equal(kept, full.to(torch.bfloat16).double())
    assert cache.num_bytes[0] == NUM * 64  # 16 numbers of 2 bytes, in whole cache lines


def test_structures_of_tensors_come_back_as_they_were() -> None:
    def layers(data: Tensor) -> dict[str, object]:
        return {"hidden": data * 2, "mask": data[:, :1] > 0, "count": (data[:, 0].long(), 3)}

    data = inputs()
    parts = [Segment(Boundary("layers"), layers)]
    cache = ActivationCache(NUM, memory=10**6)
    made, kept = (cache.outputs(range(NUM), data, parts) for _ in range(2))  # type: ignore[arg-type]
    assert torch.equal(made["hidden"], kept["hidden"])
    assert torch.equal(made["mask"], kept["mask"])
    assert torch.equal(made["count"][0], kept["count"][0])
    assert kept["count"][1] == 3
    assert cache.counts.hits == NUM


def test_other_weights_are_another_boundary() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3)).double().eval()
    cache, data = ActivationCache(NUM, memory=10**6), inputs()

    def now() -> list[Segment]:
        return [Segment(Boundary("network", fingerprint(network)), network)]

    old = cache.outputs(range(NUM), data, now())  # type: ignore[arg-type]
    network[1].running_mean.add_(1)
    new = cache.outputs(range(NUM), data, now())  # type: ignore[arg-type]
    assert not torch.equal(old, new)
    assert cache.counts.misses == 2 * NUM
    assert torch.equal(new, network(data))


def test_an_entry_that_changes_while_it_is_read_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, data, ids = Layer(5, 3, seed=0), inputs(), torch.arange(24)
    cache = ActivationCache(24, memory=10**6)
    cache.outputs(ids, data, segments(layer))
    cache.counts = Counts()
    rows = cache.find(digests(ids.tolist()))

    def another_process(*_: object) -> None:
        cache.commit(rows[:1], token=12345)

    monkeypatch.setattr(cache, "prefetch_rows", another_process)
    assert torch.equal(cache.outputs(ids, data, segments(layer)), Layer(5, 3, seed=0)(data))
    assert (cache.counts.hits, cache.counts.misses) == (0, 24)
    cache.close()


def test_an_entry_that_was_not_finished_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, data = Layer(5, 3, seed=0), inputs()
    cache = ActivationCache(NUM, memory=10**6)

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "_put", broken)
    with pytest.raises(KeyboardInterrupt):
        cache.outputs(torch.arange(4), data[:4], segments(layer))
    monkeypatch.undo()
    assert torch.equal(
        cache.outputs(torch.arange(8), data[:8], segments(layer)), Layer(5, 3, seed=0)(data[:8])
    )
    assert cache.counts.hits == 0


def test_another_object_shares_what_is_kept() -> None:
    layer, data = Layer(5, 3, seed=0), inputs()
    cache = ActivationCache(NUM, memory=640, disk=10**6)
    other = pickle.loads(pickle.dumps(cache))  # noqa: S301 - our own
    cache.outputs(torch.arange(12), data[:12], segments(layer))
    other.outputs(torch.arange(NUM), data, segments(layer))
    assert (other.counts.hits, other.counts.misses) == (12, 12)
    cache.outputs(torch.arange(NUM), data, segments(layer))
    assert cache.counts.hits == NUM


def test_numbers_and_strings_are_ids() -> None:
    layer, data = Layer(5, 3, seed=0), inputs(4)
    cache = ActivationCache(8, memory=10**6)
    cache.outputs(["1", "2", "a.jpg", "ä.jpg"], data, segments(layer))
    assert cache.outputs([1, 2], data[:2], segments(layer)).shape == (2, 3)
    cache.outputs(["2", "ä.jpg"], data[[1, 3]], segments(layer))
    assert (cache.counts.hits, cache.counts.misses) == (2, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, d, s: c.outputs([3, 4, 3], d[:3], s), "duplicate sample id 3"),
        (lambda c, d, s: c.outputs([1.5, 2.5], d[:2], s), "whole numbers or strings"),
        (lambda c, d, s: c.outputs(range(300, 500), d[:1].expand(200, 5), s), "more sample ids"),
        (lambda c, d, s: ActivationCache(0, memory=100), "at least one sample"),
        (lambda c, d, s: ActivationCache(4), "budget above 0"),
        (lambda c, d, s: ActivationCache(4, memory=2**60), "the machine has"),
        (lambda c, d, s: ActivationCache(4, disk=2**60), "left: lower it"),
        (lambda c, d, s: ActivationCache(4, disk=9, folder="/no/such"), "No such file"),
    ],
)
def test_errors_name_the_remedy(change: object, message: str) -> None:
    cache, data = ActivationCache(NUM, memory=10**6), inputs()
    parts = segments(Layer(5, 3, seed=0))
    cache.outputs([0, 1], data[:2], parts)
    with pytest.raises(ConfigurationError, match=message):
        change(cache, data, parts)  # type: ignore[operator]
    cache.outputs([0, 1], data[:2], parts)
    assert cache.counts.hits == 2  # as it was


def test_shapes_that_differ_between_batches_are_refused() -> None:
    cache = ActivationCache(NUM, memory=10**6)
    parts = [Segment(Boundary("text"), lambda tokens: tokens * 2)]
    cache.outputs([0, 1], torch.ones(2, 5), parts)
    with pytest.raises(ConfigurationError, match="Pad all inputs to one length"):
        cache.outputs([2, 3], torch.ones(2, 6), parts)


def test_outputs_that_are_not_per_sample_are_refused() -> None:
    cache = ActivationCache(NUM, memory=10**6)
    with pytest.raises(ConfigurationError, match="first dimension"):
        cache.outputs([0, 1], torch.ones(2, 5), [Segment(Boundary("mean"), torch.mean)])
