"""Loaders as a pipeline needs them: one rank reads ahead, the others wait for word."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning_tspipe.errors import ConfigurationError

_END = object()


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


class LookaheadLoader:
    """The data rank's loader: it holds the next batch while the current one is trained.

    Args:
        loader: The user's loader. Its attributes (sampler, dataset, ...) are visible here.
        announce: Called with whether another batch comes, before each; for loaders whose length
            the other ranks don't know.
        on_read: Called after each batch with the time at which its reading began.

    Attributes:
        current: Number of the batch in training, over all epochs.
        agree: If set: asked after each reading whether there was a batch; says whether to go on.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        announce: Callable[[bool], None] | None = None,
        on_read: Callable[[float], None] | None = None,
    ) -> None:
        self._loader = loader
        self._announce = announce
        self._on_read = on_read
        self._state: Any = None
        self._read: dict[int, Any] = {}
        self._num_read = 0
        self.current = -1
        self.agree: Callable[[bool], bool] | None = None

    @property
    def upcoming(self) -> Any:
        """The batch after the current one, or None at the end."""
        return self._read.get(self.current + 1)

    def take(self) -> None:
        """The next batch becomes the current one.

        Not known from iteration: of a loader without a length, Lightning itself holds one more.
        """
        self.current += 1
        self._read.pop(self.current, None)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self._loader)
        self._read = {}
        self.current = self._num_read - 1
        following = self._read_from(iterator)
        while following is not _END:
            current = following
            # A checkpoint of now must give back the batch that is only held, not trained yet.
            self._state = self._inner_state()
            following = self._read_from(iterator)
            if self._announce is not None:
                self._announce(True)
            yield current
        if self._announce is not None:
            self._announce(False)

    def _read_from(self, iterator: Iterator[Any]) -> Any:
        started = time.perf_counter()
        batch = next(iterator, _END)
        if self.agree is not None and not self.agree(batch is not _END):
            batch = _END
        if self._on_read is not None:
            self._on_read(started)
        if batch is not _END:
            self._read[self._num_read] = batch
            self._num_read += 1
        return batch

    def _inner_state(self) -> Any:
        state_dict = getattr(self._loader, "state_dict", None)
        return state_dict() if callable(state_dict) else None

    def state_dict(self) -> dict[str, Any]:
        """The state of the loader as it was before it read ahead."""
        return self._state if self._state is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand a state to the user's loader, if it takes one."""
        load = getattr(self._loader, "load_state_dict", None)
        if callable(load) and state:
            load(state)


class UnsizedRemoteLoader:
    """The loader of the other ranks, for data of unknown length.

    Args:
        hear: Waits for the data rank's word whether another batch comes.
    """

    def __init__(self, hear: Callable[[], bool]) -> None:
        self._hear = hear

    def __iter__(self) -> Iterator[Remote]:
        while self._hear():
            yield REMOTE


class RemoteLoader:
    """The loader of the other ranks: as many batches as the data rank's."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Remote]:
        for _ in range(self._length):
            yield REMOTE
