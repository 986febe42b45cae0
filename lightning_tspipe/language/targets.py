"""What a teacher says of samples: how it is named, compared and written.

A folder of kept targets::

    index.json                          written last: what they are, of whom, and which files
    targets-00000-00000.safetensors     samples behind each other, written by rank 0
    targets-00001-00000.safetensors     by rank 1, the loss rank of another replica
    head.safetensors                    with hidden states: the teacher's head

A shard has the ids of its samples, where each ends, and a digest of its tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_tspipe.errors import ConfigurationError

VERSION = 1
INDEX, HEAD = "index.json", "head.safetensors"
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


class Targets(NamedTuple):
    """What a teacher says of a batch of samples; ``DistillationLoss.targets`` makes it.

    Attributes:
        tokens: The samples, shape (samples, tokens).
        parts: By name, shape (samples, tokens, numbers).
        settings: What they depend on.
        head: The teacher's weight and bias, beside hidden states.
    """

    tokens: Tensor
    parts: Mapping[str, Tensor]
    settings: Mapping[str, Any]
    head: Mapping[str, Tensor]

    @classmethod
    def of_words(
        cls, tokens: Tensor, words: Tensor, logs: Tensor, temperature: float, number: int
    ) -> Self:
        """The most likely words, and logs of their probabilities and of that of all others."""
        settings = {
            "kind": "top_k",
            "k": words.shape[-1],
            "temperature": float(temperature),
            "vocabulary": number,
        }
        return cls(tokens, {"words": words, "log_probs": logs}, settings, {})

    @classmethod
    def of_hidden(cls, tokens: Tensor, hidden: Tensor, head: nn.Linear) -> Self:
        """Hidden states and a head."""
        settings = {"kind": "hidden", "vocabulary": head.out_features}
        given = {name: part.detach() for name, part in head.named_parameters()}
        return cls(tokens, {"hidden": hidden}, settings, given)


def log_probs_key(temperature: float, number: int) -> str:
    """The key of log probabilities in a batch.

    It says what they are good for: so no batch can be compared at another temperature, and nothing
    waits for a device to find out.
    """
    return f"log probabilities of {number} words at temperature {float(temperature)!r} (bits)"


def to_bits(logs: Tensor) -> Tensor:
    """Logs as whole numbers, which no ``Trainer(precision="bf16-true")`` rounds in a batch."""
    return logs.view(_BITS[logs.dtype])


def from_bits(bits: Tensor) -> Tensor:
    """The inverse."""
    return bits.view(next(dtype for dtype, whole in _BITS.items() if whole == bits.dtype))


def digest(tokens: Tensor) -> int:
    """A number that tells the tokens of a sample from others."""
    content = tokens.detach().long().cpu().contiguous().numpy().tobytes()
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little", signed=True)


class TargetShards:
    """Writes what one process has, as shards of a bounded size.

    Args:
        folder: Where to.
        rank: Of this process.
        dtype: In which numbers are written; None: as they are.
        shard_bytes: A shard is written when it has so many.
    """

    def __init__(
        self, folder: Path, rank: int, dtype: torch.dtype | None, shard_bytes: int
    ) -> None:
        self._folder, self._rank, self._dtype, self._shard_bytes = folder, rank, dtype, shard_bytes
        self._waiting: list[dict[str, Tensor]] = []
        self._files: dict[str, Any] = {}
        self._described: dict[str, Any] = {}
        self._num_samples = 0

    def add(self, ids: Sequence[int], targets: Targets) -> None:
        """Write a batch, or have it wait for more.

        Raises:
            ConfigurationError: It has other settings than those before, as many ids as not samples,
                or numbers that aren't finite in the data type.
        """
        if len(ids) != len(targets.tokens):
            raise ConfigurationError(
                f"{len(targets.tokens)} samples have {len(ids)} ids. Ids are the places of samples "
                "in their dataset: predict on a DataLoader of one with a length"
            )
        parts = {name: self._stored(part) for name, part in targets.parts.items()}
        for name, part in parts.items():
            if part.is_floating_point() and not part.isfinite().all():
                raise ConfigurationError(
                    f"the {name} of samples {list(ids)} are not finite in {part.dtype}: keep them "
                    'with TargetWriter(dtype="float32"), or look for nan in the teacher'
                )
        described = dict(targets.settings) | {
            "parts": {
                name: {"numbers": part.shape[-1], "dtype": _name(targets.parts[name].dtype)}
                for name, part in parts.items()
            }
        }
        if self._described and described != self._described:
            raise ConfigurationError(
                f"targets change from {self._described} to {described}: keep those of one kind"
            )
        if targets.head and not self._described:
            write(self._folder / HEAD, targets.head, by=self._rank)
            self._files[HEAD] = (self._folder / HEAD).stat().st_size
        self._described = described
        lengths = torch.full((len(ids),), targets.tokens.shape[1])
        digests = torch.tensor([digest(sample) for sample in targets.tokens])
        known = {"ids": torch.tensor(ids), "lengths": lengths, "digests": digests}
        self._waiting.append(known | parts)
        self._num_samples += len(ids)
        if (
            sum(part.nbytes for each in self._waiting for part in each.values())
            >= self._shard_bytes
        ):
            self._write()

    def close(self) -> None:
        """Write the rest, and what this process has written."""
        if self._waiting:
            self._write()
        own = {
            "described": self._described,
            "num_samples": self._num_samples,
            "files": self._files,
        }
        _write_text(part_file(self._folder, self._rank), json.dumps(own))

    def _stored(self, part: Tensor) -> Tensor:
        dtype = self._dtype if part.is_floating_point() else None
        return part.detach().flatten(0, 1).to("cpu", dtype or part.dtype, copy=True)

    def _write(self) -> None:
        number = sum(name != HEAD for name in self._files)
        file = self._folder / f"targets-{self._rank:05d}-{number:05d}.safetensors"
        whole = {
            name: torch.cat([each[name] for each in self._waiting]) for name in self._waiting[0]
        }
        self._waiting = []
        write(file, whole, by=self._rank)
        self._files[file.name] = file.stat().st_size


def write(file: Path, tensors: Mapping[str, Tensor], by: int) -> None:
    """Write a file whole or not at all; others may write the same one."""
    part = file.with_name(f".{file.name}.{by}.part")
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, part)
    part.replace(file)


def _write_text(file: Path, text: str) -> None:
    part = file.with_name(f".{file.name}.part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(file)


def part_file(folder: Path, rank: int) -> Path:
    """What a process says of its shards, until there is an index."""
    return folder / f"part-{rank:05d}.json"


def begin(folder: Path) -> None:
    """Remove what an interrupted pass has left.

    Raises:
        ConfigurationError: There are whole targets.
    """
    if (folder / INDEX).exists():
        raise ConfigurationError(
            f"{folder} has targets already: train with them, remove them, or give another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in ("targets-*.safetensors", HEAD, "part-*.json", ".*.part"):
        for file in folder.glob(pattern):
            file.unlink()


def finish(folder: Path, num_ranks: int, known: Mapping[str, Any]) -> None:
    """Write the index of what all processes have written.

    Args:
        folder: Where to.
        num_ranks: Processes.
        known: What else the index says.

    Raises:
        ConfigurationError: What a process has written isn't there, or there is nothing.
    """
    parts = [part_file(folder, rank) for rank in range(num_ranks)]
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise ConfigurationError(
            f"{folder} lacks what other processes wrote ({', '.join(missing)}): give a folder that "
            "all machines share"
        )
    read = [json.loads(part.read_text(encoding="utf-8")) for part in parts]
    described = [each["described"] for each in read if each["described"]]
    if not described:
        raise ConfigurationError(f"no targets for {folder}: predict_step has returned none")
    files = {name: size for each in read for name, size in each["files"].items()}
    index = {
        "version": VERSION,
        **described[0],
        "num_samples": sum(each["num_samples"] for each in read),
        **known,
        "files": dict(sorted(files.items())),
    }
    _write_text(folder / INDEX, json.dumps(index, indent=2))
    for part in parts:
        part.unlink()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
