"""Saving and loading: one ordinary Lightning file, whatever the stages are, or a folder of shards.

Beside what Lightning keeps, a checkpoint holds under ``lightning_tspipe`` what a pipeline needs to
go on exactly where it stopped, within an epoch too. A Trainer with another strategy leaves it
alone.

A checkpoint of shards is a folder in the layout of Lightning's ``FSDPStrategy``: what
``torch.distributed.checkpoint`` writes (``model``, ``optimizer_0``, ...), and ``meta.pt`` with the
rest. ``python -m lightning.pytorch.utilities.consolidate_checkpoint FOLDER`` makes one file of it.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.runtime.faults.failures import first_line, waiting
from lightning_tspipe.runtime.faults.phases import HERE, SAVING
from lightning_tspipe.runtime.weights.materializing import GRADIENTS, Source, is_on_meta
from lightning_tspipe.runtime.weights.ownership import Shards
from lightning_tspipe.strategy.checkpoints import files, folders
from lightning_tspipe.strategy.checkpoints.writing import ShardWriter
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.training import progress
from lightning_tspipe.strategy.training.optimizers import optimizer_names, plain_optimizer
from lightning_tspipe.strategy.training.progress import Progress
from lightning_tspipe.strategy.training.steps import Parts

log = logging.getLogger("lightning_tspipe")

ENTRY = "lightning_tspipe"
"""In a checkpoint, what a pipeline needs beside Lightning's own to go on where it stopped."""
_REPEATED = (
    "the checkpoint was saved within an epoch, by another strategy or with another number of "
    "replicas, and its training loader has no state: the rest of the epoch reads batches from its "
    "beginning. Go on from the end of an epoch, or use a loader with state_dict and load_state_dict"
)


class CheckpointedRun(Run):
    """A run that saves checkpoints, and goes on from them.

    Attributes:
        has_told_unsaved: Whether it was said that nothing is saved of a failure.
    """

    has_told_unsaved = False
    _parts: Parts
    """Whose states a checkpoint has."""
    _writer: ShardWriter | None = None
    _left: Progress | None = None
    """Where a training ended."""
    _left_shards: Shards | None = None
    _accumulates = False

    @property  # type: ignore[explicit-override] # of the setter; it is below
    @override
    def checkpoint_io(self) -> Any:
        """How files are written: whole or not at all, unless the user brings a way."""
        found: Any = self._checkpoint_io
        if found is None:
            found = self._checkpoint_io = files.WholeFiles()
        elif not getattr(found, "_base_checkpoint_io_configured", True):
            found.checkpoint_io = files.WholeFiles()
        return found

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    def begin_saving(self, *, fits: bool) -> None:
        """A run begins.

        Raises:
            ConfigurationError: Shards are to be written, and a plugin writes checkpoints its way.
        """
        if fits:
            self._left = self._left_shards = None
        writes_shards = self.options.save_distributed_checkpoint
        if writes_shards == "auto":
            writes_shards = self.num_ranks > 1 and is_on_meta(self.module)
        plugin = files.innermost(self.checkpoint_io)
        if writes_shards and not files.is_usual(plugin):
            raise ConfigurationError(
                f"{type(plugin).__name__} would not be asked: a checkpoint of shards is written by "
                "torch.distributed.checkpoint. Leave the plugin out, or save one file through rank "
                "0's memory: TSPipeStrategy(save_distributed_checkpoint=False)"
            )

    # What this rank contributes

    @property
    def _saves_shards(self) -> bool:
        """Whether a checkpoint is a folder to which each rank writes what it holds."""
        chosen = self.options.save_distributed_checkpoint
        if chosen == "auto":
            return self.placed is not None and self.placed.shards.stays_spread
        return chosen

    @property
    def _shards(self) -> Shards | None:
        """Which rank has what; None if all of it is where Lightning would have it.

        After a fit the module is whole again; of the optimizers each rank still has its part.
        """
        return self._left_shards if self.placed is None else self.placed.shards

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights: all of them on rank 0, or those of this rank."""
        if self.is_failing:
            return {}
        HERE.interrupt(SAVING)
        engine = self.placed
        if engine is not None and self._saves_shards:
            first = self.replicas.is_first  # the pipeline that is saved
            return engine.shards.own_state_dict(self.pipeline_rank) if first else {}
        if engine is not None:
            with waiting("collecting the weights"):
                return engine.shards.state_dict(self.pipeline_rank, self.transport)
        if self.is_loss_rank and is_on_meta(self.module):
            raise ConfigurationError(
                "the module was built on the meta device and has no weights yet: they come with "
                "the first training batch. Save after it"
            )
        return self.module.state_dict() if self.is_global_zero or not self._saves_shards else {}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What an optimizer keeps: for all parameters on rank 0, or for those of this rank."""
        if self.is_failing:
            return {}
        optimizer = plain_optimizer(optimizer)
        if self.placed is None:
            self._parts.weights.restore_optimizers()
        shards = self._shards
        if not self._saves_shards:
            if shards is None:
                return optimizer.state_dict()
            with waiting("collecting the optimizer's state"):
                return shards.optimizer_state(optimizer, self.transport)

        def is_mine(name: str) -> bool:
            owner = LOSS_RANK if shards is None else shards.owner(name)
            return self.replicas.is_first and owner == self.pipeline_rank

        return own_optimizer_state(self.module, optimizer, is_mine)

    # Saving

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint, unless parts of it may be gone with other ranks, or are torn."""
        if self.is_failing:
            self.tell_unsaved()
            return
        if self._is_torn:
            log.warning(
                "no checkpoint of this failure: it came in the middle of a batch, of which "
                "gradients, statistics or the teacher hold a part already. The last one is complete"
            )
            return
        HERE.interrupt(SAVING)
        with waiting(SAVING):
            self._add_progress(checkpoint)
            self._write(checkpoint, filepath, storage_options)
        HERE.checkpoint = str(filepath)
        HERE.go_on()

    def tell_unsaved(self) -> None:
        """Say once that nothing is saved of this failure."""
        if self.is_global_zero and self.has_met and not self.has_told_unsaved:
            self.has_told_unsaved = True
            log.warning(
                "no checkpoint of this failure: other ranks hold parts of the model, and they may "
                "be gone. The last checkpoint before it is complete"
            )

    def _add_progress(self, checkpoint: dict[str, Any]) -> None:
        if "optimizer_states" not in checkpoint:  # with weights_only
            return
        parts = self._parts
        with parts.evaluator.outside_validation():
            before = parts.resumption.here if self._left is None else self._left
            found = before if self.engine is None else self._progress()
        if found is not None and self.is_global_zero and self.plan.now is not None:
            found |= self.plan.to_entries(parts.repacking.freezing)
        if self.is_loss_rank:
            # Of shards no rank has the teacher that a callback would go on from.
            declared = None if self._saves_shards else parts.data.declared_delay
            _add(checkpoint, self.replicas.gather(found), declared)
        parts.heads.note_stopped(checkpoint)

    def _write(self, checkpoint: dict[str, Any], given: Any, storage_options: Any) -> None:
        path = Path(self.broadcast(given))
        if self._saves_shards:
            self._write_shards(checkpoint, path, storage_options)
        elif self.is_global_zero:
            if folders.is_sharded(path):
                shutil.rmtree(folders.aside(path), ignore_errors=True)
                path.rename(folders.aside(path))
            super().save_checkpoint(checkpoint, given, storage_options)
            shutil.rmtree(folders.aside(path), ignore_errors=True)

    def _write_shards(self, checkpoint: dict[str, Any], path: Path, storage_options: Any) -> None:
        if storage_options is not None or ":/" in str(path):  # Path makes one of two slashes
            raise ConfigurationError(
                f"{str(path)!r}: a checkpoint of shards goes into a folder that all ranks see, and "
                "takes no storage_options"
            )
        states = {"model": checkpoint.pop("state_dict")}
        if "optimizer_states" in checkpoint:
            shards = self._shards
            accumulated: dict[str, Any] = {}
            if shards is not None and self._accumulates:
                accumulated[str(self.replica)] = shards.gradients(self.pipeline_rank)
            states[GRADIENTS] = accumulated
            for index, state in enumerate(checkpoint["optimizer_states"]):
                states[f"optimizer_{index}"] = state
            checkpoint["optimizer_states"] = []  # that there is no state yet is one too
        if self._writer is None:
            self._writer = ShardWriter(self.timeout, is_connected=self.total_ranks > 1)
        goes_on = isinstance(self.checkpoint_io, self.namespace.async_checkpoint_io)
        waits = self.engine is None or not goes_on
        self._writer.write(states, checkpoint, path, waits=waits)
        if waits:
            self.barrier()

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint; not before the one that replaces it is complete."""
        remove = partial(super().remove_checkpoint, filepath)
        if self._writer is not None and self._writer.is_busy:
            self._writer.do(remove)
        else:
            remove()

    # The end of a fit, and of a run

    def note_end(self) -> None:
        """A training ends: what is saved after it must be something to go on from."""
        if self.engine is not None:
            self._left = self._progress()
            self._left_shards = self.engine.shards
        if self._writer is not None:
            self._writer.wait()

    def end_without_batches(self) -> None:
        """A fit went on from a checkpoint of its end: what is saved now is what was loaded."""
        if self.engine is None and self._parts.resumption.here is not None:
            self._left = self._parts.resumption.here
            self._parts.weights.restore_optimizers()

    def end_writing(self, *, waits: bool) -> None:
        """Wait for files that are still being written; for shards, unless ranks may be gone.

        Raises:
            Exception: One of them was not, and no rank has ended yet; later it is too late to say.
        """
        writer, self._writer = self._writer, None
        if writer is not None and waits:
            writer.wait()
        try:
            self.checkpoint_io.teardown()
        except Exception as error:
            if self.trainer.interrupted:
                if not self.has_told_unsaved:
                    log.warning("a checkpoint was not saved: %s", first_line(error))
                return
            raise

    # Where the pipeline is

    @property
    def _fails_within_batch(self) -> bool:
        """Whether a run of one device ends in the middle of a batch, which then comes once more."""
        batches: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return (
            self.total_ranks == 1
            and self.trainer.interrupted
            and self._parts.data.loader is not None
            and batches.processed < batches.ready
        )

    @property
    def _is_torn(self) -> bool:
        """Whether it ends so far within the batch that this can't come once more as it was.

        Something of it is in gradients that are accumulated, in a teacher that the step has moved,
        or in BatchNorm's statistics; or what a teacher that runs ahead had computed for it is gone.
        """
        engine, data = self.engine, self._parts.data
        if engine is None or not data.has_begun or not self._fails_within_batch:
            return False
        accumulates = self.trainer.accumulate_grad_batches > 1
        counts = any(isinstance(m, _BatchNorm) and m.training for m in self.module.modules())
        is_late = engine.position != data.position and engine.ahead() is not None
        return accumulates or counts or is_late or engine.captured.plan.has_ema

    def _progress(self) -> Progress | None:
        engine, loop, parts = self.engine, self.trainer.fit_loop, self._parts
        assert engine is not None
        repeats = self._fails_within_batch
        ended = loop.epoch_loop._num_ready_batches_reached() and not repeats  # noqa: SLF001
        # The epoch that has begun last; Trainer.current_epoch moves on before its last hooks.
        epoch = loop.epoch_progress.current.ready
        batches: Any = loop.epoch_loop.batch_progress.current
        coming = batches.processed if repeats else batches.ready
        place = (epoch, 0) if ended else (epoch - 1, coming)
        self._accumulates = loop._should_accumulate() or bool(parts.manual.waiting)  # noqa: SLF001
        return progress.collect(
            engine,
            parts.data.loader,
            epoch_ended=ended,
            position=parts.data.position if repeats else None,
            with_gradients=self._accumulates and not self._saves_shards,
            place=None if self._saves_shards else place,
        )

    # Loading: one file, or a folder of shards of which each rank reads its part

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """A checkpoint, without what ranks read later, and without what is the strategy's own.

        Raises:
            CheckpointError: It is damaged.
        """
        with files.explain_damage(checkpoint_path):
            checkpoint = self._load(checkpoint_path, weights_only)
            # Of shards that were made one file, in which nothing that is empty is left.
            apart = checkpoint.pop(GRADIENTS, {})
            checkpoint.pop(folders.IS_SUMMED, None)
            for state in checkpoint.get("optimizer_states", ()):
                state.setdefault("state", {})
            if self.trainer.state.fn == "fit":
                self._resume(checkpoint, apart)
            return checkpoint

    def _resume(self, checkpoint: dict[str, Any], apart: Mapping[str, Any]) -> None:
        """Go on where the run of the checkpoint stopped."""
        resumption, replicas = self._parts.resumption, checkpoint.get(ENTRY, [])
        for index, gradients in apart.items():
            replicas[int(index)]["gradients"] = gradients
        self.plan.resume(replicas[0] if replicas else {})
        resumption.go_on(
            replicas, self.replica, self.num_replicas, shares_batches=self.plan.shares_batches
        )
        resumption.random = progress.random_of(replicas, self.global_rank, self.total_ranks)
        repeats = progress.repeats_data(checkpoint, resumption.here)
        if self.is_global_zero and repeats:
            warnings.warn(_REPEATED, stacklevel=2)

    def _load(self, given: Any, weights_only: bool | None) -> dict[str, Any]:
        weights, verifies = self._parts.weights, self.options.verify_checkpoint
        weights.forget_other_modules()
        path = folders.newest(Path(given))
        if folders.is_sharded(path):
            source = folders.FolderSource(path, verify=verifies, trusts=weights_only is False)
            checkpoint = source.rest()
            self._tell_if_unverified(path, has_checksums=source.has_checksums)
            checkpoint["state_dict"] = {}
            if source.num_optimizers:  # of an earlier version, which didn't say so otherwise
                checkpoint["optimizer_states"] = []
            weights.source = source
            return checkpoint
        self._tell_if_unverified(path, has_checksums=not verifies or files.verify_file(path))
        weights.source = None
        is_read_in_parts = self.spread is not None or is_on_meta(self.module)
        maps = is_read_in_parts and files.is_usual(files.innermost(self.checkpoint_io))
        if maps and files.is_archive(path):
            # Only what is looked at comes into memory.
            checkpoint = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
        else:
            checkpoint = super().load_checkpoint(given, weights_only)
        if is_read_in_parts:
            weights.source = files.FileSource(checkpoint)
        return checkpoint

    def _tell_if_unverified(self, path: Path, *, has_checksums: bool) -> None:
        if self.options.verify_checkpoint and not has_checksums and self.is_global_zero:
            warnings.warn(
                f"{str(path)!r} was written without checksums: it is loaded, and not verified. One "
                "that is saved by this run has them",
                stacklevel=2,
            )

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load what of the module is here; the rest is read when stages are placed.

        Raises:
            ConfigurationError: The checkpoint is one of another module.
        """
        source = self._parts.weights.source
        if source is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        own = self.module.state_dict()
        _check_names({k: tuple(v.shape) for k, v in own.items()}, source, strict=strict)
        here = {name: tensor for name, tensor in own.items() if not tensor.is_meta}
        with torch.no_grad():
            for name in here.keys() & set(source.shapes):
                here[name].copy_(source.tensors([name])[name])

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' groups; what they keep for each parameter is read later."""
        source = self._parts.weights.source
        if source is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        self._parts.weights.restores_optimizers = True
        for index, optimizer in enumerate(map(plain_optimizer, self.optimizers)):
            state = optimizer.state_dict()
            groups = source.optimizer_groups(index, state["param_groups"])
            optimizer.load_state_dict({**state, "param_groups": groups})


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


def _check_names(own: dict[str, tuple[int, ...]], source: Source, *, strict: bool) -> None:
    missing = sorted(own.keys() - set(source.shapes))
    unexpected = sorted(set(source.shapes) - own.keys())
    if strict and (missing or unexpected):
        raise ConfigurationError(
            f"the checkpoint is one of another module: it lacks {missing[:5]} ({len(missing)} "
            f"names), and it has {unexpected[:5]} ({len(unexpected)} names), which the module "
            "lacks. Set strict_loading = False in the module to load what agrees"
        )
    for name, shape in source.shapes.items():
        if name in own and own[name] != shape:
            raise ConfigurationError(
                f"{name!r} has shape {shape} in the checkpoint and {own[name]} in the module"
            )
