"""A teacher that runs ahead, with the weights that it is expected to have one update later.

An average moves slowly and smoothly: its next move is about its last one. With ξ(n) the teacher
that step n would read if it didn't run ahead::

    T(n+1), in step n, reads   ξ(n) + (ξ(n) - ξ(n-1))    for the ξ(n+1) that it can't know yet

That needs no word about how the average is made, in the step or in a hook, and two copies of
the teacher. The first forward that runs ahead reads ξ(n) as it is; where a run was resumed, a
checkpoint tells of ξ(n-1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class TeacherDistance:
    """How far this rank's part of a teacher was from the one that was meant, squared.

    Attributes:
        step: The step that it was meant for.
        squares: Of the teacher of one update before, and of the one that was read; shape (2,), on
            the device: nobody waits for it before it is logged.
    """

    step: int
    squares: Tensor


class TeacherPrediction:
    """Predicts this rank's part of the teacher.

    Args:
        blocks: Of the teacher, by name; parameters of other ranks are on the meta device.
        state: What :meth:`state` gave on all ranks of the run that is resumed.

    Attributes:
        distances: Of the steps so far; take them and clear the list.
    """

    def __init__(
        self, blocks: Mapping[str, nn.Module], state: Mapping[str, Any] | None = None
    ) -> None:
        named = {
            f"{block}.{path}.{name}": (module._parameters, name)  # noqa: SLF001
            for block, whole in blocks.items()
            for path, module in whole.named_modules()
            for name, parameter in module._parameters.items()  # noqa: SLF001
            if parameter is not None and not parameter.is_meta
        }
        self._names = list(named)
        self._slots = list(named.values())
        self._step = -1
        self._before: list[Tensor] = []
        self._moves: list[Tensor] = []
        self.distances: list[TeacherDistance] = []
        if state is not None and named.keys() <= state["before"].keys():
            self._step = state["step"]
            self._before = self._like_mine(state["before"])
            self._moves = self._like_mine(state["moves"])

    def state(self) -> dict[str, Any]:
        """What another run needs to predict its first step, by the names of parameters."""
        return {
            "step": self._step,
            "before": dict(zip(self._names, self._before, strict=False)),
            "moves": dict(zip(self._names, self._moves, strict=False)),
        }

    def _like_mine(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        return [
            values[key].to(table[name])
            for key, (table, name) in zip(self._names, self._slots, strict=True)
        ]

    def forward(self, batch: int, offset: int) -> AbstractContextManager[None]:
        """Around a forward of a batch that is so many steps before its own."""
        return self.reading(batch - offset) if offset else nullcontext()

    def backward(self, batch: int) -> AbstractContextManager[None]:
        """Around a backward: a teacher has none."""
        del batch
        return nullcontext()

    @contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Around a forward that runs ahead, in a step: the modules hold predicted parameters."""
        if step != self._step:
            self._begin(step)
        own = [table[name] for table, name in self._slots]
        for (table, name), now, move in zip(self._slots, self._before, self._moves, strict=True):
            table[name] = now + move
        try:
            yield
        finally:
            for (table, name), parameter in zip(self._slots, own, strict=True):
                table[name] = parameter

    @torch.no_grad()
    def _begin(self, step: int) -> None:
        now = [table[name].detach().clone() for table, name in self._slots]
        if self._before:
            # Several updates, where the pipeline was empty in between.
            num_updates = step - self._step
            moves = [(new - old) / num_updates for new, old in zip(now, self._before, strict=True)]
            if num_updates == 1:
                self._measure(step, moves)
        else:
            moves = [torch.zeros_like(value) for value in now]
        self._step, self._before, self._moves = step, now, moves

    def _measure(self, step: int, moves: list[Tensor]) -> None:
        errors = torch._foreach_sub(moves, self._moves)  # noqa: SLF001
        squares = torch.stack([_square_of(moves), _square_of(errors)])
        self.distances.append(TeacherDistance(step, squares))


def _square_of(tensors: Sequence[Tensor]) -> Tensor:
    norms = torch._foreach_norm(list(tensors))  # noqa: SLF001
    return torch.stack(norms).double().square().sum()
