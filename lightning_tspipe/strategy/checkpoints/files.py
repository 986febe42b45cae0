"""Write checkpoint files whole or not at all, read parts of them, explain one that is not whole.

A file of ``torch.save`` is a zip archive, with a CRC-32 for each record: the structure, and each
storage. torch writes them and never looks at them.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import reduce
from operator import getitem
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_tspipe.errors import CheckpointError
from lightning_tspipe.runtime.faults.failures import first_line
from lightning_tspipe.runtime.weights.materializing import Place, Source
from lightning_tspipe.strategy.lightning.namespaces import installed_namespaces

if TYPE_CHECKING:
    from lightning.fabric.plugins import TorchCheckpointIO as _TorchCheckpointIO

_PART = ".part"
_MANY = 3
_MAGIC = b"PK\x03\x04"
_IS_FOLDER = 0x10  # of the attributes of a record
_PIECE = 2**20


class DamageError(Exception):
    """Bytes that differ from those that were written; says where."""


class UntrustedError(CheckpointError):
    """A checkpoint that is whole, and holds objects of the user's, which may not be read."""


@contextmanager
def written_through(path: Path) -> Iterator[IO[bytes]]:
    """Write a file that is on the disk in the end."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


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
    with whole_or_removed(path, part.unlink):
        with written_through(part) as file:
            torch.save(checkpoint, file)
        part.replace(path)


@contextmanager
def whole_or_removed(path: Path, remove: Callable[[], object] | None) -> Iterator[None]:
    """Remove what was begun of a checkpoint if it fails inside, and explain a full disk, say.

    Args:
        path: The place of the checkpoint.
        remove: Removes what is written beside it; None: another rank does.

    Raises:
        OSError: The system kept it from being saved.
        KeyboardInterrupt: Ctrl-C did.
    """
    try:
        yield
    except BaseException as error:
        if remove is not None:
            with suppress(OSError):
                remove()
        reason = what_happened(error)
        if reason is None:
            raise
        if isinstance(reason, KeyboardInterrupt):
            raise reason from None
        text = f"{reason.strerror}, so the checkpoint was not saved; earlier ones are untouched"
        raise OSError(reason.errno, text, str(path)) from None


def what_happened(error: BaseException) -> OSError | KeyboardInterrupt | None:
    """A failure of the system, or Ctrl-C; torch hides it behind an exception of its own."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, KeyboardInterrupt) or (isinstance(found, OSError) and found.errno):
            return found
        found = found.__cause__ or found.__context__
    return None


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
        if not is_archive(file):
            why = "it does not begin like one, so it is damaged, or not a checkpoint"
            with file.open("rb") as opened:
                if opened.read(len(_MAGIC)) == _MAGIC:
                    why = "it was cut off when it was written or copied"
            raise CheckpointError(
                f"{str(file)!r} is not a complete checkpoint ({file.stat().st_size:,} bytes): "
                f"{why}. Give another ckpt_path{others_beside(file)}"
            ) from None
        told = _damage_behind(error, file)
        if told is not None:
            raise damaged(file, told) from None
        if isinstance(error, UnpicklingError):
            raise untrusted(file, "it", error) from None
        raise


def _damage_behind(error: Exception, file: Path) -> str | None:
    """What is wrong with a file that could not be read; None if nothing is."""
    try:
        compare_records(file)
    except DamageError as found:
        return str(found)
    return first_line(error) if "PytorchStreamReader" in str(error) else None


def is_archive(path: Path) -> bool:
    """Whether a path is that of an archive, be it damaged; one that was cut off is none."""
    if not path.is_file():
        return False
    try:
        return zipfile.is_zipfile(path)
    except (zipfile.BadZipFile, ValueError, OverflowError):
        return True


def compare_records(path: Path) -> bool:
    """Read an archive once, and compare; the memory it takes is small, however large the file is.

    Returns:
        Whether it has checksums; without (``torch.serialization.set_crc32_options(False)``),
        nothing was compared.

    Raises:
        DamageError: Something differs from what was written.
    """
    with _damage("its table of contents can't be read"), zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        if all(record.CRC == 0 for record in records):
            return False
        for record in records:
            with _damage(f"the record {record.orig_filename!r} differs from what was written"):
                _compare(archive, record)
    return True


def _compare(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    """Read a record to its end, where its checksum is compared."""
    # torch takes what has the attribute of a folder for empty, and leaves memory as it was.
    is_folder = record.external_attr & _IS_FOLDER
    is_packed = record.compress_type != zipfile.ZIP_STORED
    if is_folder or is_packed or record.compress_size != record.file_size:
        raise zipfile.BadZipFile("it is not stored the way torch does it")
    with archive.open(record) as content:
        while content.read(_PIECE):
            pass


@contextmanager
def _damage(what: str) -> Iterator[None]:
    """Whatever the reader of archives says of one that is damaged has no common type."""
    try:
        yield
    except (DamageError, PermissionError):
        raise
    except Exception as error:  # noqa: BLE001 - see above
        raise DamageError(f"{what} ({error})") from None


def verify_file(path: Path) -> bool:
    """Compare a file by ``torch.save`` with the checksums in it; it is read once.

    Returns:
        Whether it has checksums, if it is such a file; True for others, which nobody can compare.

    Raises:
        CheckpointError: Something in it differs from what was written.
    """
    try:
        return not is_archive(path) or compare_records(path)
    except DamageError as error:
        raise damaged(path, str(error), is_summed=True) from None


def untrusted(path: Path, what: str, error: UnpicklingError) -> UntrustedError:
    """The error for a checkpoint that is whole, and holds objects of the user's."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    named = f" ({found[1]})" if found else ""
    return UntrustedError(
        f"{str(path)!r}: {what} holds more than tensors and plain values{named}, and reading it "
        "may run code. If you trust its author, pass weights_only=False along with ckpt_path, as "
        "in trainer.fit(..., weights_only=False), or allow the class with "
        "torch.serialization.add_safe_globals([...])"
    )


def damaged(path: Path, what: str, *, is_summed: bool = False) -> CheckpointError:
    """The error for a checkpoint that is not what was written.

    Args:
        path: The checkpoint.
        what: Is wrong with it.
        is_summed: Whether only a checksum told.
    """
    skip = "; TSPipeStrategy(verify_checkpoint=False) would read it as it is" if is_summed else ""
    return CheckpointError(
        f"{str(path)!r} is damaged: {what}. Give another ckpt_path{others_beside(path)}{skip}"
    )


def others_beside(file: Path) -> str:
    """The newest checkpoints beside one, for a message."""
    found = [
        other
        for other in file.parent.glob(f"*{file.suffix}")
        if other.name != file.name and not other.name.startswith(".") and other.exists()
    ]
    found.sort(key=lambda other: other.stat().st_mtime, reverse=True)
    names = ", ".join(repr(other.name) for other in found[:_MANY])
    return f"; its folder also has {names}" if names else ""


class FileSource(Source):
    """An ordinary Lightning checkpoint, of which tensors may be mapped to its file.

    Those that are taken are copied: the file may be replaced while the training goes on.

    Args:
        checkpoint: The checkpoint. Hooks may change it before it is asked.
    """

    def __init__(self, checkpoint: dict[str, Any]) -> None:
        self._checkpoint = checkpoint

    @property
    @override
    def shapes(self) -> dict[str, tuple[int, ...]]:
        state = self._checkpoint["state_dict"]
        return {name: tuple(tensor.shape) for name, tensor in state.items()}

    @property
    def _optimizers(self) -> dict[str, Any]:
        states = self._checkpoint.get("optimizer_states", [])
        return {f"optimizer_{index}": state for index, state in enumerate(states)}

    @property
    @override
    def places(self) -> Iterable[Place]:
        for root, state in self._optimizers.items():
            for key, values in state["state"].items():
                yield from ((root, "state", key, what) for what in values)
            for number, group in enumerate(state["param_groups"]):
                yield from ((root, "param_groups", number, what) for what in group)

    @override
    def read(self, place: Place) -> Any:
        root, *path = place
        within = self._checkpoint["state_dict"] if root == "model" else self._optimizers[root]
        value = reduce(getitem, path, within)
        return value.clone() if isinstance(value, Tensor) else value


# Lightning's plugin

_USUAL = tuple(each.torch_checkpoint_io for each in installed_namespaces())
if not TYPE_CHECKING:  # whose classes both Lightnings know for theirs
    _TorchCheckpointIO = type("_TorchCheckpointIO", _USUAL, {})


class WholeFiles(_TorchCheckpointIO):
    """The plugin by which checkpoints are written unless the user brings one."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        if storage_options is None and "://" not in str(path):
            write_whole(checkpoint, Path(path))
        else:
            super().save_checkpoint(checkpoint, path, storage_options)


def innermost(io: Any) -> Any:
    """The plugin that writes, behind those that decide when."""
    while getattr(io, "_base_checkpoint_io_configured", False):
        io = io.checkpoint_io
    return io


def is_usual(io: Any) -> bool:
    """Whether checkpoints are written as Lightning does it, or as :class:`WholeFiles` does."""
    return type(io) in {WholeFiles, *_USUAL}
