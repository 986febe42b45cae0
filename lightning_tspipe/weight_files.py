"""Weights in safetensors files, as ``save_pretrained`` of Hugging Face's libraries writes them.

A folder has one file, or several with an index that says which tensor is in which::

    model.safetensors                    model.safetensors.index.json
                                         model-00001-of-00002.safetensors
                                         model-00002-of-00002.safetensors

A tensor is read when somebody who keeps it needs it, in pieces, straight into its own memory: so a
process never holds much more than what it keeps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightning_tspipe.errors import CheckpointError, ConfigurationError

WHOLE = "model.safetensors"
INDEX = f"{WHOLE}.index.json"
_PIECE_BYTES = 2**23
_FILE_BYTES = 5 * 10**9  # as Hugging Face's libraries divide weights


@dataclass(frozen=True)
class WeightFiles:
    """The weights of a folder.

    Attributes:
        folder: The folder.
        files: For each tensor, the name of its file.
        shapes: For each tensor, its shape.
    """

    folder: Path
    files: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, folder: Path) -> WeightFiles:
        """What is in a folder; of the tensors themselves nothing is read.

        Raises:
            ConfigurationError: There are no weights in safetensors files.
            CheckpointError: A file is missing or damaged.
        """
        index = folder / INDEX
        if (folder / WHOLE).is_file():  # which from_pretrained prefers
            names = [WHOLE]
        elif index.is_file():
            with _explained(index):
                table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                names = sorted(set(table.values()))
        else:
            raise ConfigurationError(
                f"{folder} has neither {WHOLE} nor {INDEX}. If its weights are in another format, "
                "load them once with from_pretrained, and write them with save_pretrained"
            )
        files: dict[str, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for file in names:
            with _opened(folder / file) as opened:
                for name in opened.keys():  # noqa: SIM118 - no dict
                    files[name], shapes[name] = file, tuple(opened.get_slice(name).get_shape())
        return cls(folder, files, shapes)

    def read(self, name: str, into: Tensor) -> None:
        """Read a tensor into another one of its shape; of what is on the meta device, later.

        Whoever builds modules without values notes it, and does it for what a rank keeps.
        """
        torch.ops.lightning_tspipe.read_weight(into, str(self.folder / self.files[name]), name)

    def samples(self) -> Iterator[tuple[str, Tensor]]:
        """For each tensor its name and some of its values: from its start, middle and end."""
        for file in sorted(set(self.files.values())):
            with _opened(self.folder / file) as opened:
                for name in sorted(key for key, there in self.files.items() if there == file):
                    yield name, torch.cat(list(_some(opened, name, self.shapes[name])))


def _some(opened: Any, name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """At most 64 values of a few rows."""
    if not shape or 0 in shape:
        yield opened.get_tensor(name).flatten()
        return
    for half in range(3):
        places = [half * (number - 1) // 2 for number in shape[:-1]]
        start = half * max(0, shape[-1] - 64) // 2
        ranges = (*(slice(i, i + 1) for i in places), slice(start, start + 64))
        yield opened.get_slice(name)[ranges].flatten()


@torch.library.custom_op("lightning_tspipe::read_weight", mutates_args=("out",))
def read_weight(out: Tensor, file: str, name: str) -> None:
    """Fill a tensor from a file: in pieces, so that hardly more is in memory than the tensor.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    rows = out if out.dim() else out[None]
    step = max(1, _PIECE_BYTES * len(rows) // max(1, rows.nbytes)) if len(rows) else 1
    for start in range(0, len(rows), step):
        # Opened anew: what has been read of a file stays in memory as long as that is open.
        with _opened(Path(file)) as opened:
            if out.dim():
                piece = opened.get_slice(name)[start : start + step]
            else:
                piece = opened.get_tensor(name)
            rows[start : start + step].copy_(piece)
            del piece


@read_weight.register_fake
def _(out: Tensor, file: str, name: str) -> None:
    del out, file, name


def write_weights(weights: Mapping[str, Tensor], folder: Path) -> list[Path]:
    """Write a folder's weights, in one file or several.

    Args:
        weights: By name, on the CPU.
        folder: Where to.

    Returns:
        The files.
    """
    files = list(_divided(weights))
    number = len(files)
    names = [WHOLE] if number == 1 else [
        f"model-{place:05d}-of-{number:05d}.safetensors" for place in range(1, number + 1)
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in zip(names, files, strict=True):
        part = folder / f".{name}.part"
        save_file(tensors, part, metadata={"format": "pt"})
        part.replace(folder / name)
    # Of an earlier layout nothing is left that would be read instead.
    (folder / (WHOLE if number > 1 else INDEX)).unlink(missing_ok=True)
    if number > 1:
        table = {key: name for name, each in zip(names, files, strict=True) for key in each}
        total = sum(tensor.nbytes for each in files for tensor in each.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(table.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        names.append(INDEX)
    return [folder / name for name in names]


def _divided(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors of each file, contiguous and each with a memory of its own."""
    file: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if file and sum(each.nbytes for each in file.values()) + tensor.nbytes > _FILE_BYTES:
            yield file
            file = {}
        file[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    yield file


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    with _explained(path), safe_open(path, framework="pt") as opened:
        yield opened


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """While inside, what a missing or damaged file raises becomes an error that names it."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing, though {INDEX} names it. Download or write the folder again"
        ) from error
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged ({error}). Download or write it again") from error


def unknown(names: Iterable[str]) -> str:
    """Some names, and how many there are more, in words."""
    missing = sorted(names)
    return ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
