"""What an atom does, as a text without names: atoms with the same text take equally long.

::

    x0 float32 (b, 197, 768)                          what it is given
    v0 = torch.nn.functional.layer_norm(x0, (768,), p0, p1, 1e-06)
    v1 = torch.nn.functional.linear(v0, p2, p3)       parameters, in the order of their use
    ...
    gives v9                                          to the next atom, or to the loss

The twelve layers of a transformer differ in the names of their parameters only.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import resolve_name

from lightning_tspipe.networks.modules import has_hooks, is_torchs
from lightning_tspipe.networks.program import Program, Variant
from lightning_tspipe.networks.tape import Call, Context, Size, Value
from lightning_tspipe.replacing import settings_applied

_PLAIN = (
    type(None), bool, int, float, complex, str, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


class _UnknownError(Exception):
    """What a call does is not known here: it is not torch's."""


def kind_of(program: Program, atom: int, received: Sequence[Tensor]) -> str | None:
    """What an atom does, in the present modes of the network; None: that is not told by a text.

    Args:
        program: The network.
        atom: The number of the atom.
        received: What it gets; values don't matter.
    """
    with settings_applied(program.settings):
        variant = program.known(atom, tuple(received))
        if variant is None:  # what the network does with it is not known yet
            return None
        try:
            return _Text(program.module, variant).of(atom, received)
        except _UnknownError:
            return None


def lies_as(tensor: Tensor) -> str:
    """The order of a tensor's dimensions in memory, and its type, for texts."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return f"{tensor.dtype} {order} {'trained' if tensor.requires_grad else ''}"


class _Text:
    """Writes the text of one atom.

    Args:
        root: The network.
        variant: What it does.
    """

    def __init__(self, root: nn.Module, variant: Variant) -> None:
        self._root, self._variant, self._tape = root, variant, variant.tape
        self._numbers: dict[object, int] = {}
        self._regions: dict[int, int] = {0: 0}

    def of(self, atom: int, received: Sequence[Tensor]) -> str:
        """The text.

        Raises:
            _UnknownError: It calls what is not torch's own.
        """
        variant = self._variant
        begin, end = variant.cuts[atom : atom + 2]
        lines = [
            f"{self._value(value)} {self._size(value)} {lies_as(tensor)}"
            for value, tensor in zip(begin.live, received, strict=True)
        ]
        lines += map(self._call, variant.calls(atom, atom + 1))
        # What the loss gets as well makes no difference.
        given = dict.fromkeys([*end.live, *variant.emits(atom, atom + 1)])
        lines.append(f"gives {self._all(given)}")
        return "\n".join(lines)

    def _call(self, call: Call) -> str:
        given = [*map(self._literal, call.args)]
        given += [f"{name}={self._literal(value)}" for name, value in call.kwargs.items()]
        state = self._all(map(self._tape.state.__getitem__, call.state))
        made = ", ".join(f"{self._value(value)} {self._size(value)}" for value in call.made)
        words = f"{self._function(call.function)}({', '.join(given)})"
        return f"{made} = {words} reads {state} {self._context(call.context)}"

    def _context(self, context: Context) -> str:
        region = self._regions.setdefault(context.region, len(self._regions))
        return f"{context.no_grad} {context.autocast} {context.kernels} {region}"

    def _function(self, function: Callable[..., Any]) -> str:
        name = self._module(function) if isinstance(function, nn.Module) else resolve_name(function)
        if not name:
            raise _UnknownError
        return name

    def _module(self, module: nn.Module) -> str:
        """One of torch's own, with what it holds."""
        parts = list(module.modules())
        if not all(is_torchs(part) and not has_hooks(part) for part in parts):
            raise _UnknownError
        return " ".join(
            f"{type(part).__qualname__} {[i for i in vars(part).items() if _is_plain(i[1])]}"
            for part in parts
        )

    def _all(self, values: Iterable[Value]) -> str:
        return ", ".join(map(self._value, values))

    def _value(self, value: Value) -> str:
        number = self._numbers.setdefault(value.state or value.name, len(self._numbers))
        if value.state:
            tensor = self._held(value.state)
            return f"p{number} {tuple(tensor.shape)} {lies_as(tensor)}"
        if value.name in self._tape.constants:
            return f"c{number} {self._size(value)} {value.dtype}"
        return f"v{number}"

    def _held(self, name: str) -> Tensor:
        path, _, last = name.rpartition(".")
        tensor: Tensor = getattr(self._root.get_submodule(path), last)
        return tensor

    def _size(self, value: Value) -> str:
        return f"{value.size} {value.dtype}"

    def _literal(self, value: Any) -> str:
        match value:
            case Value():
                text = self._value(value)
            case Size():
                text = value.code
            case slice():
                text = f"slice{self._literal((value.start, value.stop, value.step))}"
            case tuple() | list():
                text = f"({', '.join(map(self._literal, value))})"
            case dict():
                text = f"{{{', '.join(f'{k!r}: {self._literal(v)}' for k, v in value.items())}}}"
            case torch.device() if value == self._tape.device:
                text = "device"
            case _ if isinstance(value, _PLAIN):
                text = repr(value)
            case _:
                raise _UnknownError
        return text


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
