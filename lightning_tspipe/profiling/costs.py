"""What atoms cost, by kind: known from this run, and from earlier ones on the same machine.

A file holds the costs of the networks of one module, so that they were measured together::

    {"forward": {"4": 0.0125, "8": 0.0241}, "backward": ...}     for each kind of atom

Kinds are texts that tell all that an atom does (:mod:`lightning_tspipe.profiling.kinds`); the file
has their checksums. Several processes may read and write it at once: it is replaced as a whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import secrets
from collections.abc import Hashable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("lightning_tspipe")

CACHE = "LIGHTNING_TSPIPE_CACHE"
"""The environment variable of the folder for measured costs; "off": they are not kept."""

_OFF = "off"
_FORMAT = 1
Times = dict[str, dict[int, float]]
"""Seconds by name (as in ``AtomProfile``) and number of samples."""


class Costs:
    """What is known of atoms.

    Args:
        file: Where it is kept for later runs; None: nowhere.

    Attributes:
        found: What was found of networks without running them, by what asks for it.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file, self._has_changed = file, False
        self._times: dict[Any, Times] = {} if file is None else {**_read(file)}
        self.found: dict[Hashable, Any] = {}

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor], device: torch.device) -> Costs:
        """What is known of networks on this machine.

        Args:
            tensors: Their parameters and buffers.
            device: Where they run.
        """
        folder = cache_folder()
        if folder is None:
            return cls()
        shapes = sorted(f"{tuple(t.shape)} {t.dtype} {t.requires_grad}" for t in tensors)
        name = checksum([_FORMAT, *machine(device), *shapes])[:20]
        return cls(folder / f"costs-{name}.json")

    def times(self, kind: Hashable) -> Times:
        """The times of a kind of atom, which may be added to with :meth:`note`."""
        return self._times.get(kind, {})

    def knows(self, kind: Hashable, size: int) -> bool:
        """Whether a kind was measured with so many samples."""
        return size in self.times(kind).get("forward", {})

    def note(self, kind: Hashable, size: int, taken: dict[str, float]) -> None:
        """An atom was run; of several times, the shortest counts."""
        times = self._times.setdefault(kind, {})
        for name, seconds in taken.items():
            known = times.setdefault(name, {})
            known[size] = min(seconds, known.get(size, seconds))
        self._has_changed = True

    def keep(self) -> None:
        """Write the file, if there is anything new; a folder that can't be written is none."""
        if self._file is None or not self._has_changed:
            return
        kept = _read(self._file)  # with what another process has written meanwhile
        for kind, times in self._times.items():
            if isinstance(kind, str):
                known = kept.setdefault(kind, {})
                known.update({name: known.get(name, {}) | times[name] for name in times})
        write_whole(self._file, json.dumps(kept))
        self._has_changed = False


def checksum(known: Iterable[object]) -> str:
    """A name for what a list says."""
    return hashlib.sha256(repr(list(known)).encode()).hexdigest()


def cache_folder() -> Path | None:
    """The folder for what is measured; None: nothing is kept."""
    chosen = os.environ.get(CACHE, "")
    if chosen:
        return None if chosen.lower() == _OFF else Path(chosen).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "lightning_tspipe"


def machine(device: torch.device) -> list[object]:
    """What times depend on beside what is computed."""
    return [
        torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        str(device.type), torch.__version__, torch.get_num_threads(),
        torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark, torch.is_autocast_enabled(device.type),
        torch.get_autocast_dtype(device.type),
    ]  # fmt: skip


@cache
def _processor() -> str:
    """The model and number of processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.processor())} {platform.machine()} {os.cpu_count()}"


def _read(file: Path) -> dict[str, Times]:
    """What a file holds; nothing if there is none, or if it is damaged."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return {}
    except UnicodeDecodeError:
        text = ""
    try:
        return {
            kind: {name: dict(map(_checked, by_size.items())) for name, by_size in times.items()}
            for kind, times in json.loads(text).items()
        }
    except (AttributeError, TypeError, ValueError):
        log.warning("%s is damaged: what it held is measured again", file)
        return {}


def _checked(entry: tuple[str, float]) -> tuple[int, float]:
    size, seconds = int(entry[0]), float(entry[1])
    if size < 1 or not math.isfinite(seconds) or seconds < 0:
        raise ValueError(entry)
    return size, seconds


def write_whole(file: Path, text: str) -> None:
    """Write a file whole or not at all; a cache that can't be written is none."""
    part = file.with_name(f"{file.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    except OSError as error:
        log.info("the measured costs were not saved: %s", error)
        with suppress(OSError):
            part.unlink(missing_ok=True)
