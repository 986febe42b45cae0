"""In which order the calls of a network leave their mark on a stage's BatchNorm statistics."""

from __future__ import annotations

from collections.abc import Mapping


class CallOrder:
    """The calls of one network at one stage, in the order in which the step makes them.

    Running statistics depend on the order of the calls, and schedules may run their micro-batches
    in another one: what a call collected waits until those before it are complete.

    Args:
        num_microbatches: For each call, in order, the micro-batches that run at the stage.

    Example:
        >>> order = CallOrder({0: 1, 3: 2})
        >>> order.is_next(3), order.ran(3), order.ran(3), order.ran(0)
        (False, [], [], [0, 3])
    """

    def __init__(self, num_microbatches: Mapping[int, int]) -> None:
        self._left = dict(num_microbatches)

    def is_next(self, call: int) -> bool:
        """Whether all calls before this one are complete."""
        return next(iter(self._left)) == call

    def ran(self, call: int) -> list[int]:
        """Count a micro-batch; the calls that are complete now, and all before them."""
        self._left[call] -= 1
        due = []
        for first, left in list(self._left.items()):
            if left:
                break
            due.append(first)
            del self._left[first]
        return due
