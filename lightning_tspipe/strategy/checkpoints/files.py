"""Write checkpoint files whole or not at all, and explain one that is not whole."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from lightning_tspipe.errors import CheckpointError
from lightning_tspipe.runtime.faults.failures import first_line
from lightning_tspipe.strategy.checkpoints.checksums import DamageError
from lightning_tspipe.strategy.checkpoints.zips import compare_records, is_archive
from lightning_tspipe.strategy.lightning.namespaces import Namespace, installed_namespaces

_PART = ".part"
_MANY = 3
_MAGIC = b"PK\x03\x04"


def write_whole(checkpoint: Any, path: Path) -> None:
    """Write a checkpoint beside its place, and put it there when it is complete.

    Lightning's own way writes into the folder for temporary files, which may be on another disk;
    then the move is a copy, and a process that is killed in it leaves half a file.

    Args:
        checkpoint: What ``torch.save`` takes.
        path: A file of this machine.

    Raises:
        OSError: It could not be written; what was there before still is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + _PART)
    try:
        with part.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink()
        told = unsaved(error, path)
        if told is None:
            raise
        raise told from None


def unsaved(error: BaseException, path: Path) -> OSError | None:
    """The error for a checkpoint that could not be written; None if not by the system's fault."""
    reason = system_error(error)
    if reason is None:
        return None
    text = f"{reason.strerror}, so the checkpoint was not saved; earlier ones are untouched"
    return OSError(reason.errno, text, str(path))


def system_error(error: BaseException) -> OSError | None:
    """The failure of the system behind an exception; torch hides it behind one of its own."""
    found: BaseException | None = error
    while found is not None and not (isinstance(found, OSError) and found.errno):
        found = found.__cause__ or found.__context__
    return found


@contextmanager
def explain_damage(path: Any) -> Iterator[None]:
    """Say what is wrong with a checkpoint that can't be read since it is damaged.

    torch.save writes its table of contents last.

    Raises:
        CheckpointError: That is so.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # torch reads on, into whatever comes of it
        file = Path(path)
        if isinstance(error, PermissionError) or not file.is_file():
            raise
        if is_archive(file):
            told = _damage_behind(error, file)
            if told is not None:
                raise damaged(file, told) from None
            if isinstance(error, UnpicklingError):
                raise CheckpointError(_too_rich(file, error)) from None
            raise
        raise CheckpointError(
            f"{str(file)!r} is no complete checkpoint (it has {file.stat().st_size:,} bytes): "
            f"{_why_incomplete(file)}. Give ckpt_path another one{others_beside(file)}"
        ) from None


def _why_incomplete(file: Path) -> str:
    """Why a file is no archive."""
    with file.open("rb") as opened:
        if opened.read(len(_MAGIC)) == _MAGIC:
            return "it was cut off when it was written or copied"
    return "it does not begin as one does, so it is damaged, or something else"


def _too_rich(file: Path, error: UnpicklingError) -> str:
    """The message for a checkpoint that is whole, and holds objects of the user's."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    what = f"objects of {found[1]}" if found else "objects of classes of yours"
    return (
        f"{str(file)!r} holds {what}, which are not read unless you say so, since to read them may "
        "run whatever the file says. If you trust it, pass weights_only=False beside ckpt_path, as "
        "in trainer.fit(..., weights_only=False), or name the class by "
        "torch.serialization.add_safe_globals([...])"
    )


def _damage_behind(error: Exception, file: Path) -> str | None:
    """What is wrong with a file that could not be read; None if nothing is."""
    try:
        compare_records(file)
    except DamageError as found:
        return str(found)
    return first_line(error) if "PytorchStreamReader" in str(error) else None


def verify_file(path: Path) -> bool:
    """Compare a file by ``torch.save`` with the checksums in it; it is read once.

    Returns:
        Whether it has checksums, if it is such a file; True for others, which nobody can compare.

    Raises:
        CheckpointError: Something in it differs from what was written.
    """
    if not is_archive(path):
        return True
    try:
        return compare_records(path)
    except DamageError as error:
        raise damaged(path, str(error), is_summed=True) from None


def damaged(path: Path, what: str, *, is_summed: bool = False) -> CheckpointError:
    """The error for a checkpoint that is not what was written.

    Args:
        path: The checkpoint.
        what: Is wrong with it.
        is_summed: Whether only a checksum told.
    """
    skip = "; TSPipeStrategy(verify_checkpoint=False) would read it as it is" if is_summed else ""
    return CheckpointError(
        f"{str(path)!r} is damaged: {what}. Give ckpt_path another one{others_beside(path)}{skip}"
    )


def others_beside(file: Path) -> str:
    """The newest checkpoints beside one, for a message."""
    found = [
        other
        for other in file.parent.glob(f"*{file.suffix}")
        if other.name != file.name and not other.name.startswith(".")
    ]
    found.sort(key=lambda other: other.stat().st_mtime, reverse=True)
    names = ", ".join(repr(other.name) for other in found[:_MANY])
    return f"; beside it lie {names}" if names else ""


def _io_class(name: str, base: type) -> type:
    def save_checkpoint(
        self: Any, checkpoint: Any, path: Any, storage_options: Any | None = None
    ) -> None:
        if storage_options is None and "://" not in str(path):
            write_whole(checkpoint, Path(path))
        else:
            base.save_checkpoint(self, checkpoint, path, storage_options)  # type: ignore[attr-defined]

    return type(name, (base,), {"save_checkpoint": save_checkpoint, "__module__": __name__})


# Under their names, since they travel to workers.
_NAMES = {each.name: f"WholeFiles{number}" for number, each in enumerate(installed_namespaces())}
globals().update(
    {
        _NAMES[each.name]: _io_class(_NAMES[each.name], each.torch_checkpoint_io)
        for each in installed_namespaces()
    }
)


def whole_files(namespace: Namespace) -> Any:
    """The plugin by which checkpoints are written unless the user brings one."""
    return globals()[_NAMES[namespace.name]]()


def innermost(io: Any) -> Any:
    """The plugin that writes, behind those that decide when."""
    while getattr(io, "_base_checkpoint_io_configured", False):
        io = io.checkpoint_io
    return io


def is_usual(io: Any) -> bool:
    """Whether checkpoints are written as Lightning does it, or as :func:`whole_files`."""
    usual = [each.torch_checkpoint_io for each in installed_namespaces()]
    return type(io) in {*usual, *(globals()[name] for name in _NAMES.values())}


def load_mapped(path: Path, weights_only: bool | None) -> Any:
    """Load a checkpoint of which only what is looked at comes into memory.

    Returns:
        The checkpoint; None if the file is none that this can be done with.
    """
    if not is_archive(path):
        return None
    return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
