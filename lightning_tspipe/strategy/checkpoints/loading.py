"""Loading checkpoints: one file, or a folder of shards of which each rank reads its part.

A checkpoint of shards is a folder in the layout of Lightning's ``FSDPStrategy``: what
``torch.distributed.checkpoint`` writes (``model``, ``optimizer_0``, ...), and ``meta.pt`` with the
rest. ``python -m lightning.pytorch.utilities.consolidate_checkpoint FOLDER`` makes one file of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.weights.materializing import GRADIENTS, Source, is_on_meta
from lightning_tspipe.strategy.checkpoints import files, folders
from lightning_tspipe.strategy.training.optimizers import plain_optimizer
from lightning_tspipe.strategy.training.steps import Parts

ENTRY = "lightning_tspipe"
"""In a checkpoint, what a pipeline needs beside Lightning's own to go on where it stopped."""
_REPEATED = (
    "the checkpoint was saved within an epoch, by another strategy or with another number of "
    "replicas, and its training loader has no state: the rest of the epoch repeats its first "
    "batches. Resume from the end of an epoch, or use a loader with state_dict and load_state_dict"
)


class CheckpointReader:
    """Loads checkpoints.

    Args:
        parts: Get the checkpoint, if each rank reads its part later, and where the run stopped.
        verifies: Whether a checkpoint is compared with its checksums.
    """

    def __init__(self, parts: Parts, *, verifies: bool) -> None:
        self._run = parts.run
        self._weights = parts.weights
        self._verifies = verifies

    def load(self, given: Any, weights_only: bool | None) -> Any:
        """A checkpoint, without what ranks read later, and without what is the strategy's own.

        Raises:
            CheckpointError: It is damaged.
        """
        with files.explain_damage(given):
            checkpoint: dict[str, Any] = self._load(Path(given), given, weights_only)
            # Of shards that were made one file, in which nothing that is empty is left.
            apart = checkpoint.pop(GRADIENTS, {})
            checkpoint.pop(folders.IS_SUMMED, None)
            for state in checkpoint.get("optimizer_states", ()):
                state.setdefault("state", {})
            if self._run.trainer.state.fn == "fit":
                self._resume(checkpoint, apart)
            return checkpoint

    def _resume(self, checkpoint: dict[str, Any], apart: Mapping[str, Any]) -> None:
        """Go on where the run of the checkpoint stopped."""
        run, resumption = self._run, self._run.resumption
        replicas = checkpoint.get(ENTRY, [])
        for index, gradients in apart.items():
            replicas[int(index)]["gradients"] = gradients
        places = (run.replica, run.num_replicas), (run.global_rank, run.total_ranks)
        resumption.load(replicas, *places)
        if run.is_global_zero and _repeats_data(checkpoint, resumption.here):
            warnings.warn(_REPEATED, stacklevel=2)

    def _load(self, path: Path, given: Any, weights_only: bool | None) -> Any:
        run, weights = self._run, self._weights
        weights.forget_other_modules()
        path = folders.newest(path)
        if folders.is_sharded(path):
            return self._load_folder(path, weights_only)
        if self._verifies:
            self._tell_unverified(path, has_checksums=files.verify_file(path))
        weights.source = None
        is_read_in_parts = run.spread is not None or is_on_meta(run.module)
        io = run.checkpoint_io
        if is_read_in_parts and files.is_usual(files.innermost(io)) and files.is_archive(path):
            # Only what is looked at comes into memory.
            checkpoint = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
        else:
            torch.cuda.empty_cache()
            checkpoint = io.load_checkpoint(given, weights_only=weights_only)
        if is_read_in_parts:
            weights.source = files.FileSource(checkpoint)
        return checkpoint

    def _load_folder(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        source = folders.FolderSource(path, verify=self._verifies, trusts=weights_only is False)
        checkpoint = source.rest()
        self._tell_unverified(path, has_checksums=source.has_checksums)
        checkpoint["state_dict"] = {}
        if source.num_optimizers:  # of an earlier version, which didn't say so otherwise
            checkpoint["optimizer_states"] = []
        self._weights.source = source
        return checkpoint

    def _tell_unverified(self, path: Path, *, has_checksums: bool) -> None:
        if self._verifies and not has_checksums and self._run.is_global_zero:
            warnings.warn(
                f"{str(path)!r} has no checksums: it is loaded without verification. Checkpoints "
                "that this run saves have them",
                stacklevel=2,
            )

    def load_module(self, source: Source, *, strict: bool) -> None:
        """Load what of the module is here; the rest is read when stages are placed.

        Raises:
            ConfigurationError: The checkpoint is one of another module.
        """
        own = self._run.module.state_dict()
        _check_names({k: tuple(v.shape) for k, v in own.items()}, source, strict=strict)
        here = {name: tensor for name, tensor in own.items() if not tensor.is_meta}
        with torch.no_grad():
            for name in here.keys() & set(source.shapes):
                here[name].copy_(source.tensors([name])[name])

    def load_optimizers(self, source: Source) -> None:
        """Load the optimizers' groups; what they keep for each parameter is read later."""
        self._weights.restores_optimizers = True
        for index, optimizer in enumerate(map(plain_optimizer, self._run.optimizers)):
            state = optimizer.state_dict()
            groups = source.optimizer_groups(index, state["param_groups"])
            optimizer.load_state_dict({**state, "param_groups": groups})


def _repeats_data(checkpoint: dict[str, Any], progress: dict[str, Any] | None) -> bool:
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


def _check_names(own: dict[str, tuple[int, ...]], source: Source, *, strict: bool) -> None:
    missing = sorted(own.keys() - set(source.shapes))
    unexpected = sorted(set(source.shapes) - own.keys())
    if strict and (missing or unexpected):
        raise ConfigurationError(
            f"the checkpoint belongs to another module: it lacks {missing[:5]} ({len(missing)} "
            f"names), and it has {unexpected[:5]} ({len(unexpected)} names), which the module "
            "lacks. Set strict_loading = False in the module to load what matches"
        )
    for name, shape in source.shapes.items():
        if name in own and own[name] != shape:
            raise ConfigurationError(
                f"{name!r} has shape {shape} in the checkpoint and {own[name]} in the module"
            )
