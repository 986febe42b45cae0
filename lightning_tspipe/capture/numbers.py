"""Numbers in what a step does between two calls: ``.view(len(x), -1)``, ``/ self.temperature``.

One run of the step shows a number, not where it comes from. So it is run a second time with each
sample twice: what doubles is the number of samples, or a multiple of it, and is another one in each
batch, and in each micro-batch. What stays is a constant, which later steps are compared with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_tspipe.capture.plan import Expression, Glue
from lightning_tspipe.capture.provenance import Operation, Samples
from lightning_tspipe.errors import CaptureError

Glued = dict[int, tuple[Glue, list[tuple[Tensor, bool]]]]
"""By its id, what a step has computed, and from what: tensors, and whether they have samples."""


def has_numbers(value: Expression) -> bool:
    """Whether something is computed with numbers, other than the commonest, for a call."""
    if not isinstance(value, Glue):
        return False
    numbers = (n for leaf in value.function.arguments.leaves for n in _numbers_in(leaf))
    return any(n not in {0, 1, -1} for n in numbers) or any(map(has_numbers, value.values))


def _numbers_in(leaf: Any) -> list[float]:
    leaves = [leaf.start, leaf.stop, leaf.step] if isinstance(leaf, slice) else [leaf]
    return [x for x in leaves if isinstance(x, (int, float)) and not isinstance(x, bool)]


def doubled(batch: Any) -> Any:
    """A batch with each sample twice; what is no tensor is as it was."""
    return pytree.tree_map_only(Tensor, lambda x: torch.cat([x, x]) if x.dim() else x, batch)


class Numbers:
    """Tells, for what a call gets, multiples of the number of samples from constants.

    Args:
        samples: Of the call, at the first run.
        glued: What operations took then.
        where: What is called, and the user's line.
    """

    def __init__(self, samples: int, glued: Glued, where: str) -> None:
        self._samples, self._glued, self._where = samples, glued, where

    def told(self, one: Expression, other: Expression) -> Expression:
        """An expression with what is known of its numbers.

        Args:
            one: As it was for so many samples.
            other: As it was for twice as many; the same if that is not known.

        Raises:
            CaptureError: A number depends on the samples in another way, or more than numbers do.
        """
        if not (isinstance(one, Glue) and isinstance(other, Glue)):
            return one
        ours, others = one.function.arguments, other.function.arguments
        if one.function.function != other.function.function or ours.structure != others.structure:
            raise self._error(one, "")
        pairs = zip(ours.leaves, others.leaves, strict=True)
        leaves = tuple(self._leaf(one, *pair, is_known=one is not other) for pair in pairs)
        function = replace(one.function, arguments=replace(ours, leaves=leaves))
        values = tuple(self.told(*pair) for pair in zip(one.values, other.values, strict=True))
        _, tensors = self._glued[id(one)]
        has_rows = leaves == ours.leaves or are_rows(function, tensors, self._samples)
        return replace(one, function=function, values=values, has_rows=has_rows)

    def _leaf(self, glue: Glue, one: Any, other: Any, *, is_known: bool) -> Any:
        if isinstance(one, slice) and isinstance(other, slice):
            ends = [(getattr(one, n), getattr(other, n)) for n in ("start", "stop", "step")]
            return slice(*(self._leaf(glue, *pair, is_known=is_known) for pair in ends))
        if not (_numbers_in(one) and _numbers_in(other)):
            return one
        is_multiple = isinstance(one, int) and one != 0 < self._samples and one % self._samples == 0
        if is_multiple and other == 2 * one:
            return Samples(one // self._samples)
        if one != other:
            raise self._error(glue, f": {one} for {self._samples}, {other} for twice as many")
        if is_multiple and not is_known and self._samples > 1:
            raise self._error(glue, f", perhaps: {one} for {self._samples}")
        return one

    def _error(self, glue: Glue, what: str) -> CaptureError:
        return CaptureError(
            f"what {self._where} gets is computed from another network's output by {glue}, which "
            f"depends on the number of samples{what}. Put it into forward of what comes behind it"
        )


def are_rows(operation: Operation, tensors: list[tuple[Tensor, bool]], samples: int) -> bool:
    """Whether what an operation gives for a sample does not change with the number of samples.

    Args:
        operation: It.
        tensors: What it takes, and whether it has rows.
        samples: How many samples these are of.
    """
    given = [tensor.detach() for tensor, _ in tensors]
    twice = [torch.cat([t.detach()] * 2) if has_rows else t.detach() for t, has_rows in tensors]
    once, more = operation(*given, rows=samples), operation(*twice, rows=2 * samples)
    return bool(once.dim()) and torch.equal(once, more[: len(once)])
