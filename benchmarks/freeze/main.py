"""What freezing, repacking and caching save, and what they cost in accuracy.

    python benchmarks/freeze/main.py [--images DIR] [--quick] [--json FILE] [--work DIR --resume]

README.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.environment import environment_of
from benchmarks.freeze.figures import (
    ACCURATE,
    EMULATED,
    REAL,
    figures_of_accuracy,
    figures_of_emulated,
    figures_of_real,
    figures_of_tuning,
)

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "torchvision", "lightning")
PARTS = ("real", "emulated", "accuracy")
TIMEOUT = 3600
LEARNING_RATES = (1e-4, 3e-4, 1e-3)
TUNING_SEED = 10
_FIGURES = {
    "real": figures_of_real, "accuracy": figures_of_accuracy, "tuning": figures_of_tuning
}  # fmt: skip

Run = dict[str, Any]
Key = tuple[str, float | int]
Figures = dict[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit status."""
    options = _parse(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    with TemporaryDirectory(prefix="freeze-") as name:
        bench = _Bench(options, options.work or Path(name))
        for part in options.parts:
            if part == "emulated":
                bench.emulate()
            elif options.images is not None:
                bench.fine_tune(part)
    bench.say("done")
    print(_table(bench.figures))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="four devices, one seed, few images")
    parser.add_argument("--images", type=Path, help="with train/ and test/, a folder per class")
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, "tuning"), default=list(PARTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[20, 21, 22], help="of accuracies")
    parser.add_argument("--rounds", type=int, default=1, help="of the real runs that are timed")
    parser.add_argument("--work", type=Path, help="keep what each run found here")
    parser.add_argument("--resume", action="store_true", help="use what is there, if it was timed")
    parser.add_argument(
        "--json", type=Path, help="write the result here, the table beside it; other parts stay"
    )
    options = parser.parse_args(arguments)
    options.devices, options.steps, options.seconds = 8, 5, 1.0
    options.sizes, options.epochs, options.before = (6000, 1000, 4000, 5000), 10, 5
    if options.quick:
        options.devices, options.seconds = 4, 0.2
        options.sizes, options.epochs, options.before = (500, 300, 250, 250), 3, 1
        options.seeds = options.seeds[:1]
    return options


class _Bench:
    """Runs what is not there yet, one after the other, and writes after each.

    Args:
        options: Of the command line.
        folder: What a run found lies here; existing accuracies are used again, and with
            ``--resume`` existing times too.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._started = time.monotonic()
        self.figures: Figures = {}
        self._rows: list[Run] = []
        if options.json is not None and options.json.exists():  # what other parts have written
            found = json.loads(options.json.read_text(encoding="utf-8"))
            self._rows = [row for row in found["rows"] if row["part"] not in options.parts]
            self.figures = found["figures"] if self._rows else {}

    def say(self, what: str) -> None:
        """A line with the seconds since the start."""
        print(f"[{time.monotonic() - self._started:4.0f} s] {what}", file=sys.stderr, flush=True)

    def emulate(self) -> None:
        """All methods on devices that sleep."""
        devices = self._options.devices
        found: dict[Key, Run] = {}
        for method in EMULATED:
            costs = self._costs("fine" if method == "balanced" else "blocks")
            script = (
                "emulate", method, "--devices", str(devices), "--steps", str(self._options.steps),
                *costs,
            )  # fmt: skip
            found[method, 0] = self._run("emulated", method, 0, script)
            of_method = {method: run for (method, _), run in found.items()}
            self._add("emulated", found, partial(figures_of_emulated, of_method, devices))

    def _costs(self, atoms: str) -> tuple[str, ...]:
        """What everything costs, and the first plan; planned once."""
        profile, plan = (self._folder / f"{atoms}-{name}.json" for name in ("profile", "plan"))
        if not plan.exists():
            self.say(f"plans for {atoms}")
            options = self._options
            settings = str(options.devices), str(options.seconds), atoms
            self._script("plan_emulated", *settings, str(profile), str(plan))
        return "--profile", str(profile), "--plan", str(plan)

    def fine_tune(self, part: str) -> None:
        """A small ViT, timed over two processes, or in one for its accuracy."""
        data, options = self._folder / "data.pt", self._options
        if not data.exists():
            self.say("pretrains")
            sizes = [str(size) for size in options.sizes]
            self._script("pretrain", str(options.images), *sizes, str(options.before), str(data))
        common = ("--epochs", str(options.epochs), "--data", str(data))
        found: dict[Key, Run] = {}
        of_part = {
            "real": ("--devices", "2"),
            "accuracy": ("--devices", "1"),
            "tuning": ("--devices", "1", "--test-on", "held"),
        }[part]
        for method, number in self._runs_of(part):
            own: tuple[str, ...] = ("--seed", str(number))
            if part == "tuning":
                own = ("--seed", str(TUNING_SEED), "--lr", str(number))
            script = ("finetune", method, *own, *of_part, *common)
            found[method, number] = self._run(part, method, number, script)
            self._add(part, found, partial(_FIGURES[part], found))

    def _runs_of(self, part: str) -> list[Key]:
        if part == "tuning":
            return [("baseline", lr) for lr in LEARNING_RATES]
        methods = REAL if part == "real" else ACCURATE
        numbers = self._options.seeds[: self._options.rounds if part == "real" else None]
        return [(method, number) for number in numbers for method in methods]

    def _run(self, part: str, method: str, number: float, script: Sequence[str]) -> Run:
        """One training; what it found. A timed one has found an accuracy too."""
        result = self._folder / f"{part}-{method}-{number}.json"
        timed = self._folder / f"real-{method}-{number}.json"
        if part == "accuracy" and timed.exists():
            result = timed
        is_timed = part in {"real", "emulated"}
        if not result.exists() or (is_timed and not self._options.resume):
            self.say(f"{part} {method} {number} begins")
            self._script(*script, "--result", str(result))
        found: Run = json.loads(result.read_text(encoding="utf-8"))
        self.say(f"{part} {method} {number}: {found}")
        return found

    def _script(self, name: str, *arguments: str) -> None:
        """Run one of this folder's programs, and all processes that it starts."""
        command = [sys.executable, "-m", f"benchmarks.freeze.{name}", *arguments]
        subprocess.run(command, cwd=ROOT, check=True, timeout=TIMEOUT)  # noqa: S603 - ours

    def _add(self, part: str, found: Mapping[Key, Run], figures: Callable[[], Figures]) -> None:
        """What was found so far, written with what other parts have."""
        self.figures |= figures()
        rows = [row for row in self._rows if row["part"] != part]
        rows += [{"part": part, "method": m, "number": n, **run} for (m, n), run in found.items()]
        self._rows = rows
        path = self._options.json
        if path is not None:
            content = {
                "environment": environment_of(PACKAGES), "figures": self.figures, "rows": rows
            }  # fmt: skip
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            path.with_suffix(".txt").write_text(_table(self.figures) + "\n", encoding="utf-8")


def _table(figures: Figures) -> str:
    return "\n".join(f"{name:<45} {value:8.3f}" for name, value in figures.items())


if __name__ == "__main__":
    sys.exit(main())
