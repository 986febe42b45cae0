"""Kept targets: read by sample id, for runs that need no teacher."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_tspipe.errors import CheckpointError, ConfigurationError
from lightning_tspipe.language.fingerprints import FINGERPRINTS
from lightning_tspipe.language.targets import (
    HEAD,
    INDEX,
    VERSION,
    digest,
    log_probs_key,
    to_bits,
)

_OPEN_FILES = 32
_AGAIN = "keep the targets anew with TargetWriter, in an empty folder"


class KeptTargets:
    """What a teacher said of samples, in a folder that :class:`TargetWriter` wrote.

    Each process opens the files when it first reads, so workers of a ``DataLoader`` may be forked
    or spawned; it reads what it is asked for, from mapped memory.

    Args:
        folder: Of the targets.
        teacher: A folder, or a name on the hub whose files are here: that of which targets are
            expected; None: any.
        tokenizer: The same for the tokenizer of the student.

    Attributes:
        kind: ``"top_k"`` or ``"hidden"``.
        k: How many words, or None.
        temperature: At which they were kept, or None.
        vocabulary: Words of the teacher's head.
        num_samples: How many samples there are.

    Raises:
        ConfigurationError: There are no whole targets; or they are of another teacher or tokenizer,
            or of another version of this package.
        CheckpointError: A file is missing or damaged.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        teacher: str | Path | None = None,
        tokenizer: str | Path | None = None,
    ) -> None:
        self.folder = Path(folder)
        index = self._index = _read_index(self.folder)
        self.kind: str = index["kind"]
        self.k: int | None = index.get("k")
        self.temperature: float | None = index.get("temperature")
        self.vocabulary: int = index["vocabulary"]
        self.num_samples: int = index["num_samples"]
        for name, size in index["files"].items():
            file = self.folder / name
            if not file.exists() or file.stat().st_size != size:
                state = "is cut off" if file.exists() else "is missing"
                raise CheckpointError(f"{file} {state}: copy the folder again, or {_AGAIN}")
        for role, given in {"teacher": teacher, "tokenizer": tokenizer}.items():
            if given is not None:
                self._compare(role, str(given), FINGERPRINTS[role](given))

    def read(self, name: int, tokens: Tensor) -> Any:
        """The targets of a sample.

        Args:
            name: Its id: its place in the dataset that the teacher has seen.
            tokens: Its tokens, shape (tokens,), which are compared.

        Returns:
            Hidden states, shape (tokens, width); or what ``DistillationLoss.kept`` takes.

        Raises:
            ConfigurationError: There are none of this sample, or it had other tokens.
            CheckpointError: A file is damaged.
        """
        ids, order, known = self._samples
        place = int(torch.searchsorted(ids, name))
        if place == len(ids) or ids[place] != name:
            raise ConfigurationError(
                f"{self.folder} has no targets of sample {name}; it has {len(ids)} samples, from "
                f"{int(ids[0])} to {int(ids[-1])}. Train on samples that are there (Subset), or "
                f"{_AGAIN}"
            )
        file, start, length, mark = known[order[place]].tolist()
        if tokens.shape != (length,) or digest(tokens) != mark:
            raise ConfigurationError(
                f"sample {name} has other tokens than when its targets in {self.folder} were kept "
                f"({tuple(tokens.shape)} of them now, {length} then): other texts, lengths, order "
                f"or tokenizer. Wrap the dataset that the teacher has seen, or {_AGAIN}"
            )
        rows = slice(start, start + length)
        found = {name: self._part(self._shards[file], name, rows) for name in self._index["parts"]}
        if self.kind == "hidden":
            return found["hidden"]
        assert self.temperature is not None
        key = log_probs_key(self.temperature, self.vocabulary)
        return {"words": found["words"], key: to_bits(found["log_probs"])}

    def head(self) -> nn.Linear:
        """The teacher's head, frozen, beside kept hidden states.

        In ``configure_model`` under this package's strategies it is read by the rank that keeps it.

        Raises:
            ConfigurationError: The targets are no hidden states.
        """
        if self.kind != "hidden":
            raise ConfigurationError(
                f"{self.folder} has the most likely words, which need no teacher's head: call "
                "DistillationLoss.kept"
            )
        file = self.folder / HEAD
        with _opened(file) as opened:
            shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
            dtype = opened.get_slice("weight")[:1].dtype
        number, width = shapes["weight"]
        with torch.device("meta"):  # draws nothing
            made = nn.Linear(width, number, "bias" in shapes)
        for name, shape in shapes.items():
            value = torch.empty(*shape, dtype=dtype)
            setattr(made, name, nn.Parameter(value, requires_grad=False))
            with torch.no_grad():
                torch.ops.lightning_tspipe.read_weight(getattr(made, name), str(file), name)
        return made

    def _compare(self, role: str, name: str, fingerprint: str) -> None:
        kept = self._index[role]
        if kept is None:
            raise ConfigurationError(
                f"{self.folder} does not say of which {role} it is: leave out {role}=, or keep "
                f"targets with TargetWriter({role}=...)"
            )
        if kept["fingerprint"] != fingerprint:
            raise ConfigurationError(
                f"{self.folder} has targets of the {role} {kept['name']!r}, whose files are others "
                f"than those of {name!r} now: give that {role}, or {_AGAIN}"
            )

    @property
    def _shards(self) -> list[str]:
        return [name for name in self._index["files"] if name != HEAD]

    @cached_property
    def _samples(self) -> tuple[Tensor, Tensor, Tensor]:
        """All ids in order; where they are in the third; file, start, length and digest of each."""
        ids, known = [], []
        for number, name in enumerate(self._shards):
            here, lengths, marks = (
                self._tensor(name, key) for key in ("ids", "lengths", "digests")
            )
            starts = lengths.cumsum(0) - lengths
            ids.append(here)
            known.append(torch.stack([torch.full_like(here, number), starts, lengths, marks], 1))
        ordered, order = torch.cat(ids).sort(stable=True)
        return ordered, order, torch.cat(known)

    @cached_property
    def _files(self) -> dict[str, Any]:
        """Files that are open in this process."""
        return {}

    def _tensor(self, file: str, name: str, rows: slice | None = None) -> Tensor:
        """A tensor of a file, or some rows of it, in memory of its own."""
        if file not in self._files:
            if len(self._files) == _OPEN_FILES:
                del self._files[next(iter(self._files))]
            self._files[file] = _opened(self.folder / file)
        opened = self._files[file]
        try:
            found = opened.get_tensor(name) if rows is None else opened.get_slice(name)[rows]
        except SafetensorError as error:
            raise CheckpointError(f"{self.folder / file} is damaged ({error}): {_AGAIN}") from error
        return found.clone()  # type: ignore[no-any-return]

    def _part(self, file: str, name: str, rows: slice) -> Tensor:
        """What is stored of a sample, in the data type that it had."""
        dtype: torch.dtype = getattr(torch, self._index["parts"][name]["dtype"])
        return self._tensor(file, name, rows).to(dtype)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {
            key: value for key, value in vars(self).items() if key not in {"_samples", "_files"}
        }


class WithTargets(Dataset[Any]):
    """A dataset that appends to each sample of another one what a teacher said of it.

    A sample ``(tokens, labels)`` becomes ``(tokens, labels, targets)``; a dictionary gets a key
    ``"targets"``. Batches are made as always, where samples have one length.

    Args:
        dataset: The one that the teacher has seen, whole: a sample's id is its place there. For a
            part of it: ``Subset(WithTargets(dataset, kept), places)``.
        kept: Targets.
        tokens: Which part of a sample is its tokens: number or key.
    """

    def __init__(self, dataset: Any, kept: KeptTargets, tokens: int | str = 0) -> None:
        self.dataset, self.kept, self.tokens = dataset, kept, tokens

    def __len__(self) -> int:
        return len(self.dataset)

    @override
    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        if not isinstance(sample, Mapping | Sequence) or isinstance(sample, str):
            raise ConfigurationError(
                f"samples are {type(sample).__name__}; targets are put beside other parts of a "
                "sample, so it has to be a tuple, list or dictionary"
            )
        parts: Any = sample
        targets = self.kept.read(int(index), torch.as_tensor(parts[self.tokens]))
        if isinstance(sample, Mapping):
            return {**sample, "targets": targets}
        return (*sample, targets)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} can't be read ({error}): {_AGAIN}") from error


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index: Any = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        state = "is from a pass that was interrupted" if folder.is_dir() else "is no folder"
        raise ConfigurationError(
            f"{folder} has no {INDEX}: it {state}. Run trainer.predict with TargetWriter again"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{folder / INDEX} is damaged ({error}): {_AGAIN}") from error
    version = index.get("version") if isinstance(index, dict) else None
    if version != VERSION:
        raise ConfigurationError(
            f"{folder} has targets in format {version}, and this version of "
            f"lightning-tspipe reads format {VERSION}: {_AGAIN}, or train with the version that "
            "wrote them"
        )
    return dict(index)
