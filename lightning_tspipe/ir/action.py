"""Actions: one operation of one stage (or one rank) on one unit of work.

An action prints and parses in the grammar of PyTorch's pipeline schedules, extended with the
teacher, the batch offset and the rank-wide actions::

    2F0     student forward of stage 2 on unit 0
    2T0+1   teacher forward of stage 2 on unit 0 of the *next* batch
    2B0     whole backward;  2I0 / 2W0 its halves (input gradients, weight gradients)
    2W0-1   the weight gradients of the batch *before*
    1E      effects of the step on rank 1 (the user's EMA, see ``capture``)
    1D+1    rank 1 reads the call inputs of the next batch
    1P      rank 1 makes the student's inputs, of what the teacher gave
    0L      rank 0 computes the loss of the whole batch
    1O      optimizer step of rank 1

A *unit* is one (call, micro-batch); units are numbered ``call * num_microbatches + microbatch``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from lightning_tspipe.errors import ScheduleError


class Op(Enum):
    """Operation of an action; the value is its letter."""

    EFFECTS = "E"
    DATA = "D"
    PROLOGUE = "P"
    FORWARD = "F"
    TEACHER = "T"
    LOSS = "L"
    BACKWARD = "B"
    INPUT_BACKWARD = "I"
    WEIGHT_BACKWARD = "W"
    OPTIMIZER = "O"

    # Members are singletons; Enum's own hash is a Python function, and actions are looked up a lot.
    __hash__ = object.__hash__

    @property
    def is_rank_wide(self) -> bool:
        """Whether the action belongs to a rank and has no unit."""
        return self in _RANK_WIDE


_RANK_WIDE = frozenset({Op.EFFECTS, Op.DATA, Op.PROLOGUE, Op.LOSS, Op.OPTIMIZER})
_PATTERN = re.compile(r"(?P<stage>\d+)(?P<op>[EDPFTLBIWO])(?P<unit>\d+)?(?P<batch>[+-]\d+)?")


@dataclass(frozen=True, slots=True)
class Action:
    """One cell of a schedule.

    Attributes:
        op: The operation.
        stage: The stage of the op's network; for rank-wide ops the rank.
        unit: The unit; None for rank-wide ops.
        batch: Offset from the batch of this step: 1 is the next batch, -1 the one before.
    """

    op: Op
    stage: int
    unit: int | None = None
    batch: int = 0
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.op.is_rank_wide != (self.unit is None):
            raise ScheduleError(
                f"{self.op.name} {'takes no' if self.op.is_rank_wide else 'needs a'} unit"
            )
        # Computed once, since the executor looks up everything by actions.
        object.__setattr__(self, "_hash", hash((self.op, self.stage, self.unit, self.batch)))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        unit = "" if self.unit is None else str(self.unit)
        return f"{self.stage}{self.op.value}{unit}" + (f"{self.batch:+d}" if self.batch else "")

    @property
    def in_words(self) -> str:
        """The action in words, for messages.

        >>> Action.parse("2T0+1").in_words, Action.parse("0L").in_words
        ('TEACHER stage 2 unit 0', 'LOSS rank 0')
        """
        name = self.op.name.replace("_", " ")
        where = f"rank {self.stage}" if self.unit is None else f"stage {self.stage}"
        return f"{name} {where}" + ("" if self.unit is None else f" unit {self.unit}")

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what ``str(action)`` prints.

        Raises:
            ScheduleError: The text is not an action.

        >>> Action.parse("2T0+1")
        Action(op=<Op.TEACHER: 'T'>, stage=2, unit=0, batch=1)
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(f"{text!r} is not an action; write for example 2F0, 2T0+1 or 0L")
        unit = match["unit"]
        return cls(
            Op(match["op"]),
            int(match["stage"]),
            None if unit is None else int(unit),
            int(match["batch"] or 0),
        )
