"""Finding the newest whole checkpoint among several: files and folders of shards.

Each is asked how far its run had come, which reads little of it. Then the newest is read once and
compared with its checksums, and if it is not whole the one before it::

    step=40.ckpt    cut off                      skipped
    step=30.ckpt    whole                        chosen
    step=20.ckpt                                 never looked at
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_tspipe.errors import CheckpointError
from lightning_tspipe.strategy.checkpoints import files, folders

_REMEDY = ". Give another ckpt_path"
"""Where what is wrong with a checkpoint ends, in a message, and what to do begins."""


@dataclass(frozen=True, order=True)
class Found:
    """A checkpoint from which a training can go on; later ones are greater.

    Attributes:
        step: Optimizer steps of its run.
        batches: Training batches of it; with accumulated gradients several have the same step.
        modified: When it was written, in ns: one from behind a validation is newer than one from
            before it.
        path: Where it is.
    """

    step: int
    batches: int
    modified: int
    path: Path


@dataclass
class Choice:
    """The newest whole checkpoint, and what was passed over.

    Attributes:
        found: The checkpoint; None if there is none.
        skipped: Those that would have been newer, or that can't be read: each with the reason.
    """

    found: Found | None = None
    skipped: dict[Path, str] = field(default_factory=dict)

    @property
    def reasons(self) -> str:
        """What was skipped and why, as lines."""
        return "\n".join(f"  {str(path)!r}: {why}" for path, why in self.skipped.items())


def checkpoints_in(folder: Path, suffix: str, depth: int = 0) -> list[Path]:
    """The checkpoints in a folder, in order of their names; none if it isn't there.

    One whose replacement was cut short is found under its own name.

    Args:
        folder: Where they are.
        suffix: What their names end with.
        depth: So many folders further down.
    """
    found = set(folder.glob("*/" * depth + f"*{suffix}"))
    for old in folder.glob("*/" * depth + f".*{suffix}.old"):
        found.add(old.with_name(old.name.removeprefix(".").removesuffix(".old")))
    return sorted(path for path in found if not path.name.startswith("."))


def newest_whole(paths: Iterable[Path], *, weights_only: bool | None, verify: bool) -> Choice:
    """The checkpoint of the furthest progress, among those that are whole.

    Args:
        paths: Files and folders of shards; several names of one count once.
        weights_only: As for ``torch.load``: whether they may hold tensors and plain values only.
        verify: Whether what is chosen is read once and compared with its checksums.

    Raises:
        CheckpointError: One holds objects of the user's, and may not: none of them could be read.
        OSError: The system does not let one be read.
    """
    choice, found = Choice(), []
    # Links first: of a file and a link to it, the file's own name stays.
    links_first = sorted(paths, key=lambda path: not path.is_symlink())
    for path in {each.resolve(): each for each in links_first}.values():
        try:
            found.append(_look_at(path, weights_only))
        except CheckpointError as error:
            _skip(choice, path, error)
    for each in sorted(found, reverse=True):
        try:
            if verify:
                _compare(each.path)
        except CheckpointError as error:
            _skip(choice, each.path, error)
        else:
            choice.found = each
            break
    return choice


def _skip(choice: Choice, path: Path, error: CheckpointError) -> None:
    if isinstance(error, files.UntrustedError):
        raise error
    choice.skipped[path] = str(error).partition(_REMEDY)[0].removeprefix(f"{str(path)!r} ")


def _look_at(path: Path, weights_only: bool | None) -> Found:
    """How far the run of a checkpoint had come.

    Raises:
        CheckpointError: It can't be read, or no training goes on from it.
    """
    place = folders.newest(path)
    if not place.exists():
        raise CheckpointError("it is a link to something that is gone")
    if folders.is_sharded(place):
        source = folders.FolderSource(place, trusts=weights_only is False)
        source.check_sizes()
        checkpoint = source.rest()
        has_optimizers = "optimizer_states" in checkpoint or source.num_optimizers > 0
    else:
        with files.explain_damage(place):
            checkpoint = _open(place, weights_only)
        has_optimizers = "optimizer_states" in checkpoint
    if "global_step" not in checkpoint or "loops" not in checkpoint:
        raise CheckpointError("it is no checkpoint of a Trainer")
    if not has_optimizers:
        raise CheckpointError("it holds weights only (save_weights_only=True)")
    loop = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
    modified = place.stat().st_mtime_ns
    return Found(int(checkpoint["global_step"]), int(loop["completed"]), modified, path)


def _open(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """A file of which only what is looked at comes into memory."""
    found = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
    return found if isinstance(found, dict) else {}


def _compare(path: Path) -> None:
    """Read all of a checkpoint once.

    Raises:
        CheckpointError: Something in it differs from what was written.
    """
    place = folders.newest(path)
    if place.is_dir():
        folders.FolderSource(place).compare()
    else:
        files.verify_file(place)
