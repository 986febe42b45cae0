"""A worker's side of the turn-taking: its loader hands out a batch only when it has a token.

```
coordinator   go 3          (quiet)        go 3
worker             b0 b1 b2 asks                b3 b4 b5 asks
stamps             0  1  2  3
```

A batch more than the tokens is never fetched, so between two turns every process of a method sleeps
in a wait, whatever the method's look-ahead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from torch import Tensor

from benchmarks.crews.messages import Asks, Bytes, Weighs

Batch = tuple[Tensor, ...]


@dataclass
class Gate:
    """Tokens in, time stamps out, over one pipe.

    Attributes:
        connection: To the coordinator, which sends a number of tokens, or 0 to ask for ``held``.
        held: What the process holds, as soon as it is known.
        notes: What else a method counts, in bytes.
    """

    connection: Connection
    held: Bytes | None = None
    notes: dict[str, int] = field(default_factory=dict)
    _tokens: int = 0
    _stamps: list[float] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def listen(self) -> None:
        """Serve the coordinator from a thread, so that ranks without a loader answer too."""
        threading.Thread(target=self._serve, daemon=True).start()

    def take(self) -> None:
        """Use up one token; wait for the next turn where there is none."""
        now = time.perf_counter()
        with self._changed:
            self._stamps.append(now)
            if self._tokens == 0:
                self.connection.send(Asks(tuple(self._stamps)))
                self._changed.wait_for(lambda: self._tokens > 0)
                self._stamps = [time.perf_counter()]
            self._tokens -= 1

    def _serve(self) -> None:
        while True:
            try:
                tokens: int = self.connection.recv()
            except (EOFError, OSError):  # the coordinator is gone, or this process is going
                return
            with self._changed:
                if tokens == 0:
                    self.connection.send(Weighs(self.held, dict(self.notes)))
                self._tokens += tokens
                self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class GatedLoader:
    """The given batches over and over, one per token."""

    gate: Gate
    batches: Sequence[Batch]

    def __len__(self) -> int:
        return 1_000_000  # longer than any run; an epoch's end would cost some methods a drain

    def __iter__(self) -> Iterator[Batch]:
        for index in range(len(self)):
            self.gate.take()
            yield self.batches[index % len(self.batches)]
