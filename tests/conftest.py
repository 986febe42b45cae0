from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

with suppress(ImportError):  # a machine with a GPU may have little more than torch and Lightning
    from hypothesis import settings

    # The same cases in every run: what a change breaks is not found by chance, and somewhere else.
    settings.register_profile("same", derandomize=True, deadline=None)
    settings.load_profile("same")


def pytest_configure() -> None:
    # One thread: sums have one order, and several processes of one test share few cores.
    torch.set_num_threads(1)
    # No test knows what another one, or a user of this machine, has measured.
    os.environ["LIGHTNING_TSPIPE_CACHE"] = "off"


_ONE_BY_ONE = "tests/unit"  # pages, say, of which each is another one


def _thin_out(items: list[pytest.Item]) -> None:
    """Of a test with several slow cases two of three are exhaustive, wherever ranks run.

    Not those that are ``slow(always=True)``.
    """
    slow: dict[str, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("slow")
        if mark and not mark.kwargs.get("always") and not item.nodeid.startswith(_ONE_BY_ONE):
            slow.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in slow.values():
        for number, item in enumerate(cases):
            if number % 3:
                item.add_marker(pytest.mark.exhaustive)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _thin_out(items)
    if "exhaustive" not in config.option.markexpr:
        left = [item for item in items if "exhaustive" in item.keywords]
        items[:] = [item for item in items if "exhaustive" not in item.keywords]
        config.hook.pytest_deselected(items=left)
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(no_gpu)


def pytest_collection_finish() -> None:
    # Thousands of tests and torch itself: what stays anyway, no collection need look through.
    gc.collect()
    gc.freeze()


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A function that returns a TCP port of this machine that nobody listens on."""

    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            return port

    return find
