"""Where a tape may be cut, and what then passes from one part to the next.

::

    calls       0   1   3 │ 4   5 │ 6   7         that depend on the input, in order
    live                  x       x, y            tensors that are made before and read behind
    again           2     2       2               made again in each part that reads it

What depends neither on the input nor on parameters nor on chance is made again wherever it is read
(masks, positions), and passes no cut. Where memory is written, no cut lies between its making and
the writing.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from lightning_tspipe.networks.tape import Call, Size, Tape, Value

_MAX_LIVE = 4
"""What a cut may pass on, in units of its largest tensor: sending more costs more than it gains."""
_MULTIPLE = re.compile(r"(?:(\d+)\*)?b")


class _When(IntEnum):
    """When a call runs."""

    AGAIN = 0
    """Wherever what it makes is read."""
    LATE = 1
    """Once, right before what it makes is read: it reads parameters, which belong to one part."""
    ONCE = 2
    """Once, in its order."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A place in front of the first call, between two, or behind the last.

    Attributes:
        after: How many of the ordered calls lie before it.
        live: The tensors that pass it.
    """

    after: int
    live: tuple[Value, ...]

    def samples(self) -> tuple[int, int, int] | None:
        """Where the number of samples can be read: tensor, dimension, and what to divide by."""
        for place, value in enumerate(self.live):
            for dimension, size in enumerate(value.size):
                found = _MULTIPLE.fullmatch(size.code) if isinstance(size, Size) else None
                if found:
                    return place, dimension, int(found[1] or 1)
        return None

    def num_bytes(self, batch: int) -> int:
        """What passes, for a number of samples."""
        return sum(self._bytes(batch))

    def is_worth_it(self, batch: int) -> bool:
        """Whether something passes, and not too much; masks and positions hardly count."""
        each = self._bytes(batch)
        return bool(each) and sum(each) <= _MAX_LIVE * max(each)

    def _bytes(self, batch: int) -> list[int]:
        return [math.prod(value.shape(batch)) * value.dtype.itemsize for value in self.live]


class Spans:
    """The order of a tape's calls, and its cuts.

    Args:
        tape: What was recorded.

    Attributes:
        calls: Those that run once, in order.
        cuts: Where parts begin and end: the first is in front of all calls, the last behind them.
        places: For each tensor that is returned, how many of the calls lie before it.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._state = {value.memory for value in tape.state.values()}
        self._when_made: dict[int, _When] = {value.memory: _When.ONCE for value in tape.inputs}
        self._when = self._find_when()
        self._makers: dict[int, list[Call]] = defaultdict(list)
        for call in tape.calls:
            for memory in call.changed:
                self._makers[memory].append(call)
        self._number = {call: number for number, call in enumerate(tape.calls)}
        self.calls = self._ordered()
        self._place = {call: place for place, call in enumerate(self.calls)}
        self._last_use = {v: place for place, call in enumerate(self.calls) for v in call.values}
        self.places = tuple(map(self._place_of, tape.leaves))
        self.cuts = self._find_cuts()

    def with_again(self, calls: Sequence[Call], leaves: Sequence[Value] = ()) -> list[Call]:
        """Some calls, and what has to be made again for them and for tensors that are returned."""
        # Right before what reads it; late calls may have moved.
        ordered: dict[Call, None] = {}
        for call in calls:
            ordered |= dict.fromkeys((*self._again_for(call.values, self._number[call]), call))
        return list(ordered | dict.fromkeys(self._again_for(leaves, len(self._number))))

    def _again_for(self, values: Iterable[Value], before: int) -> list[Call]:
        """What has to be made again for some tensors, in the order of the tape."""
        found: set[Call] = set()
        todo = self._made(values, before, _When.AGAIN)
        while todo:
            maker = todo.pop()
            if maker not in found:
                found.add(maker)
                todo += self._made(maker.values, self._number[maker], _When.AGAIN)
        return sorted(found, key=self._number.__getitem__)

    def _made(self, values: Iterable[Value], before: int, when: _When) -> list[Call]:
        """The calls that make some tensors or write them: those of a kind, up to a number."""
        makers = (maker for value in values for maker in self._makers.get(value.memory, ()))
        return [m for m in makers if self._when[m] is when and self._number[m] < before]

    # What runs when

    def _find_when(self) -> dict[Call, _When]:
        """When each call runs; a mask that the input is written into is made once, say."""
        state = self._tape.state
        parameters = {value.memory for value in state.values() if value.trained}
        found: dict[Call, _When] = {}
        has_changed = True
        while has_changed:
            has_changed = False
            for call in self._tape.calls:
                touched = {value.memory for value in (*call.values, *call.made)}
                when = max(
                    (self._when_made.get(n, _When.AGAIN) for n in touched - self._state),
                    default=_When.AGAIN,
                )
                # Views of parameters, too.
                if not parameters.isdisjoint(touched | {state[n].memory for n in call.state}):
                    when = max(when, _When.LATE)
                is_pinned = call.draws or not call.made or not call.writes.isdisjoint(self._state)
                if is_pinned or (when is _When.LATE and call.writes):
                    when = _When.ONCE
                if found.get(call) is not when:
                    found[call], has_changed = when, True
                for memory in call.changed - self._state:
                    if self._when_made.get(memory, _When.AGAIN) < when:
                        self._when_made[memory], has_changed = when, True
        return found

    def _ordered(self) -> list[Call]:
        ordered: dict[Call, None] = {}

        def place(call: Call) -> None:
            if call not in ordered:
                for maker in self._made(call.values, self._number[call], _When.LATE):
                    place(maker)
                ordered[call] = None

        once = [call for call in self._tape.calls if self._when[call] is _When.ONCE]
        for call in (*once, *self._made(self._tape.leaves, len(self._number), _When.LATE)):
            place(call)
        return list(ordered)

    # Where it may be cut

    def _place_of(self, leaf: Value) -> int:
        """After how many calls a tensor that is returned is there, for good, and read no more.

        Gradients are so added up in the order in which those of the whole network are: that of what
        is returned first, and then those of its readers, from the last one on.
        """
        makers = [
            maker
            for maker in self._makers.get(leaf.memory, ())
            if maker in self._place and (leaf in maker.made or leaf.memory in maker.writes)
        ]
        there = max((self._place[maker] + 1 for maker in makers), default=len(self.calls))
        there = 0 if leaf in self._tape.inputs else there
        return max(there, self._last_use.get(leaf, -1) + 1)

    def _find_cuts(self) -> tuple[Cut, ...]:
        """All places with one tensor; between two products else the one with the fewest bytes."""
        tape = self._tape
        gaps: list[list[Cut]] = [[]]
        for cut in self._possible_cuts():
            gaps[-1].append(cut)
            if self.calls[cut.after].has_product:
                gaps.append([])
        kept = [cut for gap in gaps for cut in self._best(gap)]
        passed = tape.leaves if tape.structure.is_leaf() else ()
        return (Cut(0, tape.inputs), *kept, Cut(len(self.calls), passed))

    def _best(self, gap: Sequence[Cut]) -> list[Cut]:
        single = [cut for cut in gap if len(cut.live) == 1]
        batch = self._tape.arguments.batch
        fewest = min(gap, key=lambda cut: (cut.num_bytes(batch), -cut.after), default=None)
        return single or [cut for cut in gap if cut is fewest]

    def _possible_cuts(self) -> Iterable[Cut]:
        inside, leaves, last_sized = self._written(), self._tape.leaves, self._last_sized()
        live: list[Value] = list(self._tape.inputs)
        for after, call in enumerate(self.calls[:-1], start=1):
            live += [value for value in call.made if value not in live and not value.state]
            live = [value for value in live if self._last_use.get(value, 0) >= after]
            waiting = [v for v in leaves if self._is_passed(v, after) and v not in live]
            cut = Cut(after, (*live, *waiting))
            makes = any(value in cut.live for value in call.made) or after in self.places
            fits = after not in inside and cut.is_worth_it(self._tape.arguments.batch)
            if makes and fits and (after >= last_sized or cut.samples() is not None):
                yield cut

    def _is_passed(self, leaf: Value, after: int) -> bool:
        """Whether a tensor that is returned alone is there already, and has to be passed on."""
        is_there = self.places[0] <= after and leaf.memory not in self._state
        return self._tape.structure.is_leaf() and is_there

    def _written(self) -> set[int]:
        """Places within the life of memory that is written later."""
        places: set[int] = set()
        inputs = {value.memory for value in self._tape.inputs}
        for place, call in enumerate(self.calls):
            for memory in call.writes - self._state:
                makers = [self._place[m] for m in self._makers[memory] if m in self._place]
                first = 0 if memory in inputs else min(makers, default=place) + 1
                places.update(range(first, place + 1))
        return places

    def _last_sized(self) -> int:
        """How many of the calls lie before the last one that asks for the number of samples."""
        sized: set[int] = set()  # memories of what is made again with it
        for call in self._tape.calls:
            reads = not sized.isdisjoint(value.memory for value in call.values)
            if self._when[call] is _When.AGAIN and (call.has_sizes or reads):
                sized |= call.changed
        last = max(
            (
                place
                for place, call in enumerate(self.calls, start=1)
                if call.has_sizes or not sized.isdisjoint(v.memory for v in call.values)
            ),
            default=0,
        )
        is_returned = any(leaf.memory in sized for leaf in self._tape.leaves)
        return len(self.calls) if is_returned else last
