"""Methods take turns: round by round, everybody else asleep, so that noise meets all alike.

```
round 1   tspipe | ddp | fsdp2 | sequential | gpipe | torch_gpipe
round 2   ddp | fsdp2 | sequential | gpipe | torch_gpipe | tspipe      (another one begins)
```
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from multiprocessing.context import ForkServerContext
from typing import TypeVar

from benchmarks.crews.crew import Crew, MethodError
from benchmarks.crews.job import Job
from benchmarks.throughput.entries import Entry
from benchmarks.throughput.figures import Result

PROGRAM = "benchmarks.throughput.methods"
"""What the processes run."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Length:
    """How much is measured.

    Attributes:
        num_rounds: Turns of each method.
        num_steps: Timed steps of each turn.
    """

    num_rounds: int
    num_steps: int


@dataclass
class Contest:
    """One workload and the methods that compete on it; good for one run.

    Attributes:
        workload: Its name.
        batch_size: Images of one step over all processes.
        length: How much is measured.
        context: Starts the processes.
        background: The largest share of a core that waiting methods used during a turn.
        program: What the processes run.
    """

    workload: str
    batch_size: int
    length: Length
    context: ForkServerContext
    background: float = 0.0
    program: str = PROGRAM
    _crews: dict[Entry, Crew] = field(default_factory=dict)
    _failures: dict[Entry, str] = field(default_factory=dict)

    def run(self, entries: Sequence[Entry]) -> list[Result]:
        """Measure; of several variants of one method only the fastest stays in.

        Returns:
            One result for each name, failures included.
        """
        with ExitStack() as stack:
            for entry in entries:
                crew = stack.enter_context(Crew(self._job(entry), self.context))
                self._crews[entry] = crew
                self._start(entry, crew)
            self._choose_variants()
            self._warm_up()
            seconds = self._take_turns()
            held = self._weigh()
        chosen = {entry.name: entry for entry in [*self._failures, *self._crews]}
        names = dict.fromkeys(entry.name for entry in entries)
        return [self._result(chosen[name], seconds, held) for name in names]

    def _job(self, entry: Entry) -> Job:
        return Job(
            program=self.program,
            workload=self.workload,
            method=entry.method,
            options=entry.options,
            batch_size=self.batch_size,
            num_ranks=entry.num_ranks,
            rank=0,
            port=0,
        )

    def _start(self, entry: Entry, crew: Crew) -> None:
        start = time.perf_counter()
        self._guard(entry, crew.start)
        if entry in self._crews:
            self._say(f"started {entry} in {time.perf_counter() - start:.1f} s")

    def _choose_variants(self) -> None:
        for name in {entry.name for entry in self._crews}:
            variants = [entry for entry in self._crews if entry.name == name]
            if len(variants) > 1:
                seconds = {entry: self._turn(entry) for entry in variants}
                self._keep_fastest(seconds)

    def _keep_fastest(self, seconds: dict[Entry, float | None]) -> None:
        finished = {entry: value for entry, value in seconds.items() if value is not None}
        for entry in sorted(finished, key=finished.__getitem__)[1:]:
            self._crews.pop(entry).end()

    def _warm_up(self) -> None:
        """A first turn for those who haven't had one: allocators, plans, first shapes."""
        for entry, crew in list(self._crews.items()):
            if not crew.has_run:
                self._turn(entry)

    def _take_turns(self) -> dict[Entry, list[float]]:
        seconds: dict[Entry, list[float]] = {entry: [] for entry in self._crews}
        for round_index in range(self.length.num_rounds):
            order = list(self._crews)
            first = round_index % max(1, len(order))
            for entry in [*order[first:], *order[:first]]:
                turn = self._turn(entry)
                if turn is not None:
                    seconds[entry].append(turn)
            speeds = (f"{entry.name} {1e3 * seconds[entry][-1]:.0f}" for entry in self._crews)
            self._say(f"round {round_index + 1}/{self.length.num_rounds}, ms: {', '.join(speeds)}")
        return seconds

    def _turn(self, entry: Entry) -> float | None:
        """Seconds per step of one turn, or None where the method fails."""
        others = [crew for other, crew in self._crews.items() if other != entry]
        used, start = sum(crew.cpu_seconds() for crew in others), time.perf_counter()
        crew = self._crews[entry]
        seconds = self._guard(entry, lambda: crew.turn(self.length.num_steps))
        used = sum(crew.cpu_seconds() for crew in others) - used
        self.background = max(self.background, used / (time.perf_counter() - start))
        return None if seconds is None else seconds / self.length.num_steps

    def _weigh(self) -> dict[Entry, tuple[dict[str, int], ...]]:
        held: dict[Entry, tuple[dict[str, int], ...]] = {}
        for entry, crew in list(self._crews.items()):
            answers = self._guard(entry, crew.weigh) or []
            known = [asdict(answer.held) for answer in answers if answer.held is not None]
            held[entry] = tuple(known) if len(known) == len(answers) else ()
        return held

    def _guard(self, entry: Entry, act: Callable[[], T]) -> T | None:
        """Act; a method that fails is out, and the others go on."""
        try:
            return act()
        except MethodError as error:
            self._failures[entry] = str(error)
            self._crews.pop(entry).end()
            self._say(f"{entry} FAILED: {error}")
            return None

    def _result(
        self,
        entry: Entry,
        seconds: dict[Entry, list[float]],
        held: dict[Entry, tuple[dict[str, int], ...]],
    ) -> Result:
        if entry not in self._crews:
            failure = self._failures.get(entry, "no variant of it works")
            return Result(self.workload, entry, self.batch_size, failure=failure)
        return Result(
            self.workload,
            entry,
            self.batch_size * entry.copies,
            seconds=tuple(seconds[entry]),
            bytes_per_rank=held[entry],
        )

    def _say(self, text: str) -> None:
        print(f"[{self.workload}] {text}", file=sys.stderr, flush=True)
