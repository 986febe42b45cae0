"""The random states of a process, to have them back later."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class RandomStates:
    """The states of torch's, Python's and NumPy's global generators, and of this process's GPU.

    Attributes:
        written: Plain values and tensors, as a checkpoint that is loaded with ``weights_only``
            needs them.
    """

    written: dict[str, Any]

    @classmethod
    def now(cls) -> RandomStates:
        """The present states."""
        version, words, gauss = random.getstate()
        name, keys, *rest = np.random.get_state()  # noqa: NPY002 - the global generator is meant
        found = {
            "torch": torch.get_rng_state(),
            "python": [version, torch.tensor(words), gauss],
            "numpy": [str(name), torch.from_numpy(np.asarray(keys, "int64")), *rest],
        }
        if torch.cuda.is_initialized():  # asking whether there is a GPU takes much longer
            found["cuda"] = torch.cuda.get_rng_state()
        return cls(found)

    def restore(self) -> None:
        """Make them the present ones."""
        torch.set_rng_state(self.written["torch"])
        version, words, gauss = self.written["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        if "numpy" in self.written:  # not where nobody had imported it
            name, keys, *rest = self.written["numpy"]
            np.random.set_state((name, keys.numpy().astype("uint32"), *rest))  # noqa: NPY002
        if "cuda" in self.written and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.written["cuda"])
