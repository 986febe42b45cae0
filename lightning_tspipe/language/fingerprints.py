"""Which teacher and which tokenizer: short texts that change when their files do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.language.pretrained import folder_of
from lightning_tspipe.weight_files import WeightFiles

_TOKENIZERS = (
    ("tokenizer.json",),
    ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    ("vocab.json", "vocab.txt", "merges.txt"),
)
"""Files that say which text is which token; those of the first row that is there count, since tools
add others."""


def fingerprint_of_teacher(name: str | Path) -> str:
    """Of a model's configuration, and of each of its weights the name, type, shape and some values.

    Args:
        name: A folder that ``save_pretrained`` wrote, or a name on the hub whose files are here.

    Raises:
        ConfigurationError: They aren't here.
        CheckpointError: A file is missing or damaged.
    """
    folder, made = _here(name, "teacher"), _hash()
    config = folder / "config.json"
    made.update(config.read_bytes() if config.exists() else b"")
    weights = WeightFiles.of(folder)
    for key, values in sorted(weights.samples(), key=lambda each: each[0]):
        made.update(f"{key} {weights.shapes[key]} {values.dtype} ".encode())
        made.update(values.contiguous().view(torch.uint8).numpy().tobytes())
    return str(made.hexdigest())


def fingerprint_of_tokenizer(name: str | Path) -> str:
    """Of the files that say which text is which token.

    Args:
        name: A folder, or a name on the hub whose files are here.

    Raises:
        ConfigurationError: They aren't here.
    """
    folder = _here(name, "tokenizer")
    for row in _TOKENIZERS:
        files = [folder / file for file in row if (folder / file).is_file()]
        if files:
            made = _hash()
            for file in files:
                made.update(f"{file.name} ".encode() + file.read_bytes())
            return str(made.hexdigest())
    raise ConfigurationError(
        f"{name} has no tokenizer: none of {', '.join(file for row in _TOKENIZERS for file in row)}"
    )


FINGERPRINTS: Mapping[str, Callable[[str | Path], str]] = {
    "teacher": fingerprint_of_teacher,
    "tokenizer": fingerprint_of_tokenizer,
}


def _here(name: str | Path, role: str) -> Path:
    try:
        return folder_of(name, download=False)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{role}={str(name)!r} is not on this machine, so it can't be compared with kept "
            f"targets: give its folder, or leave out {role}="
        ) from error


def _hash() -> Any:
    return blake2b(digest_size=16)
