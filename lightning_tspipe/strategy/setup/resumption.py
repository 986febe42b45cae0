"""Where a run goes on, and by which plan: kept in checkpoints, and used by a run that resumes.

::

    first run    measure ──► plan ──► stages ──► checkpoint (weights, progress, plan)
    second run                        stages ◄── checkpoint; nothing is measured
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities import rank_zero_info
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.plain import plain
from lightning_tspipe.planning.plan import RunPlan, Source
from lightning_tspipe.random_states import RandomStates
from lightning_tspipe.runtime.batches.loading import LookaheadLoader
from lightning_tspipe.runtime.execution.engine import Engine, Rank
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.schedules.windows import ACROSS_STEPS, WINDOWS
from lightning_tspipe.strategy.setup.freezing import Freezing
from lightning_tspipe.strategy.setup.options import SetupOptions

Progress = dict[str, Any]
"""What :func:`collect` gives for a replica: plain values and tensors."""

FROZEN = "frozen atoms"
FREEZING = "freezing"
# What belongs to the next batch of the data as they were ordered.
_OF_A_BATCH = ("loader", "teacher_ahead", "teacher_late", "prediction")
"""The key of what is known where layers freeze, in a checkpoint."""

_OPTIONS = (
    "schedule", "weights", "num_microbatches", "partition", "split_backward", "memory_limit",
    "state_limit", "activation_checkpointing", "compile", "queue_depth",
)  # fmt: skip
"""What the user said that plans follow."""

_STAGES = ("num_ranks", "student_cuts", "student_ranks", "teacher_cuts", "teacher_ranks")

_PIN = (
    "A run that resumes from a checkpoint of this one uses it too. For other runs, "
    "plan='CHECKPOINT.ckpt' or a file of `tspipe plan --save` gives the same plan"
)
_NOTES: dict[Source, str] = {
    "times": (
        f"the plan was made from measured times, which another run may find different. {_PIN}, and "
        "Trainer(deterministic=True) or TSPipeStrategy(costs='flops') plans without measuring"
    ),
    "flops": "the plan was made from floating-point operations, and is the same in each such run",
}


T = TypeVar("T")


def decided_once(here: Rank, decide: Callable[[], T]) -> T:
    """What the first replica's data rank decides, on all ranks; where it fails, all of them do.

    If each rank decided by its own measurements, they would hold different stages.

    Raises:
        PartitionError: From ``decide``.
    """
    transport, replicas = here.transport, here.replicas
    planner = transport.num_ranks - 1
    found: Any = None
    if replicas.is_first:
        if transport.rank == planner:
            try:
                found = decide()
            except PartitionError as error:
                found = error
        found = transport.broadcast_object(found, planner)
    found = replicas.broadcast(found)
    if isinstance(found, PartitionError):
        raise found
    decided: T = found
    return decided


def made_for(
    options: SetupOptions, here: Rank, captured: Captured, num_frozen: int = 0
) -> dict[str, Any]:
    """The conditions under which runs can go by the same plan, by names for messages."""
    num_ranks = here.transport.num_ranks
    atoms = {name: len(network.atoms) for name, network in captured.held.items()}
    return {
        "devices": num_ranks * here.replicas.number,
        "devices per pipeline": num_ranks,
        "atoms": atoms | ({"teacher": num_frozen} if num_frozen else {}),
        "calls": {name: len(captured.plan.calls_of(name)) for name in ("student", "teacher")},
        FROZEN: num_frozen,
        **{name: plain(getattr(options, name)) for name in _OPTIONS},
    }


@dataclass
class Resumption:
    """Progress and plan of the run that this one resumes, and the plan of this one.

    Attributes:
        now: The plan by which stages are placed; None before the first batch.
        found: That of the checkpoint from which this run goes on; None if there is none, and once
            stages were placed.
        freezing: What that run knew of layers that freeze, as text.
        replicas: Where each of its replicas stopped; None once a step has gone on from there.
        here: Where this replica goes on.
        random: What this process draws on with, before any hook of an epoch or a batch.
    """

    now: RunPlan | None = None
    found: RunPlan | None = None
    freezing: str | None = None
    replicas: list[Progress] | None = None
    here: Progress | None = None
    random: RandomStates | None = None

    def load(
        self, replicas: list[Progress], replica: tuple[int, int], process: tuple[int, int]
    ) -> None:
        """A checkpoint was loaded; every rank calls it.

        Args:
            replicas: Where each replica stopped.
            replica: This one, and their number in this run.
            process: The same, of all processes: random states don't depend on the mesh.
        """
        first: Progress = replicas[0] if replicas else {}
        self.found, self.freezing = RunPlan.from_entries(first), first.get(FREEZING)
        shares = self.freezing is not None and bool(json.loads(self.freezing)["is_shared"])
        self.go_on(replicas, *replica, shares_batches=shares)
        states = [state for one in replicas for state in one["random"]]
        rank, number = process
        self.random = RandomStates.read(states[rank]) if len(states) == number else None

    def go_on(
        self, replicas: list[Progress], index: int, number: int, *, shares_batches: bool
    ) -> None:
        """Find where this replica goes on; once more where the mesh changes before the first step.

        With another number of replicas than before, samples are dealt out anew: what is known is
        the number of the step, and what was accumulated together.

        Args:
            replicas: Where each replica stopped.
            index: This one.
            number: Replicas of this run.
            shares_batches: Whether all read parts of the same batches, as where the mesh changes:
                their order stays what it was.
        """
        self.replicas = replicas
        if len(replicas) == number:
            self.here = replicas[index]
        elif replicas:
            forgotten = () if shares_batches else _OF_A_BATCH
            gradients = gradients_of_replica([one["gradients"] for one in replicas], index, number)
            self.here = {
                **between_epochs(replicas[0]),
                **dict.fromkeys(forgotten),
                "gradients": gradients,
            }
        else:
            self.here = None

    def take(self) -> Progress | None:
        """Where this replica goes on, once."""
        found, self.here, self.replicas = self.here, None, None
        return found

    def forget(self) -> None:
        """The fit is over: the next one goes on from no checkpoint, unless one is loaded."""
        self.found = self.freezing = self.replicas = self.here = self.random = None

    def to_entries(self, freezing: Freezing) -> dict[str, str | None]:
        """What a checkpoint keeps of the plan, and of what the next one will be made from.

        Args:
            freezing: What is known about the step, if layers may freeze.
        """
        entries = {} if self.now is None else self.now.to_entries()
        return {**entries, FREEZING: freezing.to_json()}

    def reuse(self, wanted: Mapping[str, Any]) -> RunPlan | None:
        """The plan of the checkpoint, if it was made for what this run is; every rank asks.

        Args:
            wanted: What this run is, from :func:`made_for`.
        """
        found = self.found
        return None if found is None or found.differences(wanted) else found

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
            rank_zero_info("the plan comes from the checkpoint that the run resumes from")
        elif found.made_for.get(FROZEN) == plan.made_for.get(FROZEN):  # else layers froze just now
            differences, changed = found.differences(plan.made_for), changes(found)
            because = "the checkpoint's plan was made for a different run: " + ", ".join(
                differences
            )
            if not differences:
                because = "another plan was given (plan=) than the checkpoint has"
            if not changed:
                rank_zero_info(f"{because}. The new plan changes only the rounding")
                return
            warnings.warn(
                f"{because}. With the new plan the run does not continue exactly as it would have: "
                f"{'; '.join(changed)}. To continue exactly, start it as the first run was started",
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
    stages = any(getattr(before, name) != getattr(now, name) for name in _STAGES)
    units = before.num_microbatches != now.num_microbatches
    devices = found.made_for["devices"] != plan.made_for["devices"]
    numbers = {
        one.made_for["devices"] // one.made_for["devices per pipeline"] for one in (found, plan)
    }
    replicas = len(numbers) > 1 or (repacks and devices)
    was, is_ = (one.made_for.get("schedule") for one in (found, plan))
    late = [one in WINDOWS for one in (was, is_)]
    synchronous = plan.made_for.get("weights") == "synchronous" or is_ in ACROSS_STEPS
    networks = captured.networks.values()
    modules = (part for network in networks for part in network.modules)
    normalises = any(isinstance(part, _BatchNorm) and part.training for part in modules)
    told = {
        f"schedule={was!r} has become {is_!r}": any(late) and was != is_,
        f"with schedule={is_!r} a layer's stage decides which version of its weights it reads, and "
        "with which layers its gradients are clipped": all(late) and stages and not synchronous,
        f"BatchNorm normalises by micro-batches: {before.num_microbatches} per call then, "
        f"{now.num_microbatches} now": units and normalises,
        "BatchNorm normalises by the samples of a replica": replicas and normalises,
        "training_step draws random numbers for the samples of a replica": replicas
        and captured.plan.draws_samples,
        "dropout, or whatever else in the networks is random, draws from the generator of the rank "
        "that runs it": (stages or units or replicas)
        and any(network.draws(captured.plan) for network in networks),
    }
    return [text for text, is_so in told.items() if is_so]


def collect(  # noqa: PLR0913 - what is saved differs
    engine: Engine,
    loader: LookaheadLoader | None,
    *,
    epoch_ended: bool,
    with_gradients: bool,
    position: tuple[int, int] | None = None,
    place: tuple[int, int] | None = None,
) -> Progress | None:
    """Collect the progress of a pipeline on the loss rank; every rank calls it.

    Args:
        engine: The engine, between two steps.
        loader: The training loader, on the data rank.
        epoch_ended: Whether the batch that is held, if any, will not be trained.
        with_gradients: Whether to collect what has been accumulated.
        position: Of the engine before the current batch, which then comes once more.
        place: The epoch, and the number of the next batch in it, to collect batches in flight;
            else their forwards are done again, in the run that goes on here too.
    """
    engine.settle(keeps_flights=place is not None)
    own: dict[str, Any] = {"random": RandomStates.now().written, "flights": engine.flights()}
    own["ahead"] = ahead = None if own["flights"] else engine.ahead()
    predicted = engine.prediction if place is not None else None
    if predicted is not None:
        own["prediction"] = predicted.state()
    if loader is not None:
        own["loader"] = loader.progress(ended=epoch_ended, repeats=position is not None)
        if position is not None:
            own["random"] = own["loader"]["now"]
    own["late"] = late = engine.late if position is None else None
    if with_gradients:
        own["gradients"] = engine.shards.gradients(engine.rank)
    gathered = engine.transport.gather_object(own, LOSS_RANK)
    if gathered is None:
        return None
    seed, step = position or engine.position
    data = gathered[engine.placement.data_rank]
    return {
        "seed": seed,
        "step": step,
        "random": [rank["random"] for rank in gathered],
        "loader": data.get("loader"),
        "gradients": _of_all_ranks(gathered, "gradients"),
        "teacher_ahead": ahead and _of_all([rank["ahead"] for rank in gathered]),
        "teacher_late": None if late is None else _of_all_ranks(gathered, "late"),
        "flights": [rank["flights"] for rank in gathered] if own["flights"] else None,
        "prediction": _joined([rank["prediction"] for rank in gathered]) if predicted else None,
        "place": None if place is None else list(place),
        "ema_in_step": engine.captured.plan.has_ema,
    }


def _of_all_ranks(gathered: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    return {name: value for rank in gathered for name, value in rank.get(key, {}).items()}


def between_epochs(first: dict[str, Any]) -> dict[str, Any]:
    """Progress for every replica of another mesh: the number of the step, the order of the data.

    Args:
        first: What :func:`collect` gave for the first replica.
    """
    loader = first["loader"] and {**first["loader"], "loader": None}
    return {**first, "loader": loader, "flights": None}


def gradients_of_replica(
    replicas: Sequence[Mapping[str, Tensor]], index: int, number: int
) -> Mapping[str, Tensor]:
    """Accumulated gradients of a replica that resumes.

    Args:
        replicas: What each replica of the run that was stopped had, by name.
        index: The replica.
        number: Replicas of this run. With another number than before each gets the mean: the update
            takes the mean over the replicas, which so is the same.
    """
    if len(replicas) == number:
        return replicas[index]
    names = {name for gradients in replicas for name in gradients}
    return {
        name: torch.stack([one[name] for one in replicas if name in one]).sum(0) / len(replicas)
        for name in names
    }


def _joined(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of a predicted teacher, of the parts on all ranks."""
    parts = {
        kind: {name: value.cpu() for state in states for name, value in state[kind].items()}
        for kind in ("before", "moves")
    }
    return {"step": states[0]["step"], **parts}


def _of_all(ahead: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What ran ahead on the first rank, with the statistics of all."""
    found: dict[int, Any] = {}
    for rank in ahead:
        for call, layers in rank["statistics"].items():
            found.setdefault(call, {}).update(layers)
    return {**ahead[0], "statistics": found}
