"""What autograd saves of a forward: tokens in the place of weights, the rest as it is.

The rest can be found again as long as autograd holds it. So a forward whose backward is still to
come can be written down, and made again elsewhere: it runs once more on any weights, and each
tensor that it saves is replaced by the one that was written down.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.replacing import entries_replaced

Slot = tuple[nn.Module, str]
Written = list[Any]
"""Of each saved tensor: the numbers of a token, a tensor, or None if nothing needs it any more."""


@dataclass(frozen=True, slots=True)
class Token:
    """Stands for a weight, or a view of it, in what autograd saves."""

    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, values: Sequence[Tensor]) -> Tensor:
        """The same view of another version of the weights."""
        value = values[self.index].detach()
        return value.as_strided(self.shape, self.stride, value.storage_offset() + self.offset)


class Held:
    """A tensor that autograd holds on to."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


Pack = Callable[[Tensor], Token | Held]


@dataclass
class Saved:
    """What one forward has saved, in its order; autograd alone keeps it alive."""

    entries: list[Token | weakref.ref[Held]] = field(default_factory=list)

    def note(self, entry: Token | Held) -> Token | Held:
        """Note another one."""
        self.entries.append(entry if isinstance(entry, Token) else weakref.ref(entry))
        return entry

    def written(self) -> Written:
        """As plain values and tensors of their own; what was saved twice is one tensor."""
        copies: dict[Any, Tensor] = {}
        found: Written = []
        for entry in self.entries:
            if isinstance(entry, Token):
                found.append([entry.index, list(entry.shape), list(entry.stride), entry.offset])
                continue
            held = entry()
            found.append(None if held is None else _copied(held.tensor, copies))
        return found


def recording(values: Sequence[Tensor], saved: Saved) -> Pack:
    """Packs what a forward saves that reads given weights.

    Args:
        values: The weights, which may be views of shared memory.
        saved: Where it is noted.
    """
    places: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for index, value in enumerate(values):
        if value.numel():
            first = int(value.storage_offset())
            place = first, first + _extent(value), index
            places[value.untyped_storage().data_ptr()].append(place)

    def pack(tensor: Tensor) -> Token | Held:
        offset = int(tensor.storage_offset())
        for first, last, index in places.get(tensor.untyped_storage().data_ptr(), ()):
            if first <= offset < last and tensor.numel():
                token = Token(index, tuple(tensor.shape), tensor.stride(), offset - first)
                return saved.note(token)
        return saved.note(Held(tensor))

    return pack


@contextmanager
def repeating(written: Written, saved: Saved) -> Iterator[Pack]:
    """Around a forward: packs what was written down, whatever it saves.

    Args:
        written: What :meth:`Saved.written` gave.
        saved: Where it is noted.

    Raises:
        ConfigurationError: The forward saves something else than the one that was written, or less.
    """
    left = deque(written)

    def pack(tensor: Tensor) -> Token | Held:
        entry = left.popleft() if left else ()
        if entry is None:
            return saved.note(Held(tensor))
        if isinstance(entry, Tensor) and entry.shape == tensor.shape:
            return saved.note(Held(entry.to(tensor.device)))
        if isinstance(entry, list) and tuple(entry[1]) == tensor.shape:
            index, shape, stride, offset = entry
            return saved.note(Token(index, tuple(shape), tuple(stride), offset))
        raise _other()

    yield pack
    if left:
        raise _other()


def _other() -> ConfigurationError:
    return ConfigurationError(
        "the checkpoint was saved within an epoch, and the forwards in flight saved different "
        "tensors than the same forwards do here. Resume with the versions of torch and of the "
        "module that saved it, or from a checkpoint of the end of an epoch"
    )


def _extent(value: Tensor) -> int:
    steps = zip(value.shape, value.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _copied(tensor: Tensor, copies: dict[Any, Tensor]) -> Tensor:
    key = tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    if key not in copies:
        copies[key] = tensor.detach().clone()
    return copies[key]


@contextmanager
def reading(
    slots: Mapping[nn.Parameter, Sequence[Slot]], values: Sequence[Tensor] | None
) -> Iterator[None]:
    """While inside, the modules hold copies through which gradients reach the parameters.

    Args:
        slots: For each of the parameters, the modules and names under which it is read.
        values: For each, what is read in its place; None: they are read themselves.
    """
    if values is None:
        yield
        return
    with torch.enable_grad():
        copies = [
            _Through.apply(parameter, value) if parameter.requires_grad else value
            for parameter, value in zip(slots, values, strict=True)
        ]
    pairs = zip(slots.values(), copies, strict=True)
    with replaced((slot, copy) for own, copy in pairs for slot in own):
        yield


@contextmanager
def replaced(values: Iterable[tuple[Slot, Tensor]]) -> Iterator[None]:
    """While inside, modules hold other tensors under the names of their parameters."""
    found = list(values)
    # Assigning by name is refused.
    entries = [(module._parameters, name, value) for (module, name), value in found]  # noqa: SLF001
    try:
        with entries_replaced(entries):
            yield
    finally:
        # nn.LSTM holds its weights twice; called again, it notices that they are others.
        for module in {module for (module, _), _ in found if isinstance(module, nn.RNNBase)}:
            names = module._flat_weights_names  # noqa: SLF001
            module._flat_weights = [getattr(module, name) for name in names]  # noqa: SLF001


class _Through(torch.autograd.Function):
    """Other values in the place of a parameter, which gets the gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, value: Tensor) -> Tensor:  # noqa: ARG004
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004
        return gradient, None
