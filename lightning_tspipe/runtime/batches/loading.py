"""Loaders as a pipeline needs them: one rank reads ahead, the others wait for word.

A checkpoint is taken while batches after the current one are held already. To resume, a loader of
the user's that has a state (``state_dict``) is set back to before that batch. Any other loader
begins its epoch again from the random state that it began with, and what was trained is skipped::

    epoch  |0 1 2 ... n| n+1  n+2        checkpoint after batch n
           ^ start      ^ random states before each batch that was held
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.random_states import RandomStates
from lightning_tspipe.runtime.faults.loader_workers import iterate, refuse_killed_worker

_END = object()


class _Moment(NamedTuple):
    """Random states: of the process, and of the loader's own generators."""

    random: RandomStates
    own: list[Tensor]


class _Epoch(NamedTuple):
    """How an epoch began: the number of its first batch, and the random states."""

    first: int = 0
    start: _Moment | None = None


class _Early(NamedTuple):
    """An epoch that is read although the one before is still trained.

    Attributes:
        batches: The rest of it.
        held: What was read of it.
        before: How the one before began.
        now: The random states where it ended.
    """

    batches: Iterator[Any]
    held: deque[Any]
    before: _Epoch
    now: _Moment


class _Held(NamedTuple):
    """A batch that was read, and how things were before: random states, and the loader's own."""

    batch: Any
    random: RandomStates
    loader: Any


def isolated(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of a loader; reading them leaves the random states alone.

    A validation that is left out when a run goes on (Lightning's way with a checkpoint that was
    saved just before it) then makes no difference to the training.
    """
    own, iterator = RandomStates.now(), None
    while True:
        outside = RandomStates.now()
        own.restore()
        try:
            iterator = iterate(loader) if iterator is None else iterator
            batch = next(iterator, _END)
        finally:
            own = RandomStates.now()
            outside.restore()
        if batch is _END:
            return
        yield batch


@dataclass(eq=False)
class LookaheadLoader:
    """The data rank's loader: it holds the next batches while the current one is trained.

    Attributes:
        loader: The user's loader. Its attributes (sampler, dataset, ...) are visible here.
        announce: Called with the number of the iteration and whether there is another batch, as
            soon as that is known; for loaders whose length the other ranks don't know.
        on_read: Called after each batch with the time at which its reading began.
        trains: Whether the batches are trained; else reading leaves the random states alone.
        num_batches: Of an epoch, at most; nothing behind them is read. A sampler that is asked for
            more draws from its generator, and the next epoch would have another order.
        promised: Batches of an epoch of which other ranks know, who would wait for the last ones.
        trained: Of the first epoch's, those that it need not give any more: of a run that resumes.
        depth: How many batches are held behind the current one; may be set between two epochs.
        follows: Asked once where an epoch ends: whether the next one may be read already. It
            makes samplers ready for that. An epoch has to be at least as long as the depth.
        agree: If set: asked after each reading whether there was a batch; says whether to go on.
        may_repeat: Whether to remember how things were before the current batch, for a run that
            fails in it, is saved nevertheless, and goes on with this batch.
        current: Number of the batch in training, over all epochs.
    """

    loader: Iterable[Any]
    announce: Callable[[int, bool], None] | None = None
    on_read: Callable[[float], None] | None = None
    trains: bool = True
    num_batches: float = math.inf
    promised: float = 0
    trained: int = 0
    depth: int = 1
    follows: Callable[[], bool] = lambda: False
    agree: Callable[[bool], bool] = lambda is_there: is_there
    may_repeat: bool = False
    current: int = -1
    _early: _Early | None = None
    _has_asked: bool = False
    _num_iterations: int = 0
    _held: dict[int, _Held] = field(default_factory=dict)
    _num_read: int = 0
    _epoch: _Epoch = field(default_factory=_Epoch)
    _resume: dict[str, Any] | None = None
    _resumed: dict[str, Any] | None = None
    _is_restored: bool = False
    _taken: tuple[_Held, RandomStates] | None = None

    @property
    def upcoming(self) -> list[Any]:
        """The batches after the current one that are held, none at the end."""
        return [self._held[n].batch for n in sorted(self._held) if n > self.current]

    def take(self) -> None:
        """The next batch becomes the current one.

        Not known from iteration: of a loader without a length, Lightning itself holds one more.
        """
        self.current += 1
        self._resumed, self._is_restored = None, False
        held = self._held.pop(self.current, None)
        self._taken = (held, RandomStates.now()) if self.may_repeat and held else None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        self._num_iterations += 1
        early, self._early = self._early, None
        self._has_asked = False
        if early is not None and self.current + 1 == self._epoch.first:
            batches, held = early.batches, early.held
        else:
            self._held = {}
            self.current = self._num_read - 1
            if self._resumed is not None:
                # Lightning has fetched one, of a loader without a length, and begins once more.
                self.resume(self._resumed)
            batches = self._announced(self._batches())
            held = deque(islice(batches, 1))
        while held:
            held.extend(islice(batches, self.depth + 1 - len(held)))
            self._read_early(self.depth + 1 - len(held))
            yield held.popleft()

    def _read_early(self, number: int) -> None:
        """Hold as many batches of the next epoch, if it may be read already."""
        if number <= 0:
            return
        if self._early is None:
            now, before = self._now(), self._epoch
            # Others have heard the answer: it must not change.
            if self._has_asked or not self.follows():
                self._has_asked = True
                return
            self._early = _Early(self._batches(), deque(), before, now)
        missing = number - len(self._early.held)
        self._early.held.extend(islice(self._early.batches, max(0, missing)))

    def _announced(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; the other ranks are told of each."""
        say = self.announce or (lambda *_: None)
        for batch in batches:
            say(self._num_iterations, True)
            yield batch
        say(self._num_iterations, False)

    def _batches(self) -> Iterator[Any]:
        self._resumed = self._resume
        # Between two epochs, hooks have drawn since.
        drawn = RandomStates.now() if self._is_restored else None
        self._is_restored = False
        if self._resume is not None:
            self._restore(self._resume)
        if drawn is not None:
            drawn.restore()
        resume, self._resume = self._resume, None
        now = RandomStates.now()
        if resume is not None:
            self._set_own(resume["own"]["start"])
            RandomStates.read(resume["start"]).restore()
        self._epoch = _Epoch(self._num_read, self._now())
        iterator = iterate(self.loader) if self.trains else isolated(self.loader)
        if resume is not None:
            yield from self._held_before(resume, iterator)
            now.restore()
        yield from iter(lambda: self._read_from(iterator), _END)
        if resume is not None:
            self._resume = resume.get("early")

    def _held_before(self, resume: dict[str, Any], iterator: Iterator[Any]) -> Iterator[Any]:
        """Behind the batches that were trained, those that were held when the state was taken."""
        self._epoch = self._epoch._replace(first=self._num_read - resume["num_batches"])
        if not self.has_state:
            for _ in range(resume["num_batches"]):
                next(iterator, None)
        for state in resume["held"]:
            RandomStates.read(state).restore()
            batch = self._read_from(iterator)
            if batch is not _END:
                yield batch

    def _read_from(self, iterator: Iterator[Any]) -> Any:
        if self._num_read - self._epoch.first >= self.num_batches:
            return _END
        started = time.perf_counter()
        random, state = RandomStates.now(), self._loader_state()
        try:
            batch = next(iterator, _END)
        except (ConnectionError, EOFError) as error:
            refuse_killed_worker(iterator, error)
            raise
        if not self.agree(batch is not _END):
            batch = _END
        number, due = self._num_read - self._epoch.first, min(self.promised, self.num_batches)
        if batch is _END and number < due - self.trained * (self._num_iterations <= 1):
            raise ConfigurationError(
                f"the loader has ended after {number} batches, and its length said "
                f"{self.promised:g}: other ranks wait for those. Let __len__ of the loader (its "
                "sampler, its batch sampler) be the number of batches of each epoch, or give it "
                "none: then each epoch may have its own"
            )
        if self.on_read is not None:
            self.on_read(started)
        if batch is not _END:
            self._held[self._num_read] = _Held(batch, random, state)
            self._num_read += 1
        return batch

    def _generators(self) -> list[torch.Generator]:
        """The generators that belong to the user's loader and its samplers."""
        sampler = getattr(getattr(self.loader, "batch_sampler", None), "sampler", None)
        owners = (self.loader, getattr(self.loader, "sampler", None), sampler)
        found = {id(g): g for g in (getattr(owner, "generator", None) for owner in owners)}
        return [g for g in found.values() if isinstance(g, torch.Generator)]

    def _now(self) -> _Moment:
        return _Moment(RandomStates.now(), [each.get_state() for each in self._generators()])

    def _set_own(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=False):
            generator.set_state(state)

    @property
    def has_state(self) -> bool:
        """Whether the user's loader has a state of its own."""
        return callable(getattr(self.loader, "state_dict", None))

    def _loader_state(self) -> Any:
        return self.loader.state_dict() if self.has_state else None  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """The state of the user's loader as it was before it read ahead; empty without one."""
        return self._state_before(self._held.get(self.current + 1))

    def _state_before(self, held: _Held | None) -> dict[str, Any]:
        state = held.loader if held is not None else self._loader_state()
        return state or {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand a state to the user's loader, if it takes one."""
        load = getattr(self.loader, "load_state_dict", None)
        if callable(load) and state:
            load(state)

    def progress(self, *, ended: bool, repeats: bool = False) -> dict[str, Any]:
        """What :meth:`resume` needs to go on with the batch after the current one.

        Args:
            ended: Whether the epoch is over, although a batch may be held.
            repeats: Whether to go on with the current one instead, see :attr:`may_repeat`.
        """
        now, coming, held = self._now(), self.current + 1, self._held
        if repeats and self._taken is not None:
            taken, random = self._taken
            now, coming, ended = now._replace(random=random), self.current, False
            held = {**held, coming: taken}
        epoch, early = self._epoch, self._early
        if early is None or coming >= epoch.first:
            is_over = ended and early is None
            return self._part(epoch, coming, self._num_read * (not is_over), now, held)
        found = self._part(early.before, coming, epoch.first, early.now, held)
        # What was read of the next epoch will be read again.
        following = self._part(epoch, epoch.first, self._num_read, now, held)
        return {**found, "early": {**following, "loader": None}}

    def _part(
        self, epoch: _Epoch, coming: int, last: int, now: _Moment, held: dict[int, _Held]
    ) -> dict[str, Any]:
        """Where one epoch is, of which the batches from ``coming`` to ``last`` are held."""
        start = epoch.start
        return {
            "num_batches": coming - epoch.first,
            "start": start.random.written if start is not None else None,
            "loader": self._state_before(held.get(coming)) if self.has_state else None,
            "held": [held[n].random.written for n in sorted(held) if coming <= n < last],
            "now": now.random.written,
            "own": {"start": start.own if start is not None else [], "now": now.own},
            "early": None,
        }

    def resume(self, progress: dict[str, Any]) -> None:
        """Begin the next iteration where a checkpoint was taken."""
        self._resume = progress
        # Lightning does it within an epoch only.
        self.load_state_dict(progress["loader"] or {})

    def restore_random(self) -> None:
        """Have the random states of the checkpoint, for the hooks that run before the first batch.

        Nothing happens in a run that is not resumed, and once it has read; but of a loader without
        a length Lightning has fetched a batch, and begins once more.
        """
        if self._resume is not None:
            self._restore(self._resume)
        elif (resumed := self._resumed) and not (resumed["held"] and resumed["num_batches"]):
            # Not in the middle of an epoch, where no hook of its beginning runs.
            RandomStates.read(resumed["now"]).restore()
        else:
            return
        self._is_restored = (self._resume or self._resumed) is not None

    def _restore(self, resume: dict[str, Any]) -> None:
        if not resume["held"]:  # the epoch had ended: the next one is read as any other
            if getattr(self.loader, "next_iter_state", None) is not None:
                # torchdata's then makes two iterators, each of which draws random numbers.
                iter(self.loader)
            self._set_own(resume["own"]["now"])
            self._resume = None
        RandomStates.read(resume["now"]).restore()


class Remote:
    """The batch of a rank that reads no data; it stands where the batch would."""

    def __repr__(self) -> str:
        return "Remote()"

    def __getitem__(self, key: Any) -> Any:
        raise ConfigurationError(
            f"batch[{key!r}]: one rank reads the data for all, so hooks on this rank get no batch. "
            "Compute what they need in the step and return it: hooks on rank 0 get what the step "
            "returned"
        )


REMOTE = Remote()


@dataclass(eq=False)
class RemoteLoader:
    """The loader of a rank that reads no data: as many batches as the data rank's.

    Its dataset can be looked at. It resumes with the data rank; Lightning would warn of a loader
    that can't be resumed.

    Attributes:
        _loader: The user's loader.
        _length: Batches; None: not known before.
        _hear: Where the length is not known, waits for the data rank's word: the number of the
            iteration, and whether another batch comes.
    """

    _loader: Any
    _length: int | None
    _hear: Callable[[], tuple[int, bool]]
    _num_iterations: int = 0

    def __getattr__(self, name: str) -> Any:
        if name in {"dataset", "batch_size"}:
            return getattr(self._loader, name)
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}: another rank reads the data"
        )

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the loader on the rank that reads the data has no length")
        return self._length

    def __iter__(self) -> Iterator[Remote]:
        if self._length is not None:
            yield from repeat(REMOTE, self._length)
            return
        self._num_iterations += 1
        for iteration, more in iter(self._hear, None):
            if iteration == self._num_iterations:  # otherwise of one that was ended early
                if not more:
                    return
                yield REMOTE

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""
