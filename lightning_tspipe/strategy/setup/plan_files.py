"""Plans in files: what ``tspipe plan --save`` wrote, or a checkpoint of a run that went by one."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.run_plan import PLAN

_ENTRY, _META_FILE = "lightning_tspipe", "meta.pt"


def read_plan(path: Path) -> Plan:
    """The plan in a file, or in a folder of shards.

    Raises:
        ConfigurationError: There is no such file, or no plan in it.
    """
    file = path / _META_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigurationError(
            f"plan={str(path)!r}: there is no such file; `tspipe plan --save {path.name}` writes it"
        )
    if not zipfile.is_zipfile(file):  # as torch.save writes them
        return Plan.from_json(file.read_text(encoding="utf-8"))
    return Plan.from_json(_text_in(file))


def _text_in(file: Path) -> str:
    """The plan in a checkpoint, of which nothing else comes into memory."""
    try:
        checkpoint = torch.load(file, map_location="meta", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise ConfigurationError(
            f"plan={str(file)!r} can't be read without running code from it "
            f"({str(error).splitlines()[0]}). Load it yourself, and give "
            f"plan=Plan.from_json(checkpoint[{_ENTRY!r}][0][{PLAN!r}])"
        ) from None
    entry: Any = checkpoint.get(_ENTRY) or [{}]
    text: str | None = entry[0].get(PLAN)
    if text is None:
        raise ConfigurationError(
            f"plan={str(file)!r}: the checkpoint has no plan. It is one of another strategy, of an "
            "older version, or of a run that searched for none: whose partition was given, that "
            "has heads or relayed blocks, or ran on one device"
        )
    return text
