"""Ranks that are threads of this process."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from lightning_tspipe.networks import recording


def run_on_threads(work: Callable[[int], Any], num_ranks: int, seconds: float = 60) -> list[Any]:
    """Run every rank on a thread.

    Args:
        work: What a rank does, given its number.
        num_ranks: Ranks.
        seconds: How long a rank may take.

    Returns:
        What each rank returned.

    Raises:
        BaseException: The first that a rank raised.
    """
    found: dict[int, Any] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    # Threads share Python's and NumPy's generators: what one draws, another one has not.
    nothing = mock.patch.object(recording, "other_random_state", tuple)
    with _no_collection(), nothing:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=seconds)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a rank did not end"
    return [found[rank] for rank in range(num_ranks)]


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection while ranks are threads.

    ``torch.get_rng_state`` makes its result under the generator's mutex. A collection that starts
    there may run ``__del__``, which lets another thread have the interpreter, which waits for that
    mutex: a deadlock that no signal ends. Processes have a generator each.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
