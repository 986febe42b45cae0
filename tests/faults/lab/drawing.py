"""What is drawn: a configuration, a launcher, a fault, its moment and its rank.

A draw is a pure function of its seed and its number, so that one line repeats it. ``SHARED`` draws
in a row have one configuration: the run that nobody stops, with which they are compared, is the
same for them and needs to be made once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_tspipe.schedules.registry import FIXED

SHARED = 4
"""Draws in a row with the same configuration."""
NUM_EPOCHS, NUM_BATCHES = 3, 5
"""Of every training; with two replicas an epoch has 3 batches."""

Launcher = Literal["popen", "spawn", "fork", "forkserver", "torchrun", "slurm"]
LAUNCHERS: tuple[Launcher, ...] = ("popen", "spawn", "fork", "forkserver", "torchrun", "slurm")
HAVE_PARENT: tuple[Launcher, ...] = ("spawn", "fork", "forkserver", "torchrun")
"""Launchers whose first process is none of the ranks."""

SYNCHRONOUS = ("tspipe", *(f"tspipe_{name}" for name in FIXED))
ASYNCHRONOUS = (
    "tspipe_pipeoptim", "tspipe_pipedream", "tspipe_2bw", "tspipe_spectrain", "tspipe_1f1b",
    "tspipe_interleaved", "tspipe_zbv",
)  # fmt: skip
STRATEGIES = (*SYNCHRONOUS, *ASYNCHRONOUS)
"""Every name that the package registers."""
MODES = ("plain", "asynchronous", "relay", "fanout", "freeze")

MOMENTS = (
    "start-up", "capture", "planning", "step", "validation", "saving", "repack", "epoch end",
    "train end", "teardown", "any",
)  # fmt: skip
"""``any``: from outside, after a number of seconds; all others are reached by a rank itself."""
_PLACES: dict[str, tuple[str, ...]] = {
    "start-up": ("script", "connect", "connected", "setup"),
    "step": ("batch start", "in step", "backward", "batch end"),
    "saving": ("hook", "sync", "rename"),
}
"""Where within a moment; the others have one place."""
BEFORE_THEY_MET = ("script", "connect")
"""Places of the start-up where the ranks don't know each other."""

_ALL = frozenset(MOMENTS)
_INSIDE = _ALL - {"any"}
_WEIGHTS: dict[str, tuple[int, frozenset[str]]] = {
    "SIGKILL": (20, _ALL),
    "SIGTERM": (17, _ALL),
    "SIGSTOP": (9, _INSIDE - {"teardown"}),
    "exception": (16, _INSIDE),
    "full disk": (8, frozenset({"step", "saving", "epoch end"})),
    "truncated": (6, frozenset({"resume"})),
    "flipped": (7, frozenset({"resume"})),
    "slow rank": (6, _INSIDE - {"teardown", "train end"}),
    "clock jump": (6, _INSIDE - {"teardown"}),
    "two jobs": (5, frozenset({"start-up", "step", "saving", "train end"})),
}
"""By fault: how often it is drawn, and in which moments."""
FAULTS = tuple(_WEIGHTS)
HARMLESS = ("slow rank", "clock jump")
"""After these the run comes to its end, as if nothing had been."""
DAMAGES = ("truncated", "flipped")
"""Of a checkpoint, before a run is to go on from it."""

_COLD = 0.05
SLOW_SECONDS = 2.0
"""How long a slow rank sleeps."""


@dataclass(frozen=True)
class Configuration:
    """What is trained, and how.

    Attributes:
        mode: One of ``MODES``.
        variant: What the mode is trained with: a policy of freezing, a mode of relaying, ...
        strategy: One of ``STRATEGIES``.
        num_ranks: Devices.
        num_stages: Of each pipeline; None: all devices are one.
        validation: ``none``, ``mid-epoch`` or ``epoch``.
        accumulate: Batches per update.
        caches: Whether activations are cached.
        sharded: Whether a checkpoint is a folder to which every rank writes.
        writes_meanwhile: Whether the training goes on while a checkpoint is written.
        keeps: ``all`` checkpoints, or the ``newest``, which replaces the one before.
        workers: Of the loader.
        optimizer: ``sgd`` or ``adamw``.
    """

    mode: str
    variant: str
    strategy: str
    num_ranks: int
    num_stages: int | None = None
    validation: str = "none"
    accumulate: int = 1
    caches: bool = False
    sharded: bool = False
    writes_meanwhile: bool = False
    keeps: str = "all"
    workers: int = 0
    optimizer: str = "sgd"

    @property
    def repacks(self) -> bool:
        """Whether the pipelines get shorter."""
        return self.mode == "freeze" and self.num_ranks > 1 and self.variant != "keeps the mesh"

    @property
    def resumes_exactly(self) -> bool:
        """Whether a run that goes on is the run that nobody stopped, as the guide says.

        Shards do not hold the batches that are in flight in asynchronous training.
        """
        return not (self.mode == "asynchronous" and self.sharded)

    def __str__(self) -> str:
        ranks = f"{self.num_ranks} ranks" if self.num_ranks > 1 else "1 rank"
        if self.num_stages is not None:
            ranks += f" in pipelines of {self.num_stages}"
        wishes = {
            f"validation: {self.validation}": self.validation != "none",
            f"{self.accumulate} batches per update": self.accumulate > 1,
            "cache": self.caches, "shards": self.sharded,
            "written meanwhile": self.writes_meanwhile,
            "only the newest checkpoint": self.keeps == "newest", "a worker": self.workers > 0,
        }  # fmt: skip
        parts = [f"{self.mode} ({self.variant})", self.strategy, ranks, self.optimizer]
        return ", ".join([*parts, *(text for text, holds in wishes.items() if holds)])


@dataclass(frozen=True)
class Fault:
    """What goes wrong, when, and on whom.

    Attributes:
        kind: One of ``FAULTS``.
        moment: One of ``MOMENTS``, or ``resume``.
        place: Where within the moment.
        rank: Who reaches the moment.
        target: ``rank``, or ``parent``: who gets the signal.
        step: From which batch of the run on, counted from 0; or in which epoch.
        delay: Seconds from the start of the job; for ``any``.
        amount: By how much a clock jumps, in seconds; where in a file a byte flips, from 0 to 1.
    """

    kind: str
    moment: str
    place: str = ""
    rank: int = 0
    target: str = "rank"
    step: int = 0
    delay: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.target == "rank" else f"parent, by rank {self.rank}"
        if self.moment == "resume":
            return f"{self.kind} bytes before a resume, at {self.amount:.3f} of a file"
        if self.moment == "any":
            return f"{self.kind} after {self.delay:.2f} s, {who}"
        place = f" ({self.place})" if self.place else ""
        return f"{self.kind} in {self.moment}{place}, {who}, from {self.step} on"


@dataclass(frozen=True)
class Draw:
    """One experiment.

    Attributes:
        seed: Of the laboratory's run.
        number: Of the draw.
        configuration: What is trained.
        launcher: Who starts the processes.
        fault: What goes wrong.
        is_cold: Whether processes are started as new interpreters; otherwise they are forked from
            one that has imported everything.
    """

    seed: int
    number: int
    configuration: Configuration
    launcher: Launcher
    fault: Fault
    is_cold: bool = field(default=False)

    @property
    def command(self) -> str:
        """What repeats it."""
        return f"python tests/faults/laboratory.py --seed {self.seed} --draw {self.number}"

    def __str__(self) -> str:
        cold = ", new interpreters" if self.is_cold else ""
        return f"{self.number}: {self.fault}; {self.launcher}{cold}; {self.configuration}"


def draw(seed: int, number: int) -> Draw:
    """The experiment with this number."""
    configuration = _configuration(random.Random(f"{seed}/group/{number // SHARED}"))  # noqa: S311
    r = random.Random(f"{seed}/draw/{number}")  # noqa: S311 - to be repeated, not to be secret
    launcher = r.choice(LAUNCHERS)
    fault = _fault(r, configuration, launcher)
    waits_for_imports = fault.kind == "SIGSTOP" and fault.moment == "start-up"
    is_cold = r.random() < _COLD and not waits_for_imports
    return Draw(seed, number, configuration, launcher, fault, is_cold)


# Configurations


def _configuration(r: random.Random) -> Configuration:
    mode = r.choices(MODES, (25, 22, 14, 15, 24))[0]
    choices: dict[str, Any] = {
        "num_ranks": r.choices((1, 2, 3, 4), (1, 5, 3, 4))[0],
        "validation": r.choice(("none", "mid-epoch", "epoch")),
        "accumulate": r.choice((1, 1, 2)),
        "sharded": r.random() < 0.3,
        "writes_meanwhile": r.random() < 0.25,
        "keeps": r.choice(("all", "newest")),
        "workers": int(r.random() < 0.15),
        "optimizer": r.choice(("sgd", "adamw")),
        **_of_mode(r, mode),
    }
    has_halves = mode in {"plain", "freeze"} and choices["num_ranks"] == 4
    choices["num_stages"] = 2 if has_halves and r.random() < 0.5 else None
    if choices["strategy"] == "tspipe_2bw":  # fewer are refused
        choices["accumulate"] = max(choices["num_ranks"], 2)
    return Configuration(mode=mode, **choices)


def _of_mode(r: random.Random, mode: str) -> dict[str, Any]:
    """What is chosen for one mode alone."""
    if mode == "asynchronous":
        name = r.choice(ASYNCHRONOUS)
        found = {"strategy": name, "variant": r.choice(("given cuts", "measured"))}
        return {**found, "optimizer": "sgd"} if name == "tspipe_spectrain" else found
    if mode == "relay":
        variant = r.choice(("dpu", "dpu", "ahd", "ir", "tr", "dp", "ls"))
        return {"strategy": "tspipe", "variant": variant, "sharded": False}
    if mode == "fanout":
        return {
            "strategy": "tspipe", "variant": r.choice(("2 heads", "3 heads", "5 heads")),
            "caches": r.random() < 0.4,
        }  # fmt: skip
    if mode == "freeze":
        variant = r.choice(("repacks", "repacks", "repacks as told", "keeps the mesh"))
        return {
            "strategy": r.choice(("tspipe", "tspipe", "tspipe_gpipe")), "variant": variant,
            "caches": r.random() < 0.4, "workers": 0,
        }  # fmt: skip
    variant = r.choice(("layer norm", "batch norm", "2 micro-batches", "no teacher"))
    return {"strategy": r.choice(SYNCHRONOUS), "variant": variant}


# Faults


def _fault(r: random.Random, configuration: Configuration, launcher: Launcher) -> Fault:
    possible = {
        kind: sorted(moment for moment in moments if _has(configuration, moment))
        for kind, (_, moments) in _WEIGHTS.items()
        if configuration.num_ranks > 1 or kind != "SIGSTOP"  # nobody is there who would notice
    }
    kinds = list(possible)
    kind = r.choices(kinds, [_WEIGHTS[kind][0] for kind in kinds])[0]
    moment = r.choice(possible[kind])
    place = r.choice(_PLACES.get(moment, ("",)))
    if place == "script" and launcher in {"spawn", "fork", "forkserver"}:
        place = "connect"  # there the script's own process is none of the ranks
    signalled = kind in {"SIGKILL", "SIGTERM"} and launcher in HAVE_PARENT
    rank = r.randrange(configuration.num_ranks)
    if kind == "full disk":
        place = "hook" if moment == "saving" else "batch end" if moment == "step" else ""
    target = "parent" if signalled and r.random() < 0.25 else "rank"
    step = r.randrange(1, 6) if moment != "repack" else 0
    if kind == "full disk" and moment == "epoch end" and step % 3 == 2:
        step -= 1  # behind the last epoch nothing is written
    return Fault(
        kind, moment, place,
        rank=rank if _reaches(configuration, place, rank) else 0,
        target=target,
        step=step,
        delay=r.uniform(0.0, 2.5),
        amount=_amount(r, kind),
    )  # fmt: skip


def _has(configuration: Configuration, moment: str) -> bool:
    if moment == "validation":
        return configuration.validation != "none"
    return configuration.repacks if moment == "repack" else True


def _reaches(configuration: Configuration, place: str, rank: int) -> bool:
    """Whether a rank comes to a place; rank 0 does."""
    if place == "in step":  # elsewhere the loss rank alone runs it; in a fan-out, ranks with heads
        num_heads = configuration.variant.partition(" heads")[0]
        has_heads = configuration.mode == "fanout" and rank < int(num_heads)
        return has_heads or configuration.mode == "relay"
    return place not in {"sync", "rename"} or (place == "sync" and configuration.sharded)


def _amount(r: random.Random, kind: str) -> float:
    if kind == "clock jump":
        return r.choice((-1, 1)) * r.choice((5.0, 3600.0, 86400.0 * 400))
    return r.random()
