"""Checkpoints: one ordinary Lightning file, whatever the stages are.

Beside what Lightning keeps, the file holds under ``lightning_tspipe`` what a pipeline needs to go
on exactly where it stopped, within an epoch too. A Trainer with another strategy leaves it alone.
"""

from __future__ import annotations

import warnings
from typing import Any

from typing_extensions import override

from lightning_tspipe.strategy import progress
from lightning_tspipe.strategy.sharded import ShardedHooks
from lightning_tspipe.strategy.shards import GRADIENTS

ENTRY = "lightning_tspipe"
REPEATED = (
    "the checkpoint was saved within an epoch, by another strategy or with another number of "
    "replicas, and its training loader has no state: the rest of the epoch reads batches from its "
    "beginning. Go on from the end of an epoch, or use a loader with state_dict and load_state_dict"
)


class CheckpointHooks(ShardedHooks):
    """The part of the strategy that saves and loads."""

    _left: dict[str, Any] | None
    _resumed_replicas: list[dict[str, Any]] | None

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        if "optimizer_states" in checkpoint:  # not with weights_only
            with self.outside_validation():
                found = self._left if self._engine is None else self._progress()
            if self.is_loss_rank:
                # Of shards no rank has the teacher that a callback would go on from.
                declared = None if self.saves_shards else self._declared_delay
                _add(checkpoint, self.replicas.gather(found), declared)
            self.heads_here.note_stopped(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        # Of shards that were made one file, in which nothing that is empty is left.
        apart = checkpoint.pop(GRADIENTS, {})
        for state in checkpoint.get("optimizer_states", ()):
            state.setdefault("state", {})
        if self._trainer.state.fn == "fit":
            replicas = checkpoint.get(ENTRY, [])
            for index, gradients in apart.items():
                replicas[int(index)]["gradients"] = gradients
            self._resumed = progress.of_replica(replicas, self.replica, self.num_replicas)
            self._resumed_replicas = replicas
            self._random = progress.random_of(replicas, self.global_rank, self.total_ranks)
            # A callback that changes the mesh will set up the one of the checkpoint.
            repacks = any(key.startswith("FreezeAndRepack") for key in checkpoint["callbacks"])
            repeats = progress.repeats_data(checkpoint, self._resumed)
            if self.is_global_zero and repeats and not repacks:
                warnings.warn(REPEATED, stacklevel=2)
        return checkpoint

    @override
    def reconnect(self, num_ranks: int) -> None:
        super().reconnect(num_ranks)
        if self._resumed_replicas is not None and self._engine is None:
            replicas = self._resumed_replicas
            self._resumed = progress.of_replica(replicas, self.replica, self.num_replicas)
            if len(replicas) > 0 and len(replicas) != self.num_replicas:
                # The mesh changes between two epochs, and the next one's order stays what it was.
                self._resumed = progress.between_epochs(replicas[0])

    @override
    def on_train_end(self) -> None:
        if self._engine is not None:
            # What is saved after the fit must be something to go on from.
            self._left = self._progress()
            self._left_shards = self._engine.shards
        super().on_train_end()

    def _progress(self) -> dict[str, Any] | None:
        assert self._engine is not None
        loop = self._trainer.fit_loop
        ended = loop.epoch_loop._num_ready_batches_reached()  # noqa: SLF001
        # The epoch that has begun last; Trainer.current_epoch moves on before its last hooks.
        epoch = loop.epoch_progress.current.ready
        coming = loop.epoch_loop.batch_progress.current.ready
        place = (epoch, 0) if ended else (epoch - 1, coming)
        self._accumulates = loop._should_accumulate() or bool(self._manual.commands.waiting)  # noqa: SLF001
        return progress.collect(
            self._engine,
            self._loader,
            epoch_ended=ended,
            with_gradients=self._accumulates and not self.saves_shards,
            place=None if self.saves_shards else place,
        )


def _add(checkpoint: dict[str, Any], replicas: list[dict[str, Any] | None], declared: Any) -> None:
    """Add where the pipelines are, and what other strategies need to go on from there.

    Args:
        checkpoint: Lightning's; changed in place.
        replicas: What ``progress.collect`` gave for each; None if there is nothing to go on from.
        declared: The ``DelayedTeacherUpdate`` callback, if there is one.
    """
    loops = checkpoint["loops"]["fit_loop"]["state_dict"]
    loops.pop("combined_loader", None)
    first = replicas[0]
    if first is None:
        return
    checkpoint[ENTRY] = replicas
    loader = (first["loader"] or {}).get("loader")
    if loader is not None:
        # Where Lightning keeps it, so that every strategy resumes a loader with a state.
        loops["combined_loader"] = [loader]
    if first["teacher_ahead"] is not None and first["ema_in_step"] and declared is not None:
        # The next EMA comes in the next step: until then the teacher is still the late one.
        names = tuple(f"{name}." for name in declared.teacher)
        weights = {k: v for k, v in checkpoint["state_dict"].items() if k.startswith(names)}
        checkpoint["callbacks"][declared.state_key] = {"snapshot": weights}
