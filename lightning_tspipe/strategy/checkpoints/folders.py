"""A folder of shards: found, put in its place, read without running code from it, and compared.

``torch.distributed.checkpoint`` writes the table of contents, ``.metadata``, with pickle, and its
own reader would run whatever code stands in such a file. Here a name in it is looked up among those
that belong there.

Each file is summed in blocks, so that a rank compares what it reads and no more, and so that a
message can tell where a file is damaged. The table lies beside the files::

    checksums.json    {"version": 1,
                       "files": {"__0_0.distcp": {"size": 2700000, "blocks": "1f0e2c77 03c1a9d2"},
                                 ".metadata": ..., "meta.pt": ...},
                       "crc32": of "files"}
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from math import prod
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_tspipe.errors import CheckpointError
from lightning_tspipe.runtime.faults.failures import first_line
from lightning_tspipe.runtime.weights.materializing import Place, Source
from lightning_tspipe.strategy.checkpoints import files

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

CONTENTS_FILE = ".metadata"
META_FILE = "meta.pt"
TABLE_FILE = "checksums.json"
BLOCK = 2**20
"""Bytes that have a checksum of their own."""
IS_SUMMED = "lightning_tspipe_checksums"
"""In ``meta.pt``: the folder was written with checksums."""
_SUFFIX = ".distcp"
_VERSION = 1
_OF_METADATA = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
    "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
)  # fmt: skip


@cache
def _torchs() -> Any:
    """Torch's module of what is in a checkpoint: a tenth of a second that few runs have to wait."""
    from torch.distributed.checkpoint import metadata  # noqa: PLC0415 - as said

    return metadata


@cache
def _known() -> dict[tuple[str, str], Any]:
    """The classes of which contents are made."""
    from torch.distributed.checkpoint import filesystem  # noqa: PLC0415 - as above

    metadata = _torchs()
    return {
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


def is_sharded(path: Path) -> bool:
    """Whether a path is a folder of shards.

    Raises:
        CheckpointError: It is a folder in which something is missing.
    """
    if not path.is_dir():
        return False
    missing = [name for name in (CONTENTS_FILE, META_FILE) if not (path / name).is_file()]
    if missing:
        found = sorted(entry.name for entry in path.iterdir())
        raise CheckpointError(
            f"{str(path)!r} is a folder, but not a complete sharded checkpoint: "
            f"{' and '.join(missing)} is missing (it holds {', '.join(found[:5]) or 'nothing'}). "
            f"Give another ckpt_path{files.others_beside(path)}"
        )
    return True


def take_place_of(part: Path, path: Path) -> None:
    """Put a finished folder where an older checkpoint may be.

    A folder can't replace another one at once: should the process end between the two renames,
    :func:`newest` finds the older one.
    """
    old = aside(path)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    part.rename(path)
    if old.is_dir():
        shutil.rmtree(old)
    else:
        old.unlink(missing_ok=True)


def newest(path: Path) -> Path:
    """The checkpoint of a path, also when its replacement was cut short."""
    old = aside(path)
    return old if old.exists() and not path.exists() else path


def aside(path: Path) -> Path:
    """The path of a checkpoint while its replacement takes its place."""
    return path.with_name(f".{path.name}.old")


class Sums(NamedTuple):
    """What is known of a file.

    Attributes:
        size: In bytes.
        blocks: The CRC-32 of each ``BLOCK`` bytes; the last block may be shorter.
    """

    size: int
    blocks: tuple[int, ...]


def sums_of(path: Path) -> Sums:
    """Of a file that was just written."""
    with path.open("rb") as file:
        blocks = tuple(map(zlib.crc32, iter(lambda: file.read(BLOCK), b"")))
        return Sums(file.tell(), blocks)


def to_json(sums_of_files: Mapping[str, Sums]) -> str:
    """The table of some files, with a checksum of its own."""
    table = {
        name: {"size": sums.size, "blocks": " ".join(f"{block:08x}" for block in sums.blocks)}
        for name, sums in sorted(sums_of_files.items())
    }
    text = {"version": _VERSION, "files": table, "crc32": f"{_sum_of_table(table):08x}"}
    return json.dumps(text, indent=1)


def from_json(text: bytes) -> dict[str, Sums]:
    """The files of a table.

    Raises:
        files.DamageError: It differs from what :func:`to_json` wrote.
    """
    try:
        data = json.loads(text.decode("ascii"))
        if data["version"] != _VERSION:
            raise files.DamageError(f"it has version {data['version']!r}, not {_VERSION}")
        table = data["files"]
        if int(data["crc32"], 16) != _sum_of_table(table):
            raise files.DamageError("its checksum does not match")
        return {
            name: Sums(entry["size"], tuple(int(block, 16) for block in entry["blocks"].split()))
            for name, entry in table.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise files.DamageError(f"it can't be parsed ({type(error).__name__})") from None


def _sum_of_table(table: Any) -> int:
    return zlib.crc32(json.dumps(table, sort_keys=True).encode("ascii"))


class ForeignError(Exception):
    """Something that does not belong into a folder of shards; says what."""


class FolderSource(Source):
    """A folder of shards.

    Args:
        path: The folder.
        verify: Whether what is read is compared with its checksums.
        trusts: Whether values are read of which reading may run code.

    Attributes:
        num_optimizers: Optimizers whose state it holds.
        has_checksums: Whether it was written with checksums, and they are compared.

    Raises:
        CheckpointError: A file is missing, cut off or damaged, or the folder is of another kind.
    """

    def __init__(self, path: Path, *, verify: bool = True, trusts: bool = False) -> None:
        self._path = path
        self._verify, self._trusts = verify, trusts
        self._compare = cache(self._compare_block)  # small values often share a block
        self._table = self._read_table() if verify else None
        self.has_checksums = self._table is not None
        with self._explained(f"its {CONTENTS_FILE}"):
            with self._open(CONTENTS_FILE) as file:
                self._contents = _contents_of(file.read())
            self._names: dict[Place, str] = {
                place: name for name, place in self._contents.planner_data.items()
            }
        roots = {str(place[0]) for place in self._names}
        self.num_optimizers = sum(root.startswith("optimizer_") for root in roots)

    @property
    @override
    def places(self) -> Collection[Place]:
        return self._names.keys()

    @property
    @override
    def shapes(self) -> dict[str, tuple[int, ...]]:
        entries = self._contents.state_dict_metadata
        return {
            str(place[1]): tuple(entry.size)
            for place, name in self._names.items()
            if place[0] == "model"
            and isinstance(entry := entries[name], _torchs().TensorStorageMetadata)
        }

    def rest(self) -> dict[str, Any]:
        """What ``meta.pt`` holds: what Lightning keeps beside the weights and the optimizers.

        Raises:
            CheckpointError: It is damaged, or holds what may run code.
        """
        with self._explained(META_FILE), self._open(META_FILE) as file:
            found = _load(file, trusts=self._trusts)
            if not isinstance(found, dict):
                raise ForeignError(f"it holds a {type(found).__name__}")
        if found.pop(IS_SUMMED, False) and self._verify and self._table is None:
            raise files.damaged(self._path, f"its {TABLE_FILE} is missing", is_summed=True)
        return found

    def check_sizes(self) -> None:
        """Look whether all files are there, and as long as what is to be read from them.

        Raises:
            CheckpointError: One is missing or was cut off.
        """
        for index, info in self._contents.storage_data.items():
            with self._explained(f"{index.fqn!r} in {info.relative_path}"):
                found = (self._path / info.relative_path).stat().st_size
                if found < info.offset + info.length:
                    told = f"its file {info.relative_path!r} was cut off ({found:,} bytes)"
                    raise files.damaged(self._path, told)

    def compare(self) -> None:
        """Read all files once, and compare them; without checksums there is nothing to compare.

        Raises:
            CheckpointError: Something differs from what was written.
        """
        for name, sums in (self._table or {}).items():
            with self._explained(name):
                for number in range(len(sums.blocks)):
                    self._compare_block(name, number)

    @override
    def read(self, place: Place) -> Any:
        name = self._names[place]
        entry = self._contents.state_dict_metadata[name]
        if not isinstance(entry, _torchs().TensorStorageMetadata):
            return self._read_piece(_torchs().MetadataIndex(name), trusts=self._trusts)
        with self._explained(repr(name)):
            whole = torch.empty(entry.size, dtype=entry.properties.dtype)
            for chunk in entry.chunks:
                part = self._read_piece(_torchs().MetadataIndex(name, chunk.offsets), trusts=False)
                if not isinstance(part, Tensor) or part.shape != chunk.sizes:
                    raise ForeignError(f"a part is a {type(part).__name__} that does not belong")
                if part.shape == entry.size:
                    return part.to(whole.dtype)
                ends = zip(chunk.offsets, chunk.sizes, strict=True)
                whole[tuple(slice(first, first + size) for first, size in ends)].copy_(part)
        return whole

    def _read_piece(self, index: MetadataIndex, *, trusts: bool) -> Any:
        info = self._contents.storage_data[index]
        with (
            self._explained(f"{index.fqn!r} in {info.relative_path}"),
            self._open(info.relative_path, info.offset, info.length) as file,
        ):
            return _load(file, trusts=trusts)

    @contextmanager
    def _open(self, name: str, start: int = 0, length: int | None = None) -> Iterator[Any]:
        """A part of a file, or all of it, which was compared."""
        with (self._path / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            end = size if length is None else min(start + length, size)
            if self._table is not None:
                for number in range(start // BLOCK, -(-end // BLOCK)):
                    self._compare(name, number)
            from torch.distributed.checkpoint.utils import _create_file_view  # noqa: PLC0415

            yield _create_file_view(file, start, max(0, end - start))

    def _compare_block(self, name: str, number: int) -> None:
        assert self._table is not None
        if name not in self._table:
            raise ForeignError(f"its file {name!r} is not among those that were written")
        first = number * BLOCK
        with (self._path / name).open("rb") as file:
            file.seek(first)
            content = file.read(BLOCK)
        if (zlib.crc32(content),) != self._table[name].blocks[number : number + 1]:
            raise files.DamageError(
                f"bytes {first:,} to {first + len(content):,} of its file {name!r} differ from "
                "what was written"
            )

    def _read_table(self) -> dict[str, Sums] | None:
        file = self._path / TABLE_FILE
        if not file.is_file():
            return None
        try:
            table = from_json(file.read_bytes())
        except files.DamageError as error:
            raise files.damaged(self._path, f"its {TABLE_FILE}: {error}", is_summed=True) from None
        for name, (expected, _) in table.items():
            file = self._path / name
            if not file.is_file():
                raise files.damaged(self._path, f"its file {name!r} is missing")
            found = file.stat().st_size
            if found != expected:
                how = "was cut off" if found < expected else "is too long"
                told = f"its file {name!r} {how} ({found:,} bytes instead of {expected:,})"
                raise files.damaged(self._path, told)
        return table

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Say of a failure what was read, and what to do."""
        try:
            yield
        except (CheckpointError, PermissionError):
            raise
        except ForeignError as error:
            raise CheckpointError(
                f"{str(self._path)!r} is not a sharded checkpoint in the layout of this strategy "
                f"and Lightning's FSDPStrategy: {what}: {error}. No code from it was run. Give "
                f"another ckpt_path{files.others_beside(self._path)}"
            ) from None
        except files.DamageError as error:
            told = f"{error}, so {what} can't be read"
            raise files.damaged(self._path, told, is_summed=True) from None
        except FileNotFoundError as error:
            name = Path(str(error.filename)).name
            raise files.damaged(self._path, f"its file {name!r} is missing") from None
        except Exception as error:  # noqa: BLE001 - torch reads on, into whatever comes of it
            if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
                raise files.untrusted(self._path, what, error) from None
            told = f"{what} can't be read ({type(error).__name__}: {first_line(error)})"
            raise files.damaged(self._path, told) from None


def _load(file: Any, *, trusts: bool) -> Any:
    return torch.load(file, map_location="cpu", weights_only=not trusts)


def _contents_of(content: bytes) -> Metadata:
    """The table of contents of a folder.

    Raises:
        ForeignError: It is not that of a folder of shards.
    """
    try:
        return _checked(_Unpickler(io.BytesIO(content)).load())
    except ForeignError:
        raise
    except Exception as error:  # noqa: BLE001 - what a pickle that is none may end with has no common type
        raise ForeignError(f"it is inconsistent ({type(error).__name__}: {error})") from None


class _Unpickler(pickle.Unpickler):
    """Knows a few classes of data, and nothing that does something."""

    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        known = _known().get((module_name, global_name))
        if known is not None:
            return known
        if module_name == "torch" and isinstance(vars(torch).get(global_name), torch.dtype):
            return vars(torch)[global_name]
        raise ForeignError(
            f"it would load {module_name}.{global_name}, which no sharded checkpoint needs"
        )

    @override
    def persistent_load(self, pid: Any) -> Any:
        raise ForeignError("it refers to objects outside the file")


def _checked(found: Any) -> Metadata:
    """Refuse contents that would be read otherwise than they were written, or from elsewhere."""
    if not isinstance(found, _torchs().Metadata):
        raise ForeignError(f"it holds a {type(found).__name__}, not torch's Metadata")
    if not isinstance(found.planner_data, Mapping):
        raise ForeignError("it was written without the names of what it holds (flat_state_dict)")
    roots = sorted({str(place[0]) for place in found.planner_data.values()})
    if "model" not in roots:
        raise ForeignError(f"it has no 'model', but {', '.join(roots[:5]) or 'nothing'}")
    for index, info in found.storage_data.items():
        _check_piece(index.fqn, info)
    for name in found.planner_data:
        _check_entry(name, found.state_dict_metadata[name], found.storage_data)
    contents: Metadata = found
    return contents


def _check_piece(name: str, info: Any) -> None:
    file = info.relative_path
    # Not just anywhere on this machine.
    if PurePosixPath(file).name != file or not file.endswith(_SUFFIX):
        raise ForeignError(f"{name!r} would be read from {file!r}")
    if info.transform_descriptors:
        raise ForeignError(f"{name!r} is encoded by {info.transform_descriptors}")
    if min(info.offset, info.length) < 0:
        raise ForeignError(f"{name!r} would be read from before the beginning of {file!r}")


def _check_entry(name: str, entry: Any, pieces: Mapping[MetadataIndex, Any]) -> None:
    parts = [_torchs().MetadataIndex(name)]
    if isinstance(entry, _torchs().TensorStorageMetadata):
        parts = [_torchs().MetadataIndex(name, chunk.offsets) for chunk in entry.chunks]
        if sum(prod(chunk.sizes) for chunk in entry.chunks) != prod(entry.size):
            raise ForeignError(f"the shape of {name!r} does not match its parts")
    if not all(part in pieces for part in parts):
        raise ForeignError(f"it is inconsistent: parts of {name!r} are missing")
