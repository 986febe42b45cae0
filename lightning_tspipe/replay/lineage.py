"""From which tensors a step has computed what it gives to a network that goes on with another one.

Of ``self.head(torch.cat([z, extra], 1))``, where ``z`` came out of a network, only ``extra`` is
given by the step: the rest is computed in the pipeline. The call shows the result alone, so the
operations that lead to it are noted while the step runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lightning_tspipe.capture.plan import Expression, Glue, Input, ValueRef
from lightning_tspipe.capture.provenance import DRAWN_LIKE, Operation
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.networks.arguments import Arguments, tensors_in
from lightning_tspipe.networks.location import current_line


@dataclass(frozen=True, eq=False, slots=True)
class _Made:
    """A tensor, and how it was computed, if a network's output is in it; of that, which it is."""

    tensor: Tensor
    parents: tuple[_Made, ...] = ()
    operation: str = ""
    grad: bool | None = None


class Lineage(TorchFunctionMode):
    """Notes the operations on what networks return, and all that comes of it.

    Args:
        notes_grad: Whether it also notes whether gradients were enabled.
    """

    def __init__(self, *, notes_grad: bool) -> None:
        super().__init__()
        self._notes_grad = notes_grad
        self._made: dict[int, _Made] = {}  # which keeps the tensors, so that ids stay their own

    def begins_with(self, leaves: Iterable[Any], position: int) -> None:
        """An entry of a call has returned something."""
        for slot, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._made[id(leaf)] = _Made(leaf, (), str(ValueRef(position, slot)))

    def ends(self) -> None:
        """Nothing more is to be noted, and nothing kept."""
        self._made.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = tensors_in((args, kwargs))
        is_one = any(id(t) in self._made for t in tensors)
        if is_one and func is not Tensor.requires_grad_ and func not in DRAWN_LIKE:
            parents = tuple(self._made.get(id(tensor)) or _Made(tensor) for tensor in tensors)
            done = Operation(func, Arguments.of(args, kwargs or {}))
            for slot, leaf in enumerate(pytree.tree_leaves(result)):
                if isinstance(leaf, Tensor):
                    grad = torch.is_grad_enabled() if self._notes_grad else None
                    made = _Made(leaf, parents, str(replace(done, slot=slot)), grad)
                    self._made[id(leaf)] = made
        return result

    def of(self, tensor: Tensor) -> _Made:
        """A tensor, and what it was computed from."""
        return self._made.get(id(tensor)) or _Made(tensor)


def inputs_in(expression: Expression, made: _Made) -> Iterator[tuple[int, Tensor]]:
    """What the step has given for an argument of a call: places, and tensors.

    Args:
        expression: Where the argument came from when the step was traced.
        made: What the call gets now.
    """
    if isinstance(expression, Input):
        yield expression.place, made.tensor
    elif isinstance(expression, Glue):
        for value, parent in zip(expression.values, made.parents, strict=True):
            yield from inputs_in(value, parent)


def check(expression: Expression, made: _Made, rows: int, name: str) -> None:
    """Refuse a step that computes otherwise what it feeds from one network into another.

    Args:
        expression: What it did when it was traced, which is what the pipeline does.
        made: What it has done now.
        rows: The number of samples.
        name: What it is given to.

    Raises:
        CaptureError: It does something else, or with another number.
    """
    if isinstance(expression, Input):
        return
    values: tuple[Expression, ...] = ()
    traced, grad = str(expression), made.grad
    if isinstance(expression, Glue):
        values, traced = expression.values, str(expression.function.of(rows))
        grad = expression.grad
    if (
        traced != made.operation
        or len(values) != len(made.parents)
        or made.grad not in {None, grad}
    ):
        without = {traced: " without gradients"}.get(made.operation, "") if grad else ""
        raise CaptureError(
            f"the step computes what it gives to {name!r} by {made.operation or 'nothing'}"
            f"{without}, at {current_line()}, and did it by {traced} when it was traced (%0.0 is "
            "what came first out of the network that was called first). That runs in the pipeline, "
            "between the networks, and may change where an epoch begins. A number that "
            "changes more often is to be a tensor, torch.tensor(number); a shape belongs into "
            "forward of the network that comes behind it"
        )
    for value, parent in zip(values, made.parents, strict=True):
        check(value, parent, rows, name)
