"""The plan of a run: kept in its checkpoints, and used again by a run that resumes.

::

    first run    measure ──► plan ──► stages ──► checkpoint (weights, progress, plan)
    second run                        stages ◄── checkpoint; nothing is measured
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

from lightning.fabric.utilities import rank_zero_info
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.planning.run_plan import RunPlan, Source, plain
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.stages.randomness import network_draws
from lightning_tspipe.schedules.registry import ASYNCHRONOUS
from lightning_tspipe.strategy.setup.freezing import Freezing
from lightning_tspipe.strategy.setup.options import SetupOptions

FROZEN = "frozen atoms"
FREEZING = "freezing"
"""The key of what is known where layers freeze, in a checkpoint."""

_OPTIONS = (
    "schedule", "weights", "num_microbatches", "partition", "split_backward", "memory_limit",
    "state_limit", "activation_checkpointing", "compile", "queue_depth",
)  # fmt: skip
"""What the user said that plans follow."""

_PIN = (
    "A run that goes on from a checkpoint of this one goes by it too. For other runs, "
    "plan='CHECKPOINT.ckpt' or a file of `tspipe plan --save` gives the same plan"
)
_NOTES: dict[Source, str] = {
    "times": (
        f"the plan was made from measured times, which another run may find different. {_PIN}, and "
        "Trainer(deterministic=True) or TSPipeStrategy(costs='flops') plans without measuring"
    ),
    "flops": "the plan was made from floating-point operations, and is the same in each such run",
}


def made_for(
    options: SetupOptions, num_ranks: int, num_replicas: int, captured: Captured, num_frozen: int
) -> dict[str, Any]:
    """The conditions under which runs can go by the same plan, by names for messages."""
    atoms = {name: len(network.atoms) for name, network in captured.held.items()}
    return {
        "devices": num_ranks * num_replicas,
        "devices per pipeline": num_ranks,
        "atoms": atoms | ({"teacher": num_frozen} if num_frozen else {}),
        "calls": {name: len(captured.plan.calls_of(name)) for name in ("student", "teacher")},
        FROZEN: num_frozen,
        **{name: plain(getattr(options, name)) for name in _OPTIONS},
    }


class PlanOfRun:
    """Knows the plan of this run, and that of the run which it goes on with.

    Attributes:
        now: The plan by which stages are placed; None before the first batch.
        found: That of the checkpoint from which this run goes on; None if there is none, and once
            stages were placed.
        freezing: What that run knew of layers that freeze, as text.
    """

    def __init__(self) -> None:
        self.now: RunPlan | None = None
        self.found: RunPlan | None = None
        self.freezing: str | None = None

    def resume(self, entries: Mapping[str, Any]) -> None:
        """A checkpoint was loaded; every rank calls it.

        Args:
            entries: What its first replica's progress holds.
        """
        self.found = RunPlan.from_entries(entries)
        self.freezing = entries.get(FREEZING)

    def to_entries(self, freezing: Freezing) -> dict[str, str | None]:
        """What a checkpoint keeps of the plan, and of what the next one will be made from.

        Args:
            freezing: What is known about the step, if layers may freeze.
        """
        entries = {} if self.now is None else self.now.to_entries()
        return {**entries, FREEZING: freezing.to_json()}

    def forget(self) -> None:
        """The fit is over: the next one goes on from no checkpoint, unless one is loaded."""
        self.found = self.freezing = None

    @property
    def shares_batches(self) -> bool:
        """Whether the replicas of the checkpoint read parts of the same batches."""
        return self.freezing is not None and bool(json.loads(self.freezing)["is_shared"])

    def has_frozen(self, num_atoms: int) -> bool:
        """Whether the plan of the checkpoint, not carried out yet, is one for so many frozen atoms.

        Args:
            num_atoms: That are frozen now.
        """
        return self.found is not None and self.found.made_for.get(FROZEN) == num_atoms

    def reuse(self, wanted: Mapping[str, Any]) -> RunPlan | None:
        """The plan of the checkpoint, if it was made for what this run is; every rank asks.

        Args:
            wanted: What this run is, from :func:`made_for`.
        """
        found = self.found
        if found is None or found.differences(wanted):
            return None
        return found

    def place(self, plan: RunPlan, changes: Callable[[RunPlan], Sequence[str]] | None) -> None:
        """Stages are about to be placed; every rank calls it.

        Args:
            plan: By which.
            changes: On the rank that tells users: what this run computes differently than one that
                went by another plan; None elsewhere.
        """
        found, self.found = self.found, None
        is_first, self.now = self.now is None, plan
        if changes is None:
            return
        if found is None:
            if is_first and plan.source in _NOTES:
                rank_zero_info(_NOTES[plan.source])
        elif found.carries_out(plan):
            rank_zero_info("the plan is that of the checkpoint that the run goes on from")
        elif found.made_for.get(FROZEN) == plan.made_for.get(FROZEN):  # else layers froze just now
            _tell(found.differences(plan.made_for), changes(found))


def _tell(differences: Sequence[str], changed: Sequence[str]) -> None:
    """Say what a run that goes on by another plan has of that."""
    because = f"the checkpoint's plan was made for other {', '.join(differences)}"
    if not differences:
        because = "another plan was given (plan=) than the checkpoint has"
    if not changed:
        rank_zero_info(f"{because}. The new one changes nothing but the rounding")
        return
    warnings.warn(
        f"{because}. By the new one the run does not go on exactly as it would have: "
        f"{'; '.join(changed)}. To go on exactly, start it as the first run was started",
        stacklevel=2,
    )


def changes(
    found: RunPlan, plan: RunPlan, captured: Captured, *, repacks: bool = False
) -> list[str]:
    """What is computed differently by another plan, in words; not what is only rounded otherwise.

    Args:
        found: The plan of the run that was stopped.
        plan: That of this run.
        captured: Its step.
        repacks: Whether the number of replicas may change, within that of the devices.
    """
    before, now = found.placement, plan.placement
    if before is None or now is None:
        return ["blocks are relayed in only one of the two"]
    stages = _stages(before) != _stages(now)
    units = before.num_microbatches != now.num_microbatches
    devices = found.made_for["devices"] != plan.made_for["devices"]
    replicas = _replicas(found) != _replicas(plan) or (repacks and devices)
    was, is_ = (one.made_for.get("schedule") for one in (found, plan))
    late = [one == ASYNCHRONOUS for one in (was, is_)]
    told = {
        f"schedule={was!r} has become {is_!r}": any(late) and was != is_,
        "with schedule='1f1b' a layer's stage decides which version of its weights it reads, and "
        "together with which layers its gradients are clipped": all(late) and stages,
        f"BatchNorm normalises by micro-batches: {before.num_microbatches} per call then, "
        f"{now.num_microbatches} now": units and _normalises(captured),
        "BatchNorm normalises by the samples of a replica": replicas and _normalises(captured),
        "dropout, or whatever else in the networks is random, draws from the generator of the rank "
        "that runs it": (stages or units or replicas) and _is_random(captured),
    }
    return [text for text, is_so in told.items() if is_so]


def _stages(placement: Placement) -> tuple[Any, ...]:
    return (
        placement.num_ranks, placement.student_cuts, placement.student_ranks,
        placement.teacher_cuts, placement.teacher_ranks,
    )  # fmt: skip


def _replicas(plan: RunPlan) -> int:
    return int(plan.made_for["devices"] // plan.made_for["devices per pipeline"])


def _normalises(captured: Captured) -> bool:
    """Whether a network normalises by the statistics of what it gets."""
    modules = (part for network in captured.networks.values() for part in network.modules)
    return any(isinstance(part, _BatchNorm) and part.training for part in modules)


def _is_random(captured: Captured) -> bool:
    """Whether a network draws random numbers."""
    return any(map(network_draws, captured.networks.values(), repeat(captured.plan)))
