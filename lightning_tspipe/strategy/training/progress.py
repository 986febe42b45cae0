"""Progress of a pipeline: what a checkpoint needs beside Lightning's own state.

Collected from all ranks between two steps, and handed back before the first step of another run,
which may have other stages. Everything in it is a plain value or a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.runtime.batches.random_states import RandomStates
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.strategy.setup.resumption import Progress

if TYPE_CHECKING:
    from lightning_tspipe.runtime.batches.loading import LookaheadLoader

Place = tuple[int, int]


def collect(  # noqa: PLR0913 - what is saved differs
    engine: Engine,
    loader: LookaheadLoader | None,
    *,
    epoch_ended: bool,
    with_gradients: bool,
    position: tuple[int, int] | None = None,
    place: Place | None = None,
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
        "gradients": {k: v for rank in gathered for k, v in rank.get("gradients", {}).items()},
        "teacher_ahead": ahead and _of_all([rank["ahead"] for rank in gathered]),
        "flights": [rank["flights"] for rank in gathered] if own["flights"] else None,
        "prediction": _joined([rank["prediction"] for rank in gathered]) if predicted else None,
        "place": None if place is None else list(place),
        "ema_in_step": engine.captured.plan.has_ema,
    }


def random_of(replicas: list[dict[str, Any]], rank: int, number: int) -> RandomStates | None:
    """Random states of a process, whatever mesh it is in; None with another number of them.

    Args:
        replicas: What :func:`collect` gave for each replica of the run that was stopped.
        rank: The process, over all replicas.
        number: Processes of this run.
    """
    states = [state for one in replicas for state in one["random"]]
    return RandomStates(states[rank]) if len(states) == number else None


def repeats_data(checkpoint: dict[str, Any], progress: dict[str, Any] | None) -> bool:
    """Whether nothing tells where in its epoch a loader was.

    Args:
        checkpoint: Lightning's.
        progress: Where the run goes on, as found in it.
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
    for each in (loop, loop.epoch_loop, *vars(loop.epoch_loop).values()):
        if hasattr(each, "_restarting"):
            each._restarting = False  # noqa: SLF001 - its setter would say otherwise
    # Of a loader without a length it has fetched a batch, before what hooks draw: once more.
    loop._resuming_from_checkpoint = False  # noqa: SLF001


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


def _of_all(ahead: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What ran ahead on the first rank, with the statistics of all."""
    found: dict[int, Any] = {}
    for rank in ahead:
        for call, layers in rank["statistics"].items():
            found.setdefault(call, {}).update(layers)
    return {**ahead[0], "statistics": found}
