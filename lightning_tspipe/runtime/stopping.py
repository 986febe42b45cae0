"""Stopping on request: every rank after the same batch, without asking at every batch.

A signal may reach any rank, at any time. That rank leaves a note in the store that connects the
job; the rank that reads the data looks there about once a second, and the header of its next step
tells all::

    rank 0      SIGTERM ── note ──► store
    data rank   ... step 8   looks: a note   step 9: header "end"
    all ranks                                step 9 is the last

With replicas of the pipeline, the first one's data rank names the step, one that no data rank can
have reached: they can't be further apart than one update of the weights.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

END = "end"
"""Stop after this step."""
REQUEUE = "requeue"
"""Save after this step; the job will be started again."""

_WORDS = (REQUEUE, END)
_PERIOD = 1.0
_RUNS = itertools.count()


class Stop:
    """What ranks were asked to do, and what all of them have agreed on.

    Args:
        on_agreed: Called on every rank in the step in which it is to happen.
        store: Connects the ranks; None: there are no others.
        replica: Which pipeline this rank belongs to.
        num_replicas: How many there are.
        batches_per_update: How many batches an update of the weights takes; None: one.
    """

    def __init__(
        self,
        on_agreed: Callable[[str], None] | None = None,
        store: Any = None,
        replica: int = 0,
        num_replicas: int = 1,
        batches_per_update: Callable[[], int] | None = None,
    ) -> None:
        self._on_agreed = on_agreed
        self._store = store
        self._replica, self._num_replicas = replica, num_replicas
        self._batches_per_update = batches_per_update
        # Counted only where ranks are connected: one of them may use others for itself.
        self._prefix = f"lightning_tspipe/{next(_RUNS)}/" if store is not None else ""
        self._asked: set[str] = set()
        self._agreed: set[str] = set()
        self._due: dict[str, int] = {}
        self._next_look = 0.0
        self._step = 0

    @property
    def has_ended(self) -> bool:
        """Whether all ranks agreed to stop."""
        return END in self._agreed

    @property
    def is_connected(self) -> bool:
        """Whether a note of this rank reaches the others."""
        return self._store is not None

    def ask(self, word: str) -> None:
        """Ask for something, on any rank; may be called in a signal handler."""
        self._asked.add(word)
        if self._store is not None:
            with suppress(RuntimeError):  # gone with rank 0: all ranks end anyway
                self._store.set(self._prefix + word, "")

    def next_word(self, *, training: bool) -> str:
        """On a data rank, once per step: what to tell the others; "" for nothing.

        Args:
            training: Whether the step trains; replicas don't evaluate in step with each other.
        """
        self._step += training
        if self._num_replicas == 1:
            return self._asked_word()
        if not training:
            return ""
        if self._replica == 0:
            self._announce(self._asked_word())
        else:
            self._hear_announcements()
        due = (word for word, step in self._due.items() if step <= self._step)
        return next((word for word in due if word not in self._agreed), "")

    def _asked_word(self) -> str:
        now = time.monotonic()
        if now >= self._next_look and self._store is not None:
            self._next_look = now + _PERIOD
            self._asked.update(w for w in _WORDS if self._store.check([self._prefix + w]))
        return next((w for w in _WORDS if w in self._asked - self._agreed), "")

    def _announce(self, word: str) -> None:
        if word and word not in self._due:
            batches = self._batches_per_update() if self._batches_per_update is not None else 1
            self._due[word] = self._step + batches
            key = self._due_key(word)
            self._store.set(key, str(self._due[word]))
            self._store.get(key)  # so that it is there before this rank goes on

    def _hear_announcements(self) -> None:
        for word in _WORDS:
            if word not in self._due and self._store.check([self._due_key(word)]):
                self._due[word] = int(self._store.get(self._due_key(word)))

    def _due_key(self, word: str) -> str:
        return f"{self._prefix}due/{word}"

    def hear(self, word: str) -> None:
        """On every rank, the data rank too: what this step's header says."""
        if word and word not in self._agreed:
            self._agreed.add(word)
            if self._on_agreed is not None:
                self._on_agreed(word)
