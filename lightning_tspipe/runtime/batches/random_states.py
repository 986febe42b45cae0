"""The random states of a process, to have them back later."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomStates:
    """The states of torch's, Python's and, where it is imported, NumPy's global generators.

    Attributes:
        torch: torch's CPU generator.
        python: ``random.getstate()``.
        numpy: ``numpy.random.get_state()``; None without NumPy.
        cuda: The generator of this process's GPU; None without one.
    """

    torch: Tensor
    python: Any
    numpy: Any = None
    cuda: Tensor | None = None

    @classmethod
    def now(cls) -> RandomStates:
        """The present states."""
        numpy = sys.modules.get("numpy")
        in_use = torch.cuda.is_initialized()  # asking whether there is a GPU takes much longer
        return cls(
            torch.get_rng_state(),
            random.getstate(),
            numpy.random.get_state() if numpy is not None else None,
            torch.cuda.get_rng_state() if in_use else None,
        )

    def restore(self) -> None:
        """Make them the present ones."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        numpy = sys.modules.get("numpy")
        if self.numpy is not None and numpy is not None:
            numpy.random.set_state(self.numpy)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)

    def to_dict(self) -> dict[str, Any]:
        """Plain values and tensors, as a checkpoint that is loaded with ``weights_only`` needs."""
        version, words, gauss = self.python
        state: dict[str, Any] = {
            "torch": self.torch,
            "python": [version, torch.tensor(words), gauss],
        }
        if self.numpy is not None:
            name, keys, *rest = self.numpy
            state["numpy"] = [str(name), torch.tensor(keys.tolist()), *rest]
        if self.cuda is not None:
            state["cuda"] = self.cuda
        return state

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> RandomStates:
        """What :meth:`to_dict` gave."""
        version, words, gauss = state["python"]
        numpy = state.get("numpy")
        if numpy is not None:
            name, keys, *rest = numpy
            numpy = (name, keys.numpy().astype("uint32"), *rest)
        python = (version, tuple(words.tolist()), gauss)
        return cls(state["torch"], python, numpy, state.get("cuda"))
