"""Checkpoints: one ordinary Lightning file, whatever the stages are.

Beside what Lightning keeps, the file holds under ``lightning_tspipe`` what a pipeline needs to go
on exactly where it stopped, within an epoch too. A Trainer with another strategy leaves it alone.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lightning_tspipe.strategy.checkpoints import progress
from lightning_tspipe.strategy.checkpoints.folders import IS_SUMMED
from lightning_tspipe.strategy.checkpoints.sharded import ShardedHooks
from lightning_tspipe.strategy.checkpoints.shards import GRADIENTS

ENTRY = "lightning_tspipe"
REPEATED = (
    "the checkpoint was saved within an epoch, by another strategy or with another number of "
    "replicas, and its training loader has no state: the rest of the epoch reads batches from its "
    "beginning. Go on from the end of an epoch, or use a loader with state_dict and load_state_dict"
)


class CheckpointHooks(ShardedHooks):
    """The part of the strategy that saves and loads."""

    _left: dict[str, Any] | None
    _position: tuple[int, int] | None
    _resumed_replicas: list[dict[str, Any]] | None

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        if "optimizer_states" in checkpoint:  # not with weights_only
            with self.outside_validation():
                before = self._resumed if self._left is None else self._left
                found = before if self._engine is None else self._progress()
            if found is not None and self.is_global_zero and self.plan_of_run.now is not None:
                found |= self.plan_of_run.to_entries(self.repacking.freezing)
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
        checkpoint.pop(IS_SUMMED, None)
        for state in checkpoint.get("optimizer_states", ()):
            state.setdefault("state", {})
        if self._trainer.state.fn == "fit":
            replicas = checkpoint.get(ENTRY, [])
            for index, gradients in apart.items():
                replicas[int(index)]["gradients"] = gradients
            self.plan_of_run.resume(replicas[0] if replicas else {})
            self._go_on_with(replicas, is_shared=self.plan_of_run.shares_batches)
            self._random = progress.random_of(replicas, self.global_rank, self.total_ranks)
            repeats = progress.repeats_data(checkpoint, self._resumed)
            if self.is_global_zero and repeats:
                warnings.warn(REPEATED, stacklevel=2)
        return checkpoint

    @override
    def reconnect(self, num_ranks: int) -> None:
        super().reconnect(num_ranks)
        if self._resumed_replicas is not None and self._engine is None:
            self._go_on_with(self._resumed_replicas, is_shared=True)

    def _go_on_with(self, replicas: list[dict[str, Any]], *, is_shared: bool) -> None:
        """This replica goes on with what those of the checkpoint were at.

        Args:
            replicas: What ``progress.collect`` gave for each.
            is_shared: Whether all read parts of the same batches, as where the mesh changes: their
                order stays what it was.
        """
        find = progress.of_shared_batches if is_shared else progress.of_replica
        self._resumed_replicas = replicas
        self._resumed = find(replicas, self.replica, self.num_replicas)

    @override
    def on_train_end(self) -> None:
        if self._engine is not None:
            # What is saved after the fit must be something to go on from.
            self._left = self._progress()
            self._left_shards = self._engine.shards
        super().on_train_end()

    def end_without_batches(self) -> None:
        """A fit went on from a checkpoint of its end: what is saved now is what was loaded."""
        if self._engine is None and self._resumed is not None:
            self._left = self._resumed
            self.restore_optimizers()

    @property
    def fails_within_batch(self) -> bool:
        """Whether a run of one device ends in the middle of a batch, which then comes once more."""
        batches: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        return (
            self.total_ranks == 1
            and self._trainer.interrupted
            and self._loader is not None
            and batches.processed < batches.ready
        )

    @property
    def is_torn(self) -> bool:
        """Whether it ends so far within the batch that this can't come once more as it was.

        Something of it is in gradients that are accumulated, in a teacher that the step has moved,
        or in BatchNorm's statistics; or what a teacher that runs ahead had computed for it is gone.
        """
        engine = self._engine
        if engine is None or not self._has_begun or not self.fails_within_batch:
            return False
        accumulates = self._trainer.accumulate_grad_batches > 1
        counts = any(isinstance(m, _BatchNorm) and m.training for m in self._module.modules())
        is_late = engine.position != self._position and engine.ahead() is not None
        return accumulates or counts or is_late or engine.captured.plan.has_ema

    def _progress(self) -> dict[str, Any] | None:
        assert self._engine is not None
        loop = self._trainer.fit_loop
        repeats = self.fails_within_batch
        ended = loop.epoch_loop._num_ready_batches_reached() and not repeats  # noqa: SLF001
        # The epoch that has begun last; Trainer.current_epoch moves on before its last hooks.
        epoch = loop.epoch_progress.current.ready
        batches: Any = loop.epoch_loop.batch_progress.current
        coming = batches.processed if repeats else batches.ready
        place = (epoch, 0) if ended else (epoch - 1, coming)
        self._accumulates = loop._should_accumulate() or bool(self._manual.commands.waiting)  # noqa: SLF001
        return progress.collect(
            self._engine,
            self._loader,
            epoch_ended=ended,
            position=self._position if repeats else None,
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
