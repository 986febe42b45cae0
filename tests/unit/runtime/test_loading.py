"""Epochs that are read before the one before has ended."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.batches.loading import LookaheadLoader

LENGTH = 3


class Drawn:
    """Random batches, as many in each epoch."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        yield from torch.randint(1000, (LENGTH,)).tolist()


def through(loader: LookaheadLoader, stop: int = 0) -> tuple[list[Any], dict[str, Any]]:
    """Three epochs as a run goes through them: batches with what is held behind each.

    Args:
        loader: The loader.
        stop: After so many batches its progress is taken.
    """
    seen: list[Any] = []
    progress: dict[str, Any] = {}
    for epoch in range(3):
        for place, batch in enumerate(loader):
            loader.take()
            seen.append([batch, *loader.upcoming])
            if len(seen) == stop:
                progress = loader.progress(ended=place + 1 == LENGTH)
                if epoch == 2:
                    break
    return seen, progress


def made(num_epochs: int = 3) -> LookaheadLoader:
    ends = iter([True] * (num_epochs - 1) + [False] * 9)
    return LookaheadLoader(Drawn(), depth=2, follows=lambda: next(ends))


def test_what_follows_is_held_across_the_end_of_an_epoch() -> None:
    torch.manual_seed(1)
    seen, _ = through(made())
    batches = [held[0] for held in seen]
    assert len(batches) == 3 * LENGTH
    assert seen == [batches[n : n + 3] for n in range(9)]


def test_the_epochs_are_those_that_would_have_come_anyway() -> None:
    torch.manual_seed(1)
    early, _ = through(made())
    torch.manual_seed(1)
    late, _ = through(LookaheadLoader(Drawn(), depth=2))
    assert [held[0] for held in early] == [held[0] for held in late]


def test_it_goes_on_from_before_and_from_behind_the_end_of_an_epoch() -> None:
    torch.manual_seed(1)
    whole, _ = through(made())
    for stop in range(1, 7):
        torch.manual_seed(1)
        _, progress = through(made(), stop)
        again = made(3 - stop // LENGTH)
        again.resume(progress)
        torch.manual_seed(5)  # the progress restores what counts
        found = []
        for _ in range(3 - stop // LENGTH):
            for batch in again:
                again.take()
                found.append([batch, *again.upcoming])
        assert found == whole[stop:], stop


def test_hooks_before_an_epoch_draw_what_they_would_have_drawn() -> None:
    torch.manual_seed(1)
    first = LookaheadLoader(Drawn())
    for _ in first:
        first.take()
    progress = first.progress(ended=True)
    expected = [float(torch.rand(())), *first]
    again = LookaheadLoader(Drawn())
    again.resume(progress)
    torch.manual_seed(5)
    again.restore_random()
    assert [float(torch.rand(())), *again] == expected


def with_hooks(loader: LookaheadLoader, num_epochs: int) -> Iterator[tuple[int, float]]:
    """Batches, and what a hook draws in each."""
    for _ in range(num_epochs):
        for batch in loader:
            loader.take()
            yield batch, float(torch.rand(()))


def test_hooks_may_draw_while_the_next_epoch_is_read() -> None:
    torch.manual_seed(1)
    first = made(2)
    whole = with_hooks(first, 2)
    for _ in range(LENGTH - 1):
        next(whole)
    progress = first.progress(ended=False)
    again = made(2)
    again.resume(progress)
    expected = list(whole)
    torch.manual_seed(5)
    assert list(with_hooks(again, 2)) == expected


def test_an_iteration_of_which_nothing_was_trained_begins_once_more() -> None:
    """Lightning fetches a batch of a loader without a length, and may then begin again."""
    torch.manual_seed(1)
    first = LookaheadLoader(Drawn())
    for _ in first:
        first.take()
    progress = first.progress(ended=True)
    expected = list(first)
    again = LookaheadLoader(Drawn())
    again.resume(progress)
    torch.manual_seed(5)
    next(iter(again))
    torch.rand(3)
    assert list(again) == expected


def wait_for_ever() -> None:
    time.sleep(60)


class Handing:
    """An iterator of torch's loader whose worker dies while it hands a batch over."""

    def __init__(self) -> None:
        self._workers = [multiprocessing.get_context("fork").Process(target=wait_for_ever)]
        self._workers[0].start()

    def __iter__(self) -> Handing:
        return self

    def __next__(self) -> object:
        self._workers[0].kill()
        raise ConnectionResetError(104, "Connection reset by peer")


def test_a_worker_that_is_killed_while_it_hands_a_batch_over_is_named() -> None:
    loader = LookaheadLoader(Handing())
    with pytest.raises(RuntimeError, match=r"worker \(pid \d+\) is killed by signal: Killed"):
        next(iter(loader))


@pytest.mark.parametrize("trains", [True, False])
def test_fewer_batches_than_other_ranks_were_promised(trains: bool) -> None:
    short = LookaheadLoader(Drawn(), trains=trains, promised=LENGTH + 1)
    with pytest.raises(ConfigurationError, match="after 3 batches, and its length said 4"):
        list(short)
    assert len(list(LookaheadLoader(Drawn(), trains=trains, promised=LENGTH))) == LENGTH
