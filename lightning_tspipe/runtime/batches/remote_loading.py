"""What stands for batches and loaders on the ranks that read no data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning_tspipe.errors import ConfigurationError


class Remote:
    """The batch of a rank that reads no data; it stands where the batch would."""

    def __repr__(self) -> str:
        return "Remote()"

    def __getitem__(self, key: Any) -> Any:
        raise ConfigurationError(
            f"batch[{key!r}]: one rank reads the data for all, and on this one hooks get no batch. "
            "Compute what they need in the step and return it: on rank 0 hooks get what the step "
            "returned"
        )


REMOTE = Remote()


class _NotRead:
    """In the place of a loader on a rank that does not read it; its dataset can be looked at.

    It resumes with the data rank; Lightning would warn of a loader that can't be resumed.

    Args:
        loader: The user's loader.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name in {"dataset", "batch_size"}:
            return getattr(self._loader, name)
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}: another rank reads the data"
        )

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


class UnsizedRemoteLoader(_NotRead):
    """The loader of the other ranks, for data of unknown length.

    Args:
        loader: The user's loader.
        hear: Waits for the data rank's word: the number of the iteration, and whether another
            batch comes.
    """

    def __init__(self, loader: Any, hear: Callable[[], tuple[int, bool]]) -> None:
        super().__init__(loader)
        self._hear = hear
        self._num_iterations = 0

    def __iter__(self) -> Iterator[Remote]:
        self._num_iterations += 1
        while self._is_there_more():
            yield REMOTE

    def _is_there_more(self) -> bool:
        while True:
            iteration, more = self._hear()
            if iteration == self._num_iterations:
                return more
            # Left over from an iteration that was ended early


class RemoteLoader(_NotRead):
    """The loader of the other ranks: as many batches as the data rank's.

    Args:
        loader: The user's loader.
        length: Batches.
    """

    def __init__(self, loader: Any, length: int) -> None:
        super().__init__(loader)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Remote]:
        for _ in range(self._length):
            yield REMOTE
