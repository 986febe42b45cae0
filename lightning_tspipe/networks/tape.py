"""A tape: the calls of torch that a forward makes, as it was run on tensors without values.

::

     call                                       reads       makes
     0    conv2d(x, patch_embed.weight, ...)    x           v0
     1    flatten(v0, 2)                        v0          v1      shares memory with v0
     2    arange(b)                                         v2      made again wherever it is read
     3    add_(v1, v2)                          v1 v2       v1      writes it

Sizes that depend on the number of samples, ``b``, are expressions in it; they are evaluated for
the batch that runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils import _pytree as pytree

from lightning_tspipe.networks.arguments import Arguments
from lightning_tspipe.networks.guards import Guards


@cache
def _compiled(code: str) -> Callable[[int | None], float]:
    size: Callable[[int | None], float] = eval(f"lambda b: {code}", {"math": math})  # noqa: S307 - its own
    return size


def memory_of(tensor: Tensor) -> int:
    """Which memory a tensor lies in, as long as it lives; without values it has a number, too."""
    try:
        return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the storage's identity
    except (NotImplementedError, RuntimeError):  # sparse ones have none
        return -id(tensor)


@dataclass(eq=False, slots=True)
class Value:
    """A tensor of a tape.

    Attributes:
        name: ``v3``, or that of an input.
        size: Numbers, or expressions in the number of samples.
        dtype: Its type.
        memory: Number of the memory that it lies in, which views share.
        state: Name of the parameter or buffer that it is; "": it is none.
        trained: Whether it is a parameter.
    """

    name: str
    size: tuple[Any, ...]
    dtype: torch.dtype
    memory: int
    state: str = ""
    trained: bool = False

    def __repr__(self) -> str:
        return self.state or self.name

    def shape(self, batch: int | None) -> tuple[int, ...]:
        """Its sizes, for a number of samples."""
        return tuple(size(batch) if isinstance(size, Size) else size for size in self.size)


@dataclass(frozen=True, slots=True)
class Size:
    """A number that depends on the number of samples.

    Attributes:
        code: As Python, with ``b`` for the number of samples.
    """

    code: str

    def __repr__(self) -> str:
        return self.code

    def __call__(self, batch: int | None) -> int:
        """The number, for so many samples."""
        return int(_compiled(self.code)(batch))


@dataclass(frozen=True, slots=True)
class Context:
    """What holds around a call, beside its arguments.

    Attributes:
        no_grad: Whether gradients were switched off within the forward.
        autocast: (device type, enabled, type) of an autocast that the forward entered; else None.
        kernels: Which kernels of attention the forward allowed, if it chose; else None.
        region: Number of the checkpointed region that it is in, which runs again in the backward;
            0: in none.
    """

    no_grad: bool = False
    autocast: tuple[str, bool, torch.dtype] | None = None
    kernels: tuple[SDPBackend, ...] | None = None
    region: int = 0


@dataclass(eq=False, slots=True)
class Call:
    """A call of a torch function, or of a module as a whole.

    Attributes:
        function: What is called; a module for a module.
        args: Positional arguments, with :class:`Value` for tensors and :class:`Size` for numbers.
        kwargs: The others.
        made: The tensors in its result, in the order of its leaves; those that it was given too.
        structure: Pytree structure of the result, whose other leaves are in ``leaves``.
        leaves: Leaves of the result: a :class:`Value`, or a constant.
        context: What holds around it.
        writes: Numbers of the memories that it changes.
        state: Names of the parameters and buffers that it reads.
        draws: Whether it draws random numbers.
        has_product: Whether it multiplies matrices: most of the work is there.
        scope: Dotted path of the module that made it.
        name: Of the function, for people.
        line: The user's line that made it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[Value, ...]
    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]
    context: Context
    writes: frozenset[int]
    state: tuple[str, ...]
    draws: bool
    has_product: bool
    scope: str
    name: str
    line: str = ""

    @property
    def values(self) -> list[Value]:
        """The tensors that it is given."""
        return [leaf for leaf in self._leaves if isinstance(leaf, Value)]

    @property
    def changed(self) -> set[int]:
        """Numbers of the memories that it makes or changes."""
        return {value.memory for value in self.made} | self.writes

    @property
    def has_sizes(self) -> bool:
        """Whether an argument depends on the number of samples."""
        return any(isinstance(leaf, Size) for leaf in self._leaves)

    @property
    def _leaves(self) -> list[Any]:
        found: list[Any] = []
        for leaf in pytree.tree_leaves((self.args, self.kwargs)):
            found += (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,)
        return found

    @property
    def title(self) -> str:
        """Where in the network it is, and what it does."""
        is_module = isinstance(self.function, nn.Module)  # which the scope is then
        return ".".join(filter(None, (self.scope, "" if is_module else self.name)))

    def __str__(self) -> str:
        words = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs.items())]
        made = ", ".join(map(repr, self.made)) or "-"
        return f"{made:<10} = {self.name}({', '.join(words)})"


@dataclass(eq=False)
class Tape:
    """What a forward does.

    Attributes:
        arguments: How it was called.
        inputs: The tensors that it takes.
        state: Parameters and buffers of the network, by name.
        calls: All calls, in order.
        leaves: The tensors that it returns, in ``tree_flatten`` order.
        structure: Structure of the return value; constants are part of it.
        batch: The number of samples that it is fixed to; None: it serves any.
        device: Where it was recorded: in its calls, this stands for the device of its inputs.
        constants: Tensors that come from outside, by name.
        guards: What it has read of its modules.
    """

    arguments: Arguments
    inputs: tuple[Value, ...]
    state: dict[str, Value]
    calls: list[Call]
    leaves: tuple[Value, ...]
    structure: pytree.TreeSpec
    batch: int | None
    device: torch.device
    constants: dict[str, Tensor]
    guards: Guards

    @property
    def writes_in_place(self) -> bool:
        """Whether a call changes a tensor that is no parameter or buffer."""
        state = {value.memory for value in self.state.values()}
        return any(call.writes - state for call in self.calls)

    def line_of(self, value: Value) -> str:
        """The user's line that made a tensor; "" if it was given."""
        return next((call.line for call in self.calls if value in call.made), "")

    def behind(self, value: Value) -> set[str]:
        """The parameters and buffers that a tensor was computed with, or with what may share it."""
        memories, names = {value.memory}, {value.state} - {""}
        for call in reversed(self.calls):
            if call.changed & memories:
                memories |= {each.memory for each in call.values}
                names.update(call.state)
        return names

    def is_flattened(self, value: Value) -> bool:
        """Whether each sample has several rows of a tensor, one sample's after another's.

        As where ``x.flatten(0, 1)`` was made of ``(samples, tokens, ...)``, and its rows went on
        through layers. Of ``(tokens, samples, ...)`` or ``cat([x, y])`` they lie otherwise.
        """
        todo, seen = [value], {value}
        while todo:
            made = todo.pop()
            if repr(made.size[0]) == "b":
                continue
            maker = next((call for call in self.calls if made in call.made), None)
            given = [] if maker is None else maker.values
            before = [each for each in given if each.size and isinstance(each.size[0], Size)]
            numbers = {math.prod(each.shape(2)) for each in before if each.size[0] != made.size[0]}
            if not before or numbers - {math.prod(made.shape(2))}:
                return False
            todo += [each for each in before if each not in seen]
            seen.update(before)
        return True

    def __str__(self) -> str:
        """The calls, under the modules that make them."""
        lines, scope = [], None
        for number, call in enumerate(self.calls):
            if call.scope != scope:
                scope = call.scope
                lines.append(f"{scope or 'forward'}:")
            lines.append(f"  {number:<4} {call}  # {call.line}")
        lines.append(f"return {', '.join(map(repr, self.leaves))}")
        return "\n".join(lines)
