from __future__ import annotations

import gc
import math
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

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


def _starts_ranks(item: pytest.Item) -> bool:
    """Whether a test does what takes seconds: processes need a folder, threads are in one."""
    folder = item.nodeid.split("/")[1] if item.nodeid.startswith("tests/") else "unit"
    uses_folder = "tmp_path" in getattr(item, "fixturenames", ())
    return folder == "exactness" or (folder != "unit" and uses_folder)


def _thin_out(items: list[pytest.Item]) -> None:
    """Of a test that starts ranks, and has several cases, most run less often than it says.

    Of those that would run always, a third does, a third is slow, and the others are exhaustive; of
    those that are slow, a third goes on to be so; six at most. Not where a test is marked ``each``.
    """
    alike: dict[tuple[str, bool], list[pytest.Item]] = {}
    for item in items:
        if _starts_ranks(item) and not {"each", "exhaustive"} & set(item.keywords):
            key = item.nodeid.partition("[")[0], "slow" in item.keywords
            alike.setdefault(key, []).append(item)
    for (_, are_slow), cases in alike.items():
        # The first case is often that of one rank.
        tiers = ["slow"] if are_slow else ["slow", ""]
        tiers += ["exhaustive"] * (max(3, math.ceil(len(cases) / 6)) - len(tiers))
        for number, item in enumerate(cases):
            if len(cases) > 1 and (tier := tiers[number % len(tiers)]):
                item.add_marker(tier)


def _is_whole_suite(config: pytest.Config) -> bool:
    """Whether folders are run; of a file that somebody names, every case is of interest."""
    return all(Path(arg.partition("::")[0]).is_dir() for arg in config.args)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _is_whole_suite(config):
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
