"""Read a folder of shards without running code from it, and compare checksums."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_tspipe.errors import CheckpointError
from lightning_tspipe.runtime.faults.failures import first_line
from lightning_tspipe.strategy.checkpoints.checksums import (
    TABLE_FILE,
    BlockCache,
    DamageError,
    Sums,
    Window,
    from_json,
)
from lightning_tspipe.strategy.checkpoints.contents import (
    Entry,
    ForeignError,
    Piece,
    Place,
    assemble,
)
from lightning_tspipe.strategy.checkpoints.contents import read_contents as _read_contents
from lightning_tspipe.strategy.checkpoints.files import damaged, others_beside

CONTENTS_FILE = ".metadata"
META_FILE = "meta.pt"
IS_SUMMED = "lightning_tspipe_checksums"
"""In ``meta.pt``: the folder was written with checksums."""


class Folder:
    """A folder of shards.

    Args:
        path: The folder.
        verify: Whether what is read is compared with its checksums.
        trusts: Whether values are read of which reading may run code.

    Attributes:
        places: What it holds.
        has_checksums: Whether it was written with checksums, and they are compared.

    Raises:
        CheckpointError: A file is missing, cut off or damaged, or the folder is of another kind.
    """

    def __init__(self, path: Path, *, verify: bool = True, trusts: bool = False) -> None:
        self._path = path
        self._verify, self._trusts = verify, trusts
        self._cache = BlockCache()
        self._table = self._read_table() if verify else None
        self.has_checksums = self._table is not None
        with self._explained(f"its {CONTENTS_FILE}"):
            self.places: dict[Place, Entry] = _read_contents(self._content(CONTENTS_FILE))
        if not any(place[0] == "model" for place in self.places if place):
            roots = sorted({str(place[0]) for place in self.places if place})
            raise self._foreign(f"it has no 'model', but {', '.join(roots[:5]) or 'nothing'}")

    def rest(self) -> dict[str, Any]:
        """What ``meta.pt`` holds.

        Raises:
            CheckpointError: It is damaged, or holds what may run code.
        """
        with self._explained(META_FILE), self._open(META_FILE) as window:
            found = self._load(window, trusts=self._trusts)
        if not isinstance(found, dict):
            raise self._foreign(f"{META_FILE} holds a {type(found).__name__}")
        if found.pop(IS_SUMMED, False) and self._verify and self._table is None:
            raise damaged(self._path, f"its {TABLE_FILE} is missing", is_summed=True)
        return found

    def read(self, place: Place) -> Any:
        """A tensor, on the CPU, or a value.

        Raises:
            CheckpointError: It is damaged, or holds what may run code.
        """
        entry = self.places[place]
        with self._explained(repr(entry.name)):
            return assemble(entry, partial(self._read_piece, entry))

    def _read_piece(self, entry: Entry, piece: Piece) -> Any:
        where = f"{entry.name!r} in {piece.file}"
        with self._explained(where), self._open(piece.file, piece.start, piece.length) as window:
            return self._load(window, trusts=self._trusts and entry.dtype is None)

    def _open(self, name: str, start: int = 0, length: int | None = None) -> Window:
        sums = None
        if self._table is not None:
            if name not in self._table:
                raise ForeignError(f"its file {name!r} is not among those that were written")
            sums = self._table[name]
        path = self._path / name
        if length is None:
            length = path.stat().st_size
        return Window(path, start, length, sums, self._cache)

    def _content(self, name: str) -> bytes:
        with self._open(name) as window:
            return window.read()

    @staticmethod
    def _load(window: Window, *, trusts: bool) -> Any:
        try:
            return torch.load(window, map_location="cpu", weights_only=not trusts)  # type: ignore[arg-type]
        except Exception:
            if window.damage is not None:  # torch reports something that follows from it
                raise window.damage from None
            raise

    def _read_table(self) -> dict[str, Sums] | None:
        file = self._path / TABLE_FILE
        if not file.is_file():
            return None
        try:
            table = from_json(file.read_bytes())
        except DamageError as error:
            raise damaged(self._path, f"its {TABLE_FILE}: {error}", is_summed=True) from None
        for name, sums in table.items():
            self._check_size(self._path / name, sums.size)
        return table

    def _check_size(self, file: Path, expected: int) -> None:
        if not file.is_file():
            raise damaged(self._path, f"its file {file.name!r} is missing")
        found = file.stat().st_size
        if found != expected:
            how = "was cut off" if found < expected else "is too long"
            raise damaged(
                self._path,
                f"its file {file.name!r} {how} ({found:,} bytes instead of {expected:,})",
            )

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Say of a failure what was read, and what to do."""
        try:
            yield
        except (CheckpointError, PermissionError):
            raise
        except ForeignError as error:
            raise self._foreign(f"{what}: {error}") from None
        except DamageError as error:
            raise damaged(self._path, f"{error}, so {what} can't be read", is_summed=True) from None
        except FileNotFoundError as error:
            name = Path(str(error.filename)).name
            raise damaged(self._path, f"its file {name!r} is missing") from None
        except pickle.UnpicklingError as error:
            raise self._untrusted(what, error) from None
        except Exception as error:  # noqa: BLE001 - torch reads on, into whatever comes of it
            told = f"{what} can't be read ({type(error).__name__}: {first_line(error)})"
            raise damaged(self._path, told) from None

    def _foreign(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{str(self._path)!r} is no checkpoint of shards in the layout of this strategy and of "
            f"Lightning's FSDPStrategy: {what}. Nothing of it was run. Give ckpt_path another one"
            f"{others_beside(self._path)}"
        )

    def _untrusted(self, what: str, error: Exception) -> CheckpointError:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        if named is None:
            return damaged(self._path, f"{what} holds no pickle that torch would have written")
        return CheckpointError(
            f"{str(self._path)!r}: {what} holds more than tensors and plain values ({named[1]}), "
            "and reading it may run code. If you know who made it: "
            "trainer.fit(..., ckpt_path=..., weights_only=False)"
        )
