"""A fault laboratory: many drawn faults at drawn moments of drawn trainings, and what must hold.

``make faults``, or::

    python tests/faults/laboratory.py --draws 300 --seed 1     # about 25 minutes on two cores
    python tests/faults/laboratory.py --seed 1 --draw 17       # one of them again, with its output

Each draw is a pure function of the seed and its number. The parts lie in ``tests/faults/lab``:
``drawing`` says what is drawn, ``striking`` does it, ``checks`` says what must hold. Everything
runs in folders of its own below the folder for temporary files; those of draws that fail stay.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)
os.environ["OMP_NUM_THREADS"] = "1"
NOISE = re.compile(
    r"GPU available|TPU available|.*litlogger|Initializing distributed|---|distributed_backend|"
    r"All distributed processes|`weights_only`|`Trainer\(val_check|SLURM auto|frame #|"
    r"Exception raised from|<omitting|.*hostname of the client socket|\s*$"
)
"""What Lightning and torch say in every run; the whole output lies in the folder."""

from tests.faults.lab import checks, tables  # noqa: E402 - the path comes first
from tests.faults.lab.drawing import draw  # noqa: E402 - as above


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draws", type=int, default=300, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--draw", type=int, help="this one alone")
    parser.add_argument("--list", action="store_true", help="say what is drawn, and do nothing")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin nothing later")
    parser.add_argument("--jobs", type=int, default=2, help="draws at a time")
    parser.add_argument("--folder", type=Path, help="for files; by default a temporary one")
    parser.add_argument("--json", type=Path, help="all results, as a file")
    parser.add_argument("--table", type=Path, help="a page of the guide that gets the table")
    return parser.parse_args(words)


def say(text: str) -> None:
    """Print, at once."""
    print(text, flush=True)  # noqa: T201 - a script


def _load() -> str:
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def tell(result: tables.Result) -> None:
    """One line, and what is wrong."""
    word = "ok" if result.survived else "not possible" if result.not_possible else "FAILED"
    say(f"{word:<7} {result.seconds:5.1f} s  {result.text}")
    if result.not_possible:
        say(f"        {result.not_possible}")
    for check, text in result.failures.items():
        lines = f"{check}: {text}".splitlines()
        say("\n".join(f"        {line}" for line in lines if not NOISE.match(line)))
    if result.failures:
        say(f"        again: {result.command}")


def report(results: Sequence[tables.Result], wanted: int, seconds: float) -> str:
    """What was seen, in words."""
    tried = [result for result in results if not result.not_possible]
    survived = sum(result.survived for result in tried)
    missing = len(results) - len(tried)
    sums = f"{survived} of {len(tried)} survived ({wanted} wanted, {missing} not possible here)"
    lines = [
        tables.as_text(tables.rows(results)), "",
        *(": ".join(row) for row in tables.by_label(results)),
        "",
        f"{sums}, {seconds / 60:.1f} minutes, {_load()}",
        f"limits: {checks.limits()}",
        *(f"FAILED {result.command}   # {', '.join(result.failures)}"
          for result in results if result.failures),
    ]  # fmt: skip
    return "\n".join(lines)


def for_guide(results: Sequence[tables.Result], seed: int, seconds: float) -> str:
    """The text that goes into the guide."""
    tried = sum(not result.not_possible for result in results)
    survived = sum(result.survived for result in results)
    day = datetime.now(UTC).date().isoformat()
    last = results[-1].number + 1 if results else 0
    return (
        f"{day}, seed {seed}, draws {results[0].number if results else 0} to {last - 1}: "
        f"{survived} of {tried} survived, in {seconds / 60:.0f} minutes on {os.cpu_count()} "
        f"cores.\n\n{tables.as_markdown(tables.rows(results))}"
    )


def main(words: Sequence[str] | None = None) -> int:
    """Try all, and say what was seen; 0 if all that was tried survived."""
    options = arguments(words)
    first, number = (options.first, options.draws) if options.draw is None else (options.draw, 1)
    numbers = range(first, first + number)
    if options.list:
        for index in numbers:
            say(str(draw(options.seed, index)))
        return 0
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it started ends too
    from tests.faults.lab import imports  # noqa: PLC0415 - seconds, which --list does without

    folder = options.folder or Path(tempfile.mkdtemp(prefix="laboratory-"))
    say(f"{number} draws, seed {options.seed}, in {folder}; {_load()}; {checks.limits()}")
    results = []
    for result in imports.running.try_all(
        imports.running.groups(options.seed, numbers), folder, num_jobs=options.jobs,
        deadline=started + 60 * options.minutes,
    ):  # fmt: skip
        tell(result)
        results.append(result)
    results.sort(key=lambda result: result.number)
    seconds = time.monotonic() - started
    say("\n" + report(results, number, seconds))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    if options.table is not None:
        tables.put_into(options.table, for_guide(results, options.seed, seconds))
    if len(results) < number:
        say(f"{number - len(results)} draws were not begun in time: give it more --minutes")
    is_good = len(results) == number and not any(result.failures for result in results)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
