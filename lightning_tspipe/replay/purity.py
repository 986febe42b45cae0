"""Whether a step gives the networks the same inputs whenever it is run on the same batch.

A step is run on the rank with the data, perhaps a step early, and again on the rank with the loss.
It has to be a function of the batch, its number and what is seeded. Here inputs are compared.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from lightning_tspipe.capture.plan import Inputs
from lightning_tspipe.late import Late, sent

_NUM_FIRST = 3
ONE_IN = 128


def is_compared(number: int, first: int, seed: int) -> bool:
    """Whether the rank with the loss compares what the networks get of a batch.

    It does for the first three since the step was captured, and for one in 128 that follow: the
    same ones in a run that goes on.

    Args:
        number: Of the batch.
        first: Of the first batch since the step was captured.
        seed: Of the training.
    """
    return number < first + _NUM_FIRST or crc32(f"{seed}/{number}".encode()) % ONE_IN == 0


class Fingerprint(NamedTuple):
    """What is kept of a tensor to compare it with another one: some sums of its values.

    Attributes:
        shape: Its sizes.
        size: Sum of its absolute values.
        sums: For each dimension, the sum of the values with weights that grow along it.
        precision: Distance between 1 and the next number of its type.
    """

    shape: tuple[int, ...]
    size: float
    sums: tuple[float, ...]
    precision: float

    @classmethod
    def of(cls, tensor: Tensor) -> Fingerprint:
        """The fingerprint of a tensor."""
        values = tensor.detach()
        if not values.is_floating_point():
            values = values.double()
        sums = []
        for dimension, size in enumerate(values.shape):
            others = [d for d in range(values.dim()) if d != dimension]
            along = values.sum(dim=others, dtype=torch.float64) if others else values.double()
            weights = torch.linspace(1, 2, size, dtype=torch.float64, device=values.device)
            sums.append(float(along @ weights))
        total = float(torch.linalg.vector_norm(values, 1, dtype=torch.float64))
        return cls(tuple(tensor.shape), total, tuple(sums), torch.finfo(values.dtype).eps)

    def agrees(self, other: Fingerprint) -> bool:
        """Whether both can be of one tensor, computed on devices that round differently."""
        if self.shape != other.shape:
            return False
        most = 8 * self.precision * self.size
        pairs = zip((self.size, *self.sums), (other.size, *other.sums), strict=True)
        return all(
            a == b or abs(a - b) <= most or (math.isnan(a) and math.isnan(b)) for a, b in pairs
        )


Fingerprints = tuple[tuple[Fingerprint, ...], ...]
"""Of the tensors that each call gets."""


def fingerprints(inputs: Inputs) -> Fingerprints:
    """The fingerprints of what calls get."""
    return tuple(tuple(map(Fingerprint.of, tensors)) for tensors in inputs)


class Comparisons:
    """Compares tensors that were made twice, and looks at the result when it is there."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Any, Late]] = deque()

    def add(
        self, of: Any, ones: Sequence[Tensor], others: Sequence[Tensor], versions: Sequence[int]
    ) -> None:
        """Compare.

        Args:
            of: What :meth:`first_difference` says of it.
            ones: Some tensors, as they were when they were made.
            others: Their counterparts, of the same shapes.
            versions: Of ``ones``, by then.
        """
        found = [_differ(*each) for each in zip(ones, others, versions, strict=True)]
        if any(isinstance(each, Tensor) or each for each in found):
            device = ones[0].device
            differ = [e if isinstance(e, Tensor) else sent(torch.tensor(e), device) for e in found]
            self._pending.append((of, Late(torch.stack(differ))))
        # Else it is a tensor of the batch itself, as in most steps.

    def first_difference(self, *, wait: bool = False) -> tuple[Any, int] | None:
        """What was given with the first comparison that found one, and the place of the tensor.

        Args:
            wait: Until all results are there.
        """
        while self._pending and (wait or self._pending[0][1].is_there):
            of, differ = self._pending.popleft()
            places = [place for place, differs in enumerate(differ.tolist()) if differs]
            if places:
                return of, places[0]
        return None


def _differ(one: Tensor, other: Tensor, version: int) -> Tensor | bool:
    is_one_tensor = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    if is_one_tensor and one.dtype == other.dtype:
        return one._version != version  # noqa: SLF001
    return ((one != other) & ~(torch.isnan(one) & torch.isnan(other))).any()
