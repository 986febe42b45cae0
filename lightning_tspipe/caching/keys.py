"""Cache keys: the sample, and everything between it and the boundary."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_tspipe.errors import ConfigurationError

Words = NDArray[np.uint64]
Ids = Tensor | Sequence[Hashable]
"""Ids of the samples of a batch: whole numbers, strings, or tuples of them."""


@dataclass(frozen=True)
class Boundary:
    """A place in a network, and everything that its activations depend on besides the sample.

    Attributes:
        name: Name of the place: ``"student.blocks.3"``, or the number of frozen atoms.
        fingerprint: Digest of the weights and buffers before it, see :func:`fingerprint`.
        dtype: Type in which activations are stored; None: their own.
        run: The inputs that the ids belong to; two datasets, or two transforms, are two runs.
    """

    name: str
    fingerprint: str = ""
    dtype: torch.dtype | None = None
    run: str = ""

    @property
    def token(self) -> int:
        """The boundary as a number of 64 bits, never 0.

        >>> Boundary("blocks.3", "a").token == Boundary("blocks.3", "b").token
        False
        """
        text = "\0".join([self.name, self.fingerprint, str(self.dtype), self.run])
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") or 1


def fingerprint(*parts: nn.Module | Tensor) -> str:
    """A digest of weights and buffers: of tensors, or of modules with their names.

    Reads all of them once.

    >>> layer = nn.Linear(2, 2)
    >>> before = fingerprint(layer)
    >>> _ = layer.weight.data.add_(1)
    >>> fingerprint(layer) == before
    False
    """
    return fingerprints([parts])[0]


def fingerprints(pieces: Sequence[Sequence[nn.Module | Tensor]]) -> list[str]:
    """Digests of the first piece, of the first two together, and so on; each is read once."""
    digest = hashlib.blake2b(digest_size=16)
    found = []
    for parts in pieces:
        for part in parts:
            tensors = {"": part} if isinstance(part, Tensor) else part.state_dict()
            for name, tensor in sorted(tensors.items()):
                if isinstance(tensor, Tensor):
                    digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
                    flat = tensor.detach().cpu().contiguous().flatten()
                    data: Any = flat.view(torch.uint8).numpy()
                    digest.update(data)
        found.append(digest.hexdigest())
    return found


def digests(ids: Iterable[Hashable], kind: str = "") -> Words:
    """Two words of 64 bits for each sample id; the first is never 0.

    Args:
        ids: Numbers, strings, or tuples of them. A number and its text are different ids.
        kind: Kind of the entry, if a sample has several.

    Returns:
        Shape (number of ids, 2).
    """
    packed = b"".join(
        hashlib.blake2b(f"{kind}\0{sample!r}".encode(), digest_size=16).digest() for sample in ids
    )
    words = np.frombuffer(packed, np.uint64).reshape(-1, 2).copy()
    words[words[:, 0] == 0, 0] = 1
    return words


def as_ids(ids: Ids) -> list[Hashable]:
    """The sample ids of a batch as a list.

    Raises:
        ConfigurationError: An id is neither an integer nor a string, or comes twice.
    """
    # Tensors are no keys.
    found: list[Hashable] = ids.flatten().tolist() if isinstance(ids, Tensor) else list(ids)
    wrong = next((i for i in found if not isinstance(i, int | str | tuple)), None)
    if wrong is not None:
        raise ConfigurationError(
            f"sample ids are whole numbers or strings, not {wrong!r} ({type(wrong).__name__}); "
            "WithIds(dataset) numbers the samples of a dataset"
        )
    if len(set(found)) < len(found):
        twice = next(i for n, i in enumerate(found) if i in found[:n])
        raise ConfigurationError(
            f"duplicate sample id {twice!r} within a batch: activations are cached by id. Give "
            "each sample its own, as WithIds(dataset) does; samplers that repeat samples "
            "(replacement=True) don't work with a cache"
        )
    return found
