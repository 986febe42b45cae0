"""Progress of a pipeline: what a checkpoint needs beside Lightning's own state.

Collected from all ranks between two steps, and handed back before the first step of another run,
which may have other stages. Everything in it is a plain value or a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_tspipe.capture.plan import ValueRef
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.runtime.batches.random_states import RandomStates
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.execution.lookahead import Ahead

if TYPE_CHECKING:
    from lightning_tspipe.runtime.batches.loading import LookaheadLoader

Place = tuple[int, int]
Progress = dict[str, Any]
"""What :func:`collect` gives for a replica."""


class Resumption:
    """Progress of the run that this one resumes.

    Attributes:
        replicas: Where each of its replicas stopped; None once a step has gone on from there.
        here: Where this replica goes on.
        random: What this process draws on with, before any hook of an epoch or a batch.
    """

    def __init__(self) -> None:
        self.replicas: list[Progress] | None = None
        self.here: Progress | None = None
        self.random: RandomStates | None = None

    def go_on(
        self, replicas: list[Progress], index: int, number: int, *, shares_batches: bool
    ) -> None:
        """A checkpoint was loaded, or the mesh changes before the first step.

        Args:
            replicas: Where each replica stopped.
            index: This one.
            number: Replicas of this run.
            shares_batches: Whether all read parts of the same batches, as where the mesh changes:
                their order stays what it was.
        """
        find = of_shared_batches if shares_batches else of_replica
        self.replicas, self.here = replicas, find(replicas, index, number)

    def take(self) -> Progress | None:
        """Where this replica goes on, once."""
        found, self.here, self.replicas = self.here, None, None
        return found

    def forget(self) -> None:
        """The run is over."""
        self.replicas = self.here = self.random = None


def collect(  # noqa: PLR0913 - what is saved differs
    engine: Engine,
    loader: LookaheadLoader | None,
    *,
    epoch_ended: bool,
    with_gradients: bool,
    position: tuple[int, int] | None = None,
    place: Place | None = None,
) -> dict[str, Any] | None:
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
    own: dict[str, Any] = {"random": RandomStates.now().to_dict(), "flights": engine.flights()}
    ahead = None if own["flights"] else engine.ahead()
    if ahead is not None:
        own["statistics"] = ahead.statistics
    predicted = engine.prediction if place is not None else None
    if predicted is not None:
        own["prediction"] = predicted.state()
    if loader is not None:
        own["loader"] = loader.progress(ended=epoch_ended, repeats=position is not None)
        if position is not None:
            own["random"] = own["loader"]["now"]
    if with_gradients:
        own["gradients"] = engine.shards.gradients(engine.rank)
    gathered = engine.transport.gather_object(own, LOSS_RANK)
    if gathered is None:
        return None
    packed = None
    if ahead is not None:
        packed = _pack(ahead, [rank["statistics"] for rank in gathered])
    seed, step = position or engine.position
    data = gathered[engine.placement.data_rank]
    return {
        "seed": seed,
        "step": step,
        "random": [rank["random"] for rank in gathered],
        "loader": data.get("loader"),
        "gradients": {k: v for rank in gathered for k, v in rank.get("gradients", {}).items()},
        "teacher_ahead": packed,
        "flights": [rank["flights"] for rank in gathered] if own["flights"] else None,
        "prediction": _joined([rank["prediction"] for rank in gathered]) if predicted else None,
        "place": None if place is None else list(place),
        "ema_in_step": engine.captured.plan.has_ema,
    }


def restore(engine: Engine, progress: dict[str, Any], place: Place, *, runs_ahead: bool) -> None:
    """Bring an engine that was just placed to where another one stopped; every rank calls it.

    Args:
        engine: The engine.
        progress: What :func:`collect` gave, on every rank.
        place: The epoch, and the number of the batch in it that comes.
        runs_ahead: Whether a teacher may be late in this run.
    """
    packed = progress["teacher_ahead"] if runs_ahead else None
    ahead = _unpack(packed, engine.device) if packed is not None else None
    is_there = progress.get("place") == list(place)
    in_flight = progress.get("flights") if is_there else None
    engine.resume(
        (progress["seed"], progress["step"]), ahead, in_flight, progress.get("prediction")
    )
    engine.shards.put_gradients(progress["gradients"], engine.rank)


def random_of(replicas: list[dict[str, Any]], rank: int, number: int) -> RandomStates | None:
    """Random states of a process, whatever mesh it is in; None with another number of them.

    Args:
        replicas: What :func:`collect` gave for each replica of the run that was stopped.
        rank: The process, over all replicas.
        number: Processes of this run.
    """
    states = [state for one in replicas for state in one["random"]]
    return RandomStates.from_dict(states[rank]) if len(states) == number else None


def of_replica(replicas: list[dict[str, Any]], index: int, number: int) -> dict[str, Any] | None:
    """Progress from which a replica resumes.

    Args:
        replicas: What :func:`collect` gave for each replica of the run that was stopped.
        index: The replica.
        number: Replicas of this run; with another number than before, samples are dealt out anew,
            and only the number of the step is known, and what was accumulated together.
    """
    if not replicas:
        return None
    if len(replicas) == number:
        return replicas[index]
    gradients = gradients_of_replica([one["gradients"] for one in replicas], index, number)
    nothing: dict[str, Any] = {
        "loader": None, "teacher_ahead": None, "flights": None, "prediction": None
    }  # fmt: skip
    return {**replicas[0], **nothing, "gradients": gradients}


def of_shared_batches(
    replicas: list[dict[str, Any]], index: int, number: int
) -> dict[str, Any] | None:
    """Progress from which a replica resumes, if all of them read parts of the same batches.

    Args:
        replicas: What :func:`collect` gave for each replica of the run that was stopped.
        index: The replica.
        number: Replicas of this run; with another number than before, each reads another part.
    """
    if not replicas or len(replicas) == number:
        return of_replica(replicas, index, number)
    gradients = gradients_of_replica([one["gradients"] for one in replicas], index, number)
    return {**between_epochs(replicas[0]), "gradients": gradients}


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


def repeats_data(checkpoint: dict[str, Any], progress: dict[str, Any] | None) -> bool:
    """Whether nothing tells where in its epoch a loader was.

    Args:
        checkpoint: Lightning's.
        progress: What :func:`of_replica` found in it.
    """
    loops = checkpoint["loops"]["fit_loop"]
    batches = loops["epoch_loop.batch_progress"]
    within = batches["current"]["completed"] > 0 and not batches["is_last_batch"]
    has_state = bool(loops["state_dict"].get("combined_loader"))
    is_known = progress is not None and progress["loader"] is not None
    return within and not has_state and not is_known


def leave_ended_epoch(loop: Any) -> None:
    """Begin a new epoch where a run goes on from behind the last batch, or the end, of one.

    Lightning 2.6 does that only for checkpoints of an epoch's end, and only without ``max_steps``.
    With it, the ended epoch goes on and ends again after one batch. From behind a last batch, the
    next epoch is trained and never counted as begun: in a checkpoint of it, its place is lost.

    Args:
        loop: The Trainer's ``fit_loop``, when it is about to run.
    """
    progress = loop.epoch_progress
    if loop.restarted_on_epoch_end:
        progress.increment_completed()
    is_behind_last = progress.current.processed == progress.current.started
    is_left = loop.restarted_on_epoch_end or (loop.restarted_mid_epoch and is_behind_last)
    if not (is_left or loop.resumed_on_epoch_end):
        return
    loop.reset_restart_stage()
    for each in (loop, loop.epoch_loop, *_loops_in(loop.epoch_loop)):
        each._restarting = False  # noqa: SLF001 - its setter would say otherwise
    # Of a loader without a length it has fetched a batch, before what hooks draw: once more.
    loop._resuming_from_checkpoint = False  # noqa: SLF001


def _loops_in(loop: Any) -> list[Any]:
    return [part for part in vars(loop).values() if hasattr(part, "_restarting")]


@contextmanager
def late_teacher(module: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """While inside, the tensors that this rank holds have other values.

    Args:
        module: The LightningModule.
        weights: Values by dotted name. Buffers of modules in train mode keep their own: their
            forwards update them.
    """
    swapped = []
    for name, value in weights.items():
        path, _, key = name.rpartition(".")
        owner = module.get_submodule(path)
        tensor = getattr(owner, key)
        if not tensor.is_meta and not (key in owner._buffers and owner.training):  # noqa: SLF001
            swapped.append((tensor, tensor.data))
            tensor.data = value.to(tensor.device)
    try:
        yield
    finally:
        for tensor, data in swapped:
            tensor.data = data


def _joined(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of a predicted teacher, of the parts on all ranks."""
    parts = {
        kind: {name: value.cpu() for state in states for name, value in state[kind].items()}
        for kind in ("before", "moves")
    }
    return {"step": states[0]["step"], **parts}


def _pack(ahead: Ahead, statistics: list[dict[int, Any]]) -> dict[str, Any]:
    return {
        "batch_sizes": list(ahead.batch_sizes),
        "outputs": [
            [call, ref.position, ref.slot, tensor.detach().cpu().clone()]
            for (call, ref), tensor in ahead.outputs.items()
        ],
        "statistics": {
            call: {
                name: [[count, mean.cpu(), variance.cpu()] for count, mean, variance in parts]
                for rank in statistics
                for name, parts in rank.get(call, {}).items()
            }
            for call in sorted({call for rank in statistics for call in rank})
        },
    }


def _unpack(packed: dict[str, Any], device: torch.device) -> Ahead:
    outputs = {(call, ValueRef(link, slot)): value for call, link, slot, value in packed["outputs"]}
    statistics = {
        call: {
            name: [(count, mean.to(device), var.to(device)) for count, mean, var in parts]
            for name, parts in layers.items()
        }
        for call, layers in packed["statistics"].items()
    }
    return Ahead(tuple(packed["batch_sizes"]), outputs, statistics)
