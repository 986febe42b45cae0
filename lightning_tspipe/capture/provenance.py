"""Where each tensor of a traced step came from, and what becomes of it.

Sources are the leaves of the batch, the parameters, and what the pipelined blocks return. A
``TorchFunctionMode`` sees every operation on them. Afterwards two questions have answers: which
chain of *glue* leads from one block to the next, and which sources the step itself reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_tspipe.capture.functions import (
    HARMLESS,
    MOVES,
    name_of,
    writes_gradient,
    writes_in_place,
)
from lightning_tspipe.capture.location import current_line

_GRADIENT = "torch.Tensor.grad.__get__"


@dataclass(eq=False)
class Value:
    """A tensor of the trace.

    Attributes:
        tensor: Kept alive, so that its id stays its own.
        source: What it is, if it was not computed: any description; None if computed.
        parents: What it was computed from.
        function: If one tensor alone was the input: how to compute it again from that.
        label: Name of the operation.
        read: Whether something else than a block or another operation read it.
        consumers: Values computed from it.
        feeds_block: Whether it was the input of a block.
        is_parameter: Whether it is a source that is a parameter.
        mixes: Whether it was computed from several tensors, or moved to a device.
        num_blocks: Blocks that were called before it was computed.
    """

    tensor: Tensor
    source: Any = None
    parents: tuple[Value, ...] = ()
    function: Callable[[Tensor], Tensor] | None = None
    label: str = ""
    read: bool = False
    consumers: list[Value] = field(default_factory=list)
    feeds_block: bool = False
    is_parameter: bool = False
    mixes: bool = False
    num_blocks: int = 0

    @property
    def is_needed(self) -> bool:
        """Like :attr:`is_used`, but a value that nothing touched is not needed."""
        return bool(self.read or self.consumers) and self.is_used

    @property
    def is_used(self) -> bool:
        """Whether the step itself depends on it, by some path that doesn't end in a block."""
        stack, seen = [self], {id(self)}
        while stack:
            value = stack.pop()
            if value.read or not (value.consumers or value.feeds_block):
                return True
            for consumer in value.consumers:
                if id(consumer) not in seen:
                    seen.add(id(consumer))
                    stack.append(consumer)
        return False

    def sources(self) -> list[Value]:
        """The source values that it was computed from."""
        if self.source is not None:
            return [self]
        found, stack, seen = [], list(self.parents), {id(self)}
        while stack:
            value = stack.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if value.source is not None:
                found.append(value)
            else:
                stack.extend(value.parents)
        return found

    def glue_from_source(self) -> tuple[Value, list[Value]] | None:
        """The single source and the unary operations from it to here; None if there are several."""
        steps: list[Value] = []
        value = self
        while value.source is None:
            if value.function is None or len(value.parents) != 1:
                return None
            steps.append(value)
            value = value.parents[0]
        return value, steps[::-1]


class DrawCounter(TorchDispatchMode):
    """Counts the operations that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.count += torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class ProvenanceMode(TorchFunctionMode):
    """Records the operations of a step on tracked tensors.

    Attributes:
        reads: (value whose numbers were looked at, number of blocks called before, user's line).
        writes: (value written in place, number of blocks called before, user's line).
        gradient_writes: The same for parameters whose gradient was set (to None).
        gradient_reads: The user's lines that looked at the gradient of a parameter.
        draws: To be entered as well, so that random numbers are noticed.
        draws_on_device: Whether random numbers were drawn on a device that the step named: it may
            have asked a tensor of the batch for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[int, Value] = {}
        self._paused = False
        self._num_blocks = 0
        self.reads: list[tuple[Value, int, str]] = []
        self.writes: list[tuple[Value, int, str]] = []
        self.gradient_writes: list[tuple[Value, int, str]] = []
        self.gradient_reads: list[str] = []
        self.draws_on_device = False
        self.draws = DrawCounter()

    def pause(self, *, on: bool) -> None:
        """Stop or go on recording."""
        self._paused = on

    def mark_block(self) -> None:
        """A pipelined block was called."""
        self._num_blocks += 1

    def mixing(self) -> list[Value]:
        """The values that were computed from several tensors, or moved, before the last block."""
        found = (v for v in self._values.values() if v.mixes and v.num_blocks < self._num_blocks)
        return list(found)

    def track(self, tensor: Tensor, source: Any, *, is_parameter: bool = False) -> Value:
        """Make ``tensor`` a source."""
        value = Value(tensor, source=source, is_parameter=is_parameter)
        self._values[id(tensor)] = value
        return value

    def lookup(self, tensor: Tensor) -> Value | None:
        """The value of a tensor, if it is tracked."""
        return self._values.get(id(tensor))

    def mark_read(self, tree: Any) -> None:
        """The tensors in ``tree`` leave the step."""
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Tensor) and (value := self.lookup(leaf)) is not None:
                value.read = True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        parents = tuple(value for t in tensors if (value := self.lookup(t)) is not None)
        name = name_of(func)
        if name == _GRADIENT and any(parent.is_parameter for parent in parents):
            self.gradient_reads.append(current_line())
        if name in HARMLESS:
            return func(*args, **kwargs)
        if not parents:
            return self._untracked(func, args, kwargs)
        num_draws = self.draws.count
        result = func(*args, **kwargs)
        self._record(name, func, args, kwargs, parents, len(tensors), result)
        if self.draws.count > num_draws:
            # A meta tensor would draw nothing, and all that is drawn later would differ.
            for parent in parents:
                parent.read = True
        return result

    def _untracked(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if kwargs.get("device") is None:
            return func(*args, **kwargs)
        num_draws = self.draws.count
        result = func(*args, **kwargs)
        self.draws_on_device |= self.draws.count > num_draws
        return result

    def _record(  # noqa: PLR0913, PLR0917 - all of one operation
        self,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parents: tuple[Value, ...],
        num_tensors: int,
        result: Any,
    ) -> None:
        writes = writes_in_place(name)
        to_parameter = writes and self._record_write(name, args)
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        for parent in () if outputs else parents:
            if to_parameter:
                parent.feeds_block = True
                continue
            parent.read = True
            if not writes:
                self.reads.append((parent, self._num_blocks, current_line()))
        unary = num_tensors == 1 and isinstance(result, Tensor)
        function = _rebind(func, args, kwargs) if unary else None
        for output in outputs:
            value = Value(output, parents=parents, function=function, label=name)
            # An EMA written into a parameter stays there: it is not a use of its result.
            value.feeds_block = to_parameter
            value.mixes = num_tensors > 1 or func in MOVES
            value.num_blocks = self._num_blocks
            self._values[id(output)] = value
            for parent in parents:
                parent.consumers.append(value)

    def _record_write(self, name: str, args: tuple[Any, ...]) -> bool:
        """Note the targets of a write; whether they are parameters."""
        line = current_line()
        writes = self.gradient_writes if writes_gradient(name) else self.writes
        to_parameter = False
        targets = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
        for target in targets:
            if isinstance(target, Tensor) and (value := self.lookup(target)) is not None:
                writes.append((value, self._num_blocks, line))
                to_parameter |= any(source.is_parameter for source in value.sources())
        return to_parameter


def _rebind(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[Tensor], Tensor]:
    """``func`` as a function of the one tensor among its arguments."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    index = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))

    def glue(value: Tensor) -> Tensor:
        filled = [*leaves[:index], value, *leaves[index + 1 :]]
        new_args, new_kwargs = pytree.tree_unflatten(filled, spec)
        result: Tensor = func(*new_args, **new_kwargs)
        return result

    leaves[index] = None
    return glue
