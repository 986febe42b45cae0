"""What other processes see, and what is left when one is killed."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tspipe.caching import ActivationCache, measure
from lightning_tspipe.errors import ConfigurationError
from tests.integration.jobs import preload
from tests.leftovers import none_left
from tests.unit.caching.networks import Layer, inputs, segments


def write_half(folder: Path, say: Any) -> None:
    """Keep 12 samples, then others, and stop before the last of them is whole."""
    cache = ActivationCache(24, memory=2**26, disk=2**26, folder=folder)
    cache.outputs(torch.arange(12), inputs()[:12], segments(Layer(5, 3, seed=0)))
    store = cache._put

    def slow(rows: Any, data: Any) -> None:
        store(rows[:-1], data[:-1])
        say.send(cache.handle)
        time.sleep(100)

    cache._put = slow  # type: ignore[method-assign]
    cache.outputs(torch.arange(24), inputs(), segments(Layer(5, 3, seed=0)))


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    preload()
    context = multiprocessing.get_context("forkserver")
    listen, say = context.Pipe(duplex=False)
    process = context.Process(target=write_half, args=(tmp_path, say), daemon=True)
    process.start()
    say.close()
    yield process, listen
    process.kill()
    process.join(10)
    process.close()
    listen.close()


@pytest.mark.distributed
def test_a_killed_writer_leaves_nothing_behind_and_no_half_entry(
    writer: Any, tmp_path: Path
) -> None:
    with none_left(tmp_path):
        process, listen = writer
        assert listen.poll(60)
        handle = listen.recv()
        cache = ActivationCache.attach(handle)
        process.kill()  # SIGKILL
        process.join(10)
    assert process.exitcode == -9
    assert list(tmp_path.iterdir()) == []
    # What it had committed is there as long as someone holds it; what it was writing is not.
    layer, data = Layer(5, 3, seed=0), inputs()
    found = cache.outputs(torch.arange(24), data, segments(layer))
    assert torch.equal(found, Layer(5, 3, seed=0)(data))
    assert (cache.counts.hits, cache.counts.misses) == (12, 12)
    cache.close()
    with pytest.raises(ConfigurationError, match="can't be shared"):
        ActivationCache.attach(handle)


def test_memory_and_disk_are_free_after_close(tmp_path: Path) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = open_files()
    cache = ActivationCache(24, memory=10**6, disk=10**6, folder=tmp_path)
    cache.outputs(torch.arange(24), inputs(), segments(Layer(5, 3, seed=0)))
    cache.close()
    cache.close()
    del cache
    assert open_files() == before
    assert list(tmp_path.iterdir()) == []


def test_reading_is_measured_against_computing() -> None:
    network = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)])
    worth = measure(network, torch.ones(16, 1024), disk=True)
    assert worth.by_memory
    assert worth.num_bytes == 4096
    assert 0 < worth.memory < worth.compute
    assert 0 < worth.disk < 1
    idle = measure(lambda x: x.expand(4, 10**6), torch.ones(4, 1))
    assert not idle.by_memory
