"""Networks without values: what constructors do is noted, and done later for a part of a network.

On the meta device a constructor makes tensors of which there are only shapes, and whatever it does
to them (``normal_``, ``zeros_``, the copy that ``deepcopy`` makes) has no effect. Here these
operations are noted. Whoever keeps a tensor does those that lead to its values later, in the noted
order and from the random state of the beginning, so that they are the ones of a single device::

    noted                        a rank that keeps v0         a rank that keeps v1
    v0 = empty(4, 3)             done                         -
    v0.uniform_(-a, a)           done                         drawn into scratch memory
    v1 = empty(6, 4)             -                            done
    v1.uniform_(-b, b)           -                            done
    v2 = clone(v0)  (deepcopy)   -                            -
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_tspipe.networks.arguments import tensors_in
from lightning_tspipe.networks.operations import given_to
from lightning_tspipe.networks.tape import memory_of
from lightning_tspipe.weight_files import read_weight  # noqa: F401 - registers the operation

_CONSTANTS = (torch.tensor, torch.as_tensor, torch.asarray)
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_META = torch.device("meta")
_CPU = torch.device("cpu")
_WHOLE = frozenset({
    torch.ops.aten.copy_.default, torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar,
    torch.ops.lightning_tspipe.read_weight.default,
})  # fmt: skip
"""What leaves nothing of the values that its first argument had before."""
_VALUE_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a noted tensor lies: part of an allocation, of which views are parts too."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Note:
    """An operation.

    Attributes:
        function: What was called.
        arguments: Its arguments, positional and by name, with places for meta tensors.
        reads: Allocations that it reads.
        writes: Allocations that it makes or changes.
        made: For each tensor that it returns, its place if that is a new allocation.
        is_random: Whether it draws from torch's generator.
        start: For the beginning of a recording: which one; then the rest is empty.
        forgets: Allocations of whose values before nothing is left.
    """

    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    made: tuple[_Place | None, ...] = ()
    is_random: bool = False
    start: int | None = None
    forgets: frozenset[int] = frozenset()


class Construction(TorchDispatchMode):
    """Notes of how modules were built on the meta device; operations that ask for values get them.

    Attributes:
        random_states: torch's random state at the beginning of each recording, and wherever a seed
            was set. Ranks that exchange them come to the same values.

    Example:
        >>> construction = Construction()
        >>> with construction.record():
        ...     layer = torch.nn.Linear(2, 3)
        >>> layer.weight.device
        device(type='meta')
        >>> construction.values([layer.weight])[0].shape
        torch.Size([3, 2])
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random_states: list[Tensor] = []
        self._notes: list[_Note] = []
        self._memories: dict[int, Any] = {}  # so that no address is used twice
        self._known: set[int] = set()

    @contextmanager
    def record(self) -> Iterator[None]:
        """While inside, tensors are made on the meta device, and what happens to them is noted."""
        self._start()
        with _META, _Functions(self), self:
            yield

    def _start(self) -> None:
        """From here on, random numbers are those of the present state."""
        self._notes.append(_Note(torch.set_rng_state, start=len(self.random_states)))
        self.random_states.append(torch.get_rng_state())

    def knows(self, tensor: Tensor) -> bool:
        """Whether it was noted how a tensor gets its values."""
        return self._memory(tensor) in self._known

    def forget(self) -> None:
        """Drop all notes."""
        self._notes.clear()
        self._memories.clear()
        self._known.clear()
        self.random_states.clear()

    def values(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The values of noted tensors, on the CPU; torch's generator stays as it is.

        Beyond them, memory is needed for one noted tensor at a time, and for those of which they
        are computed.
        """
        places = [self._place(tensor) for tensor in tensors]
        kept = {place.memory for place in places}
        chosen, last_use = self._leading_to(kept)
        last_draw = max((index for index in chosen if self._notes[index].is_random), default=-1)
        memories: dict[int, Tensor] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for index, note in enumerate(self._notes):
                if note.start is not None:
                    torch.set_rng_state(self.random_states[note.start])
                elif index in chosen:
                    _do(note, memories)
                    for memory in note.reads | note.writes:
                        if last_use[memory] == index and memory not in kept:
                            memories.pop(memory, None)
                elif note.is_random and index < last_draw:
                    _do(note, {})
        return [_compact(_part(memories, place)) for place in places]

    def _leading_to(self, memories: set[int]) -> tuple[set[int], dict[int, int]]:
        """The notes that lead to the values of some allocations, and the last one of each."""
        needed, chosen, last_use = set(memories), set(), dict[int, int]()
        for index in reversed(range(len(self._notes))):
            note = self._notes[index]
            if not needed.isdisjoint(note.writes):
                chosen.add(index)
                needed -= note.forgets
                needed |= note.reads - note.forgets
                for memory in note.reads | note.writes:
                    last_use.setdefault(memory, index)
        return chosen, last_use

    def _memory(self, tensor: Tensor) -> int:
        number = memory_of(tensor)
        self._memories.setdefault(number, tensor.untyped_storage())
        return number

    def _place(self, tensor: Tensor) -> _Place:
        memory, size = self._memory(tensor), tuple(tensor.shape)
        return _Place(memory, tensor.dtype, size, tensor.stride(), int(tensor.storage_offset()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if _asks_for_values(func, args, kwargs):
            args, kwargs = pytree.tree_map(self._value, (args, kwargs))
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _value(self, leaf: Any) -> Any:
        return self.values([leaf])[0] if isinstance(leaf, Tensor) and leaf.is_meta else leaf

    def _note(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operation was called; nothing is noted if it only made a view, or no meta tensor."""
        reads = self._memories_of((args, kwargs))
        outputs = tensors_in(result)
        made = tuple(
            self._place(t) if t.is_meta and self._memory(t) not in reads else None for t in outputs
        )
        given = given_to(function, args, kwargs).values()
        writes = self._memories_of([value for value, is_written in given if is_written])
        writes |= {place.memory for place in made if place is not None}
        forgets = frozenset[int]()
        if function in _WHOLE and args[0].is_meta and _is_whole(args[0]):
            forgets = self._memories_of(args[0]) - self._memories_of((args[1:], kwargs))
        is_random = torch.Tag.nondeterministic_seeded in function.tags
        if writes and is_random and not torch.equal(torch.get_rng_state(), self.random_states[-1]):
            self._start()  # the constructor set a seed
        self._add(_Note(function, (args, kwargs), reads, writes, made, is_random, forgets=forgets))

    def note_initializer(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """A function was called that changes one meta tensor, as a whole."""
        written = self._memories_of(arguments)
        self._add(_Note(function, ((), arguments), written, written, (None,), is_random=True))

    def _add(self, note: _Note) -> None:
        if note.writes:
            self._known |= note.writes
            arguments = pytree.tree_map(self._place_of_meta, note.arguments)
            self._notes.append(replace(note, arguments=arguments))

    def _memories_of(self, values: Any) -> frozenset[int]:
        return frozenset(self._memory(tensor) for tensor in _meta_tensors(values))

    def _place_of_meta(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._place(leaf) if leaf.is_meta else leaf.detach()
        return _CPU if isinstance(leaf, torch.device) and leaf == _META else leaf


class _Functions(TorchFunctionMode):
    """Notes what operations on the meta device would not show.

    Values that a constructor spells out (``torch.tensor([0.1, 0.2])``), and the initializers of
    torch that do nothing there: those that ask their tensor whether it is a meta tensor.
    """

    def __init__(self, construction: Construction) -> None:
        super().__init__()
        self._construction = construction

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if func in _CONSTANTS and not any(isinstance(a, Tensor) for a in args):
            return _constant(func, args, kwargs)
        result = func(*args, **kwargs)
        if func == _IS_META and result:
            caller = sys._getframe(1)  # noqa: SLF001 - the initializer, which is about to return
            if caller.f_code.co_filename == nn.init.__file__:
                names = caller.f_code.co_varnames[: caller.f_code.co_argcount]
                arguments = {name: caller.f_locals[name] for name in names}
                function = getattr(nn.init, caller.f_code.co_name)
                self._construction.note_initializer(function, arguments)
        return result


def _constant(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    device = kwargs.get("device")
    if device is not None and torch.device(device) != _META:
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    plain = {**kwargs, "device": _CPU, "requires_grad": False}
    if func is torch.as_tensor:
        del plain["requires_grad"]
    constant: Tensor = func(*args, **plain)
    if not constant.numel():  # it has no values; libraries ask it where tensors are made
        return constant
    return constant.to(_META).requires_grad_(kwargs.get("requires_grad", False))


def _asks_for_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if not _meta_tensors((args, kwargs)):
        return False
    if not _VALUE_TAGS.isdisjoint(func.tags):
        return True
    if func is torch.ops.aten.copy_.default:
        return not args[0].is_meta
    return func is torch.ops.aten._to_copy.default and kwargs.get("device") not in (None, _META)  # noqa: SLF001


def _meta_tensors(values: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(values) if tensor.is_meta]


def _do(note: _Note, memories: dict[int, Tensor]) -> None:
    """Do what was noted; allocations that are not there are replaced by scratch memory."""
    if note.forgets:  # so nobody has made it
        written: _Place = note.arguments[0][0]
        memories.setdefault(written.memory, _empty(written))
    args, kwargs = pytree.tree_map(
        lambda leaf: _part(memories, leaf) if isinstance(leaf, _Place) else leaf, note.arguments
    )
    result = note.function(*args, **kwargs)
    for place, output in zip(note.made, tensors_in(result), strict=True):
        if place is not None:
            memories[place.memory] = _laid_out(output, place)


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all of its allocation."""
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def _laid_out(output: Tensor, place: _Place) -> Tensor:
    """The output with the strides that it had on the meta device."""
    if (output.stride(), output.storage_offset()) == (place.stride, place.offset):
        return output
    return _empty(place).copy_(output)


def _part(memories: dict[int, Tensor], place: _Place) -> Tensor:
    whole = memories.get(place.memory)
    if whole is None:
        return _empty(place).zero_()
    part = torch.empty(0, dtype=place.dtype, device=_CPU)
    return part.set_(whole.untyped_storage(), place.offset, place.size, place.stride)


def _empty(place: _Place) -> Tensor:
    return torch.empty_strided(place.size, place.stride, dtype=place.dtype, device=_CPU)


def _compact(tensor: Tensor) -> Tensor:
    """Without the rest of the allocation of which it is a part."""
    return tensor if _is_whole(tensor) else tensor.clone()
