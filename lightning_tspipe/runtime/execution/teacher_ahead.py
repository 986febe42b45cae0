"""A teacher that runs ahead of an update, in windows of batches: whether it may.

One that never changes may: nothing tells its earlier forwards from later ones. Whether it does is
seen when the first update is over, and looked at where each window begins; should it change after
all, what has run ahead runs again::

    window    0              1                        2                         3
    teacher   T(0)           not changed: T(1) T(2)   changed: T(2) once more   T(3)

A change that leaves no trace but values (through ``.data``) only the device sees, and a host that
asked it would wait: it is told before the window's update, and then it is an error.

One that is said to be one update late (``DelayedTeacherUpdate(windows=True)``) always does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_tspipe.errors import CaptureError, ConfigurationError
from lightning_tspipe.ir.action import Op
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.late import Late
from lightning_tspipe.runtime.weights.versions import sums_of
from lightning_tspipe.schedules.window_steps import When

log = logging.getLogger("lightning_tspipe")


@dataclass(frozen=True)
class Allowed:
    """That a teacher may run ahead of updates.

    Attributes:
        late_from: If it is one update late: the number of the update from which on.
        longest: Batches of the longest window there may be.
    """

    late_from: int | None = None
    longest: int = 1

    @property
    def runs(self) -> When:
        """When it runs, if it may."""
        return "ahead" if self.late_from is None else "late"


@dataclass(eq=False)
class TeacherAhead:
    """Decides whether forwards of the teacher run ahead of updates; all ranks decide alike.

    Args:
        tensors: What its forwards read on this rank, and don't write.
        attributes: What they read beside: values that are equal if nothing has changed.
        agree: Says whether something holds on all ranks; all ranks ask at once.
        later: Takes what a device will have said before the next update, and who judges it.
        late_from: If it is one update late: the number of the update from which on.
        tells: Whether this rank says so when they don't any more.

    Attributes:
        lets: Whether they do, in this window.
        has_run: Whether one that is late has run for all batches of this window.
    """

    tensors: Callable[[], Sequence[Tensor]]
    attributes: Callable[[], object]
    agree: Callable[[bool], bool]
    later: Callable[[Late, Callable[[Any], None]], None]
    late_from: int | None = None
    tells: bool = False
    lets: bool = False
    has_run: bool = False
    _is_frozen: bool | None = None
    _since: int | None = None
    _seen: object = None
    """Of its tensors and attributes, where this window began."""
    _values: Tensor | None = None
    """A number for each of its tensors there."""

    def begin(self, updates: int, *, is_drained: bool) -> bool:
        """A window begins; every rank calls it.

        Args:
            updates: How many there were.
            is_drained: Whether nothing has run ahead of it.

        Returns:
            Whether what has run ahead has to run again.
        """
        if self.late_from is not None:
            self.lets = updates + 1 >= self.late_from
            self.has_run = updates >= self.late_from and not is_drained
            return False
        if self._is_frozen is False:
            return False
        seen, values = self._seen, self._values
        self._seen, self._values = self._look(), self._sums()
        if self._since is None:
            self._since = updates
        elif self._is_frozen is None and updates > self._since:
            is_same = _plain(values) == _plain(self._values)
            self._is_frozen = self.lets = self.agree(is_same and seen == self._seen)
        elif self._is_frozen:
            had_begun = self.lets
            self._is_frozen = self.lets = is_drained or self.agree(seen == self._seen)
            if had_begun and self.lets and not is_drained and values is not None:
                assert self._values is not None
                self.later(Late(values != self._values), _refuse_changed)
            if self.tells and had_begun and not self.lets:
                log.info(
                    "the teacher has changed, which it did not behind the first update: from now "
                    "on it runs with its newest weights, and no more ahead of updates"
                )
            return had_begun and not self.lets
        return False

    def check(self, program: Schedule, within: int) -> None:
        """One that is late has run for all batches of a window.

        Args:
            program: A step in it.
            within: How many of its batches follow.

        Raises:
            CaptureError: It has not.
        """
        own = (action for action in program.actions if action.op is Op.TEACHER)
        if self.has_run and any(action.batch <= within for action in own):
            raise CaptureError(
                "the late teacher of a batch did not run before the last update, for fewer batches "
                "were there than a window has. Leave DelayedTeacherUpdate(windows=True) out"
            )

    def written(self) -> list[Any]:
        """For a checkpoint: whether it runs ahead, and numbers that other weights don't have.

        They are of this window, in which it has run: hooks may have changed it since.
        """
        return [self.lets, _plain(self._sums() if self._values is None else self._values)]

    def read_back(self, written: Sequence[Any]) -> bool:
        """Go on as a run that has stopped; every rank calls it.

        Args:
            written: What :meth:`written` gave there.

        Returns:
            Whether what has run ahead there counts here.
        """
        lets, sums = written
        self.lets = lets and self.agree(self.late_from is not None or sums == _plain(self._sums()))
        if self.lets and self.late_from is None:
            self._is_frozen, self._since = True, 0
            self._seen, self._values = self._look(), self._sums()
        return self.lets or not lets

    def _look(self) -> object:
        """What differs where something was written to, or replaced."""
        marks = [(t._version, t.data_ptr()) for t in self.tensors()]  # noqa: SLF001
        return marks, self.attributes()

    def _sums(self) -> Tensor | None:
        tensors = self.tensors()
        return sums_of(tensors).nan_to_num() if tensors else None


def _plain(sums: Tensor | None) -> list[float]:
    return [] if sums is None else sums.tolist()


def _refuse_changed(are_changed: Sequence[bool]) -> None:
    if any(are_changed):
        raise ConfigurationError(
            "the teacher's values were changed through .data, after it had been frozen in the "
            "first window and had run ahead of an update with those of before. Change them under "
            "torch.no_grad() without .data (parameter.mul_(...)), which is seen in time, or let "
            "the teacher not run ahead: DelayedTeacherUpdate(delay=0)"
        )
