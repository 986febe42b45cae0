"""Saving checkpoints: one ordinary Lightning file, whatever the stages are, or a folder of shards.

Beside what Lightning keeps, the file holds under ``lightning_tspipe`` what a pipeline needs to go
on exactly where it stopped, within an epoch too. A Trainer with another strategy leaves it alone.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.runtime.faults.failures import first_line, waiting
from lightning_tspipe.runtime.faults.phases import HERE, SAVING
from lightning_tspipe.runtime.weights.materializing import GRADIENTS, is_on_meta
from lightning_tspipe.runtime.weights.ownership import Shards
from lightning_tspipe.strategy.checkpoints.files import innermost, is_usual
from lightning_tspipe.strategy.checkpoints.folders import aside, is_sharded
from lightning_tspipe.strategy.checkpoints.loading import ENTRY
from lightning_tspipe.strategy.checkpoints.writing import ShardWriter
from lightning_tspipe.strategy.setup.declared import declared_delay
from lightning_tspipe.strategy.setup.resumption import Progress, collect
from lightning_tspipe.strategy.training.optimizers import optimizer_names, plain_optimizer
from lightning_tspipe.strategy.training.steps import Parts

log = logging.getLogger("lightning_tspipe")


class CheckpointWriter:
    """Saves checkpoints.

    Args:
        parts: Whose states a checkpoint has.
        distributed: Whether a checkpoint is a folder to which each rank writes what it holds.

    Attributes:
        has_told: Whether it was said that nothing is saved of a failure.
    """

    def __init__(self, parts: Parts, *, distributed: bool | Literal["auto"]) -> None:
        self._parts = parts
        self._run = parts.run
        self._distributed = distributed
        self._writer: ShardWriter | None = None
        self._left: Progress | None = None
        self._left_shards: Shards | None = None
        self._accumulates = False
        self.has_told = False

    def begin(self, *, fits: bool) -> None:
        """A run begins.

        Raises:
            ConfigurationError: Shards are to be written, and a plugin writes checkpoints its way,
                or a callback has two sets of weights.
        """
        if fits:
            self._left = self._left_shards = None
        writes_shards = self._distributed
        if writes_shards == "auto":
            writes_shards = self._run.num_ranks > 1 and is_on_meta(self._run.module)
        plugin = innermost(self._run.checkpoint_io)
        if writes_shards and not is_usual(plugin):
            raise ConfigurationError(
                f"{type(plugin).__name__} would not be used: a sharded checkpoint is written by "
                "torch.distributed.checkpoint. Remove the plugin, or save one file through rank "
                "0's memory: TSPipeStrategy(save_distributed_checkpoint=False)"
            )
        if writes_shards and fits and self._run.followers:
            raise ConfigurationError(
                "WeightAveraging puts the averaged weights and the trained ones into one "
                "checkpoint, and shards have room for one of them. Save one file through rank 0's "
                "memory: TSPipeStrategy(save_distributed_checkpoint=False)"
            )

    # What this rank contributes

    @property
    def _saves_shards(self) -> bool:
        """Whether a checkpoint is a folder to which each rank writes what it holds."""
        if self._distributed == "auto":
            placed = self._run.placed
            return placed is not None and placed.shards.stays_spread
        return self._distributed

    def module_state(self) -> dict[str, Any]:
        """The weights: all of them on rank 0, or those of this rank."""
        run, engine = self._run, self._run.placed
        if run.is_failing:
            return {}
        HERE.interrupt(SAVING)
        if engine is not None and self._saves_shards:
            first = run.replicas.is_first  # the pipeline that is saved
            return engine.shards.own_state_dict(run.pipeline_rank) if first else {}
        if engine is not None:
            with waiting("collecting the weights"):
                return engine.shards.state_dict(run.pipeline_rank, run.transport)
        if run.is_loss_rank and is_on_meta(run.module):
            raise ConfigurationError(
                "the module was built on the meta device and has no weights yet: they come with "
                "the first training batch. Save after it"
            )
        return run.module.state_dict() if run.is_global_zero or not self._saves_shards else {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What an optimizer keeps: for all parameters on rank 0, or for those of this rank."""
        run, engine = self._run, self._run.placed
        if run.is_failing:
            return {}
        optimizer = plain_optimizer(optimizer)
        if engine is None:
            self._parts.weights.restore_optimizers()
        # After a fit the module is whole again; of the optimizers each rank still has its part.
        shards = self._left_shards if engine is None else engine.shards
        sharding = self._parts.sharding
        if not self._saves_shards:
            with waiting("collecting the optimizer's state"):
                is_whole = sharding.complete(optimizer, to_save=True)
                state = (
                    optimizer.state_dict()
                    if shards is None
                    else shards.optimizer_state(optimizer, run.transport)
                )
            sharding.drop(optimizer)
            return state if is_whole else {}
        parameters = dict(run.module.named_parameters())

        def is_mine(name: str) -> bool:
            owner = LOSS_RANK if shards is None else shards.owner(name)
            return owner == run.pipeline_rank and sharding.holds(optimizer, parameters.get(name))

        return own_optimizer_state(run.module, optimizer, is_mine)

    # Saving

    def save(self, checkpoint: dict[str, Any], path: Any, storage_options: Any) -> None:
        """Write a checkpoint, unless parts of it may be gone with other ranks, or are torn."""
        if self._run.is_failing:
            self.tell_unsaved()
            return
        if self._is_torn:
            log.warning(
                "no checkpoint was saved on this failure: it came in the middle of a batch, part "
                "of which is in gradients, statistics or the teacher. The last one is complete"
            )
            return
        HERE.interrupt(SAVING)
        with waiting(SAVING):
            self._add_progress(checkpoint)
            self._write(checkpoint, path, storage_options)
        HERE.checkpoint = str(path)
        HERE.go_on()

    def tell_unsaved(self) -> None:
        """Say once that nothing is saved of this failure."""
        if self._run.is_global_zero and self._run.has_met and not self.has_told:
            self.has_told = True
            log.warning(
                "no checkpoint was saved on this failure: other ranks hold parts of the model, "
                "and may be gone. The last checkpoint before it is complete"
            )

    def _add_progress(self, checkpoint: dict[str, Any]) -> None:
        run = self._run
        if "optimizer_states" not in checkpoint:  # with weights_only
            return
        with self._parts.evaluator.outside_validation():
            before = self._run.resumption.here if self._left is None else self._left
            found = before if run.engine is None else self._progress()
        if found is not None and run.is_global_zero and run.resumption.now is not None:
            found |= run.resumption.to_entries(run.freezing)
        if run.is_loss_rank:
            # Of shards no rank has the teacher that a callback would go on from.
            declared = None if self._saves_shards else declared_delay(run.trainer)
            _add(checkpoint, run.replicas.gather(found), declared)
        self._parts.results.note_stopped(checkpoint)

    def _write(self, checkpoint: dict[str, Any], given: Any, storage_options: Any) -> None:
        run = self._run
        path = Path(run.broadcast(given))
        if self._saves_shards:
            self._write_shards(checkpoint, path, storage_options, is_shared=str(path) == str(given))
        elif run.is_global_zero:
            if is_sharded(path):
                shutil.rmtree(aside(path), ignore_errors=True)
                path.rename(aside(path))
            files = run.checkpoint_io
            files.save_checkpoint(checkpoint, given, storage_options=storage_options)
            shutil.rmtree(aside(path), ignore_errors=True)

    def _write_shards(
        self, checkpoint: dict[str, Any], path: Path, storage_options: Any, *, is_shared: bool
    ) -> None:
        if storage_options is not None or ":/" in str(path):  # Path makes one of two slashes
            raise ConfigurationError(
                f"{str(path)!r}: a sharded checkpoint needs a folder that all ranks can see, and "
                "takes no storage_options"
            )
        run = self._run
        if run.num_nodes > 1 and not run.reduce_boolean_decision(is_shared):
            raise ConfigurationError(
                f"{str(path)!r}: every rank was given a folder of its own (as by Ray's "
                "RayTrainReportCallback), but a sharded checkpoint needs one that the ranks of all "
                "machines can see. Save one file through rank 0's memory, by "
                "save_distributed_checkpoint=False; or save with ModelCheckpoint to a shared folder"
            )
        states = {"model": checkpoint.pop("state_dict")}
        if "optimizer_states" in checkpoint:
            shards = self._left_shards if run.placed is None else run.placed.shards
            accumulated: dict[str, Any] = {}
            if shards is not None and self._accumulates:
                accumulated[str(run.replica)] = shards.gradients(run.pipeline_rank)
            states[GRADIENTS] = accumulated
            for index, state in enumerate(checkpoint["optimizer_states"]):
                states[f"optimizer_{index}"] = state
            checkpoint["optimizer_states"] = []  # that there is no state yet is one too
        if self._writer is None:
            self._writer = ShardWriter(run.timeout, is_connected=run.total_ranks > 1)
        goes_on = isinstance(run.checkpoint_io, run.namespace.async_checkpoint_io)
        waits = run.engine is None or not goes_on
        self._writer.write(states, checkpoint, path, waits=waits)
        if waits:
            run.barrier()

    def remove(self, path: Any) -> None:
        """Remove a checkpoint; not before the one that replaces it is complete."""

        def remove() -> None:
            if self._run.is_global_zero:
                self._run.checkpoint_io.remove_checkpoint(path)

        if self._writer is not None and self._writer.is_busy:
            self._writer.do(remove)
        else:
            remove()

    # The end of a fit, and of a run

    def note_end(self) -> None:
        """A training ends: what is saved after it must be something to go on from."""
        if self._run.engine is not None:
            self._left = self._progress()
            self._left_shards = self._run.engine.shards
        if self._writer is not None:
            self._writer.wait()

    def end_without_batches(self) -> None:
        """A fit went on from a checkpoint of its end: what is saved now is what was loaded."""
        if self._run.engine is None and self._run.resumption.here is not None:
            self._left = self._run.resumption.here
            self._parts.weights.restore_optimizers()

    def end_writing(self, *, waits: bool) -> None:
        """Wait for what is being written.

        Args:
            waits: Whether for other ranks' shards too; not if they may be gone.

        Raises:
            Exception: One was not written, and no rank has ended yet; later it is too late to say.
        """
        writer, self._writer = self._writer, None
        if writer is not None and waits:
            writer.wait()
        elif writer is not None:
            writer.abandon()
        try:
            self._run.checkpoint_io.teardown()
        except Exception as error:
            if self._run.trainer.interrupted:
                if not self.has_told:
                    log.warning("a checkpoint was not saved: %s", first_line(error))
                return
            raise

    # Where the pipeline is

    @property
    def _fails_within_batch(self) -> bool:
        """Whether a run of one device ends in the middle of a batch, which then comes once more."""
        trainer = self._run.trainer
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        return (
            self._run.total_ranks == 1
            and trainer.interrupted
            and self._parts.data.loader is not None
            and batches.processed < batches.ready
        )

    @property
    def _is_torn(self) -> bool:
        """Whether it ends so far within the batch that this can't come once more as it was.

        Something of it is in gradients that are accumulated, in a teacher that the step has moved,
        or in BatchNorm's statistics; or what a teacher that runs ahead had computed for it is gone.
        """
        run, engine = self._run, self._run.engine
        if engine is None or not self._parts.data.has_begun or not self._fails_within_batch:
            return False
        accumulates = run.trainer.accumulate_grad_batches > 1
        counts = any(isinstance(m, _BatchNorm) and m.training for m in run.module.modules())
        is_late = engine.position != self._parts.data.position and engine.ahead() is not None
        return accumulates or counts or is_late or engine.captured.plan.has_ema

    def _progress(self) -> Progress | None:
        engine, loop = self._run.engine, self._run.trainer.fit_loop
        assert engine is not None
        repeats = self._fails_within_batch
        ended = loop.epoch_loop._num_ready_batches_reached() and not repeats  # noqa: SLF001
        # The epoch that has begun last; Trainer.current_epoch moves on before its last hooks.
        epoch = loop.epoch_progress.current.ready
        batches: Any = loop.epoch_loop.batch_progress.current
        coming = batches.processed if repeats else batches.ready
        place = (epoch, 0) if ended else (epoch - 1, coming)
        self._accumulates = loop._should_accumulate() or bool(self._parts.manual.waiting)  # noqa: SLF001
        return collect(
            engine,
            self._parts.data.loader,
            epoch_ended=ended,
            position=self._parts.data.position if repeats else None,
            with_gradients=self._accumulates and not self._saves_shards,
            place=None if self._saves_shards else place,
        )


def own_optimizer_state(
    module: nn.Module, optimizer: Optimizer, is_mine: Callable[[str], bool]
) -> dict[str, Any]:
    """An optimizer's state for some parameters, keyed by their names.

    Torch's optimizers load it as it is: they take the names of ``param_groups`` for keys.
    """
    own = optimizer.state_dict()
    names = optimizer_names(module, optimizer)
    rest: Iterator[str] = iter(names)
    groups = [{**g, "params": [next(rest) for _ in g["params"]]} for g in own["param_groups"]]
    state = {
        name: own["state"][place]
        for place, name in enumerate(names)
        if place in own["state"] and is_mine(name)
    }
    return {"state": state, "param_groups": groups}


def _add(checkpoint: dict[str, Any], replicas: list[dict[str, Any] | None], declared: Any) -> None:
    """Add where the pipelines are, and what other strategies need to go on from there.

    Args:
        checkpoint: Lightning's; changed in place.
        replicas: What ``collect`` gave for each; None if there is nothing to go on from.
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
