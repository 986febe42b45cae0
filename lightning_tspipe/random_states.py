"""The random states of a process, to have them back later."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomStates:
    """The states of torch's, Python's and NumPy's global generators, and of this process's GPU."""

    torch: Tensor
    python: Any
    numpy: Any
    cuda: Tensor | None

    @classmethod
    def now(cls) -> RandomStates:
        """The present states."""
        # Asking whether there is a GPU takes much longer than whether it is used.
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return cls(torch.get_rng_state(), random.getstate(), np.random.get_state(), cuda)  # noqa: NPY002 - the global generator is meant

    def restore(self) -> None:
        """Make them the present ones."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        if self.numpy is not None:  # nobody had imported it
            np.random.set_state(self.numpy)  # noqa: NPY002
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)

    @property
    def written(self) -> dict[str, Any]:
        """As plain values and tensors, for a checkpoint that is loaded with ``weights_only``."""
        version, words, gauss = self.python
        name, keys, *rest = self.numpy
        found = {
            "torch": self.torch,
            "python": [version, torch.tensor(words), gauss],
            "numpy": [str(name), torch.from_numpy(np.asarray(keys, "int64")), *rest],
        }
        return found if self.cuda is None else {**found, "cuda": self.cuda}

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> RandomStates:
        """What was written."""
        version, words, gauss = written["python"]
        numpy = None
        if "numpy" in written:
            name, keys, *rest = written["numpy"]
            numpy = name, keys.numpy().astype("uint32"), *rest
        python = version, tuple(words.tolist()), gauss
        cuda = written.get("cuda") if torch.cuda.is_available() else None
        return cls(written["torch"], python, numpy, cuda)


@contextmanager
def random_stream(seed: int | None) -> Iterator[RandomStates]:
    """Run with random generators of the given seed; the ambient ones stay untouched.

    Args:
        seed: Seed of the stream; None keeps the ambient values but still restores them.

    Yields:
        The ambient states.
    """
    ambient = RandomStates.now()
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)
        if ambient.cuda is not None:
            torch.cuda.manual_seed(seed)
    try:
        yield ambient
    finally:
        ambient.restore()
