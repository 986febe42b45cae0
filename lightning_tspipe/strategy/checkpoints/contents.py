"""The table of contents of a folder of shards, read without running what is in it.

``torch.distributed.checkpoint`` writes ``.metadata`` with pickle, and its own reader would run
whatever code stands in such a file. Here a name in it is looked up among those that belong there.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from typing_extensions import override

_SUFFIX = ".distcp"
_OF_METADATA = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
    "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_KNOWN: dict[tuple[str, str], Any] = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in _OF_METADATA},
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,  # noqa: SLF001
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): OrderedDict,
    # Where the folder was written; nobody goes there.
    **{
        (module, name): PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}

Place = tuple[Any, ...]


class ForeignError(Exception):
    """Something that does not belong into a folder of shards; says what."""


@dataclass(frozen=True)
class Piece:
    """A part of a file, which holds a tensor or a part of one, or a value.

    Attributes:
        file: Name of the file in the folder.
        start: In bytes.
        length: In bytes.
        offsets: Where a part of a tensor begins in it.
        sizes: The shape of that part.
    """

    file: str
    start: int
    length: int
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A tensor or a value.

    Attributes:
        name: Its dotted name.
        pieces: Where it is; one, if it is a value.
        shape: Of a tensor.
        dtype: Of a tensor; None for a value.
    """

    name: str
    pieces: tuple[Piece, ...]
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


def read_contents(content: bytes) -> dict[Place, Entry]:
    """Entries of a folder, by their places in the state: ``("model", "student.0.weight")``.

    Args:
        content: Of ``.metadata``.

    Raises:
        ForeignError: It is not that of a folder of shards.
    """
    try:
        found = _Unpickler(io.BytesIO(content)).load()
    except ForeignError:
        raise
    except Exception as error:  # noqa: BLE001 - what a pickle that is none may end with has no common type
        raise ForeignError(f"it can't be unpickled ({type(error).__name__}: {error})") from None
    if not isinstance(found, Metadata):
        raise ForeignError(f"it holds a {type(found).__name__}, not torch's Metadata")
    try:
        return dict(_entries(found))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ForeignError(f"its parts don't fit ({type(error).__name__}: {error})") from None


class _Unpickler(pickle.Unpickler):
    """Knows a few classes of data, and nothing that does something."""

    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        known = _KNOWN.get((module_name, global_name))
        if known is not None:
            return known
        if module_name == "torch" and isinstance(vars(torch).get(global_name), torch.dtype):
            return vars(torch)[global_name]
        raise ForeignError(
            f"it would load {module_name}.{global_name}, which is no part of a checkpoint of shards"
        )

    @override
    def persistent_load(self, pid: Any) -> Any:
        raise ForeignError("it points to objects outside")


def _entries(found: Metadata) -> Iterator[tuple[Place, Entry]]:
    if not isinstance(found.planner_data, Mapping):
        raise ForeignError("it was written without the names of what it holds (flat_state_dict)")
    where = {_key(index): info for index, info in found.storage_data.items()}
    for name, place in found.planner_data.items():
        if not (isinstance(name, str) and isinstance(place, tuple)):
            raise ForeignError(f"it names an entry {name!r} at {place!r}")
        yield place, _entry(name, found.state_dict_metadata[name], where)


def _key(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


def _entry(name: str, kept: Any, where: Mapping[tuple[str, tuple[int, ...]], Any]) -> Entry:
    if isinstance(kept, BytesStorageMetadata):
        return Entry(name, (_piece(name, where[name, ()]),))
    if not isinstance(kept, TensorStorageMetadata):
        raise ForeignError(f"{name!r} is a {type(kept).__name__}")
    dtype, shape = kept.properties.dtype, _numbers(kept.size)
    if not isinstance(dtype, torch.dtype):
        raise ForeignError(f"{name!r} has dtype {dtype!r}")
    pieces = tuple(_part(name, chunk, shape, where) for chunk in kept.chunks)
    if sum(_volume(piece.sizes) for piece in pieces) != _volume(shape):
        raise ForeignError(f"{name!r} has shape {shape}, and its parts don't make that up")
    return Entry(name, pieces, shape, dtype)


def _part(
    name: str,
    chunk: ChunkStorageMetadata,
    shape: tuple[int, ...],
    where: Mapping[tuple[str, tuple[int, ...]], Any],
) -> Piece:
    offsets, sizes = _numbers(chunk.offsets), _numbers(chunk.sizes)
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    if any(end > limit for end, limit in zip(ends, shape, strict=True)):
        raise ForeignError(f"a part of {name!r} lies outside of it")
    return _piece(name, where[name, offsets], offsets, sizes)


def _piece(
    name: str, info: Any, offsets: tuple[int, ...] = (), sizes: tuple[int, ...] = ()
) -> Piece:
    file = info.relative_path
    # Not just anywhere on this machine.
    if not isinstance(file, str) or not file.endswith(_SUFFIX) or PurePosixPath(file).name != file:
        raise ForeignError(f"{name!r} would be read from {file!r}")
    if info.transform_descriptors:
        raise ForeignError(f"{name!r} is encoded by {info.transform_descriptors}")
    start, length = _numbers((info.offset, info.length))
    return Piece(file, start, length, offsets, sizes)


def _numbers(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ForeignError(f"it has {tuple(values)} where numbers from 0 on belong")
    return tuple(values)


def _volume(sizes: tuple[int, ...]) -> int:
    volume = 1
    for size in sizes:
        volume *= size
    return volume


Reader = Callable[[Piece], Any]


def assemble(entry: Entry, read: Reader) -> Any:
    """A tensor of its parts, on the CPU, or a value.

    Args:
        entry: What is wanted.
        read: Gives what a piece holds.

    Raises:
        ForeignError: A piece holds something else.
    """
    if entry.dtype is None:
        return read(entry.pieces[0])
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    for piece in entry.pieces:
        part = read(piece)
        if not isinstance(part, torch.Tensor) or tuple(part.shape) != piece.sizes:
            shape = tuple(getattr(part, "shape", ()))
            raise ForeignError(
                f"a part of {entry.name!r} is a {type(part).__name__} of shape {shape} instead of "
                f"{piece.sizes}"
            )
        into = whole
        for dimension, (offset, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
            into = into.narrow(dimension, offset, size)
        into.copy_(part)
    return whole
