"""Stopping on request: every rank after the same batch, without asking at every batch.

A signal may reach any rank, at any time. That rank leaves a note for the job; the rank that reads
the data looks for one about once a second, and the header of its next step tells all::

    rank 0      SIGTERM ── leaves a note
    data rank   ... step 8   looks: a note   step 9: header "end"
    all ranks                                step 9 is the last

With replicas of the pipeline, the first one's data rank names the step, one that no data rank can
have reached: they can't be further apart than one update of the weights. An evaluation has no
updates, and replicas may have other numbers of batches. There the data ranks meet once, when they
have seen a note or are at their last batch, and stop where they are::

    replica 0   batch 1 .. 7   looks: a note   meets .─────────. batch 8 is its last
    replica 1   batch 1 .. 5, the last of its batches │ waits   | this batch too
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_tspipe.runtime.faults.notes import Notes

END = "end"
"""Stop after this step."""
REQUEUE = "requeue"
"""Save after this step; the job will be started again."""

_WORDS = (REQUEUE, END)
_PERIOD = 1.0


@dataclass(eq=False)
class Stop:
    """What ranks were asked to do, and what all of them have agreed on.

    Attributes:
        on_agreed: Called on every rank in the step in which it is to happen.
        notes: What the ranks tell each other.
        run: Number of the run; the same on all ranks, and another one in each run.
        replica: Which pipeline this rank belongs to.
        num_replicas: How many there are.
        batches_per_update: How many batches an update of the weights takes; None: one.
        gather: What all replicas say, on each of them; None: there is one.
    """

    on_agreed: Callable[[str], None] | None = None
    notes: Notes = field(default_factory=Notes)
    run: int = 0
    replica: int = 0
    num_replicas: int = 1
    batches_per_update: Callable[[], int] | None = None
    gather: Callable[[Any], list[Any]] | None = None

    def __post_init__(self) -> None:
        self._prefix = f"stop-{self.run}/"
        self._asked: dict[str, str] = {}  # the rank that was asked
        self._agreed: set[str] = set()
        self._due: dict[str, int] = {}
        self._next_look = 0.0
        self._step = 0

    @property
    def has_ended(self) -> bool:
        """Whether all ranks agreed to stop."""
        return END in self._agreed

    @property
    def was_asked(self) -> bool:
        """Whether this rank itself was asked to stop."""
        return END in self._asked

    def ask(self, word: str, rank: str) -> None:
        """Ask for something, on the rank that was asked; may be called in a signal handler."""
        self._asked[word] = rank
        self.notes.leave(self._prefix + word, rank)

    def asked_rank(self, word: str) -> str:
        """The rank that was asked for something."""
        return self._asked.get(word) or self.notes.read(self._prefix + word) or ""

    def hear(self, word: str) -> None:
        """On every rank, the data rank too: what this step's header says."""
        if word and word not in self._agreed:
            self._agreed.add(word)
            if self.on_agreed is not None:
                self.on_agreed(word)

    # On data ranks: what to tell the others, "" for nothing

    def next_word(self) -> str:
        """Once per training step."""
        self._step += 1
        self._look()
        if self.num_replicas == 1:
            return self._pending()
        if self.replica == 0:
            word = self._pending()
            if word and word not in self._due:
                batches = self.batches_per_update() if self.batches_per_update is not None else 1
                self._due[word] = self._step + batches
                self.notes.leave(self._due_key(word), str(self._due[word]))
        else:
            for word in _WORDS:
                if word not in self._due and (text := self.notes.read(self._due_key(word))):
                    self._due[word] = int(text)
        due = (word for word, step in self._due.items() if step <= self._step)
        return next((word for word in due if word not in self._agreed), "")

    def next_word_in_evaluation(self, *, is_last: bool) -> str:
        """Once per batch of an evaluation that all replicas run; nothing if all are at its end.

        Args:
            is_last: Whether this is the last batch of this replica.

        Raises:
            TransportError: Another replica does not come to an end.
        """
        if self.has_ended:
            return ""
        self._look(at_once=is_last)
        if not (self.was_asked or is_last):
            return ""
        said = self.was_asked, is_last
        found = [said] if self.gather is None else self.gather(said)
        someone_was_asked = any(was_asked for was_asked, _ in found)
        all_are_done = all(is_last for _, is_last in found)
        # Otherwise replicas that go on would wait in vain for those that don't.
        return END if someone_was_asked and not all_are_done else ""

    def next_word_alone(self) -> str:
        """Once per batch of an evaluation that a callback runs; replicas may run others."""
        if self.num_replicas > 1 or self.has_ended:
            return ""
        self._look()
        return END if self.was_asked else ""

    def _look(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if at_once or now >= self._next_look:
            self._next_look = now + _PERIOD
            found = {word: self.notes.read(self._prefix + word) for word in _WORDS}
            self._asked.update({word: rank for word, rank in found.items() if rank is not None})

    def _pending(self) -> str:
        return next((w for w in _WORDS if w in self._asked.keys() - self._agreed), "")

    def _due_key(self, word: str) -> str:
        return f"{self._prefix}due/{word}"
