"""Loaders as a pipeline needs them: one rank reads ahead, the others wait for word."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

_END = object()


class Remote:
    """The batch of a rank that reads no data; it stands where the batch would."""

    def __repr__(self) -> str:
        return "Remote()"


REMOTE = Remote()


class LookaheadLoader:
    """The data rank's loader: it holds the next batch while the current one is trained.

    Args:
        loader: The user's loader. Its attributes (sampler, dataset, ...) are visible here.
        announce: Called with whether another batch comes, before each; for loaders whose length
            the other ranks don't know.

    Attributes:
        serial: Number of the current batch, over all epochs.
        upcoming: The next batch, or None at the end.
    """

    def __init__(
        self, loader: Iterable[Any], announce: Callable[[bool], None] | None = None
    ) -> None:
        self._loader = loader
        self._announce = announce
        self._state: Any = None
        self.serial = -1
        self.upcoming: Any = None

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self._loader)
        following = next(iterator, _END)
        while following is not _END:
            current = following
            # A checkpoint of now must give back the batch that is only held, not trained yet.
            self._state = self._inner_state()
            following = next(iterator, _END)
            self.serial += 1
            self.upcoming = None if following is _END else following
            if self._announce is not None:
                self._announce(True)  # noqa: FBT003
            yield current
        self.upcoming = None
        if self._announce is not None:
            self._announce(False)  # noqa: FBT003

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
