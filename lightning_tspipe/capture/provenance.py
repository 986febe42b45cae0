"""Where each tensor of a traced step came from, and what becomes of it.

Sources are the leaves of the batch, the parameters, and what the pipelined blocks return. A
``TorchFunctionMode`` sees every operation on them. Afterwards two questions have answers: which
chain of *glue* leads from one block to the next, and which sources the step itself reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_tspipe.capture.plan import NetworkName, ValueRef
from lightning_tspipe.errors import CaptureError, SpoiledError
from lightning_tspipe.networks import swap
from lightning_tspipe.networks.arguments import Arguments, tensors_in
from lightning_tspipe.networks.location import current_line
from lightning_tspipe.networks.operations import Operations
from lightning_tspipe.networks.tape import memory_of

T = TypeVar("T")
# What tells of a tensor without its values: its shape, its type, its place in a graph.
_DESCRIPTIONS = (
    type(None), bool, int, float, complex, torch.Size, torch.dtype, torch.device, torch.layout,
    torch.memory_format, Node, RemovableHandle,
)  # fmt: skip
MOVES = frozenset({Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.pin_memory})
_GRADIENT: Any = Tensor.grad
_DATA: Any = Tensor.data
_SHAPE: Any = Tensor.shape
_SIZES = (_SHAPE.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.stride)
_BEHIND_ROWS = re.compile(r"\.shape(?!\[0\])|\.size\((?!0\))|numel|nelement|stride")
# Operations don't show what these change.
_SETTERS = (_GRADIENT.__set__, _DATA.__set__, Tensor.detach_)


def name_of(func: Callable[..., Any]) -> str:
    """Such as ``torch.Tensor.add_``."""
    return str(resolve_name(func) or getattr(func, "__name__", repr(func)))


@dataclass(frozen=True)
class BatchLeaf:
    """Where a value comes from: a leaf of the batch."""


@dataclass(frozen=True)
class NetworkParameter:
    """Where a value comes from: a parameter or a buffer of a pipelined network."""

    name: str
    network: NetworkName
    is_buffer: bool = False


DRAWN_LIKE = frozenset({torch.rand_like, torch.randn_like, torch.randint_like})
"""Functions that look at the shape of what they are given alone: the numbers come from nowhere."""


@dataclass(frozen=True)
class BlockOutput:
    """Where a value comes from: a block's output, or what a hook in it gets."""

    call: int
    ref: ValueRef
    of_hook: bool = False


@dataclass(frozen=True, slots=True)
class Samples:
    """Stands among the arguments of an operation for the number of samples, or a multiple."""

    times: int

    def __repr__(self) -> str:
        return "samples" if self.times == 1 else f"{self.times}*samples"


@dataclass(frozen=True, slots=True)
class Operation:
    """A function of torch with all its arguments but the tensors.

    Attributes:
        function: The function.
        arguments: How it is called.
        writes: Whether it changes a tensor that it is given.
        slot: Which leaf of what it returns is meant.
    """

    function: Callable[..., Any]
    arguments: Arguments
    writes: bool = False
    slot: int = 0

    def of(self, rows: Any) -> Operation:
        """The same for so many samples: with numbers only."""
        leaves = tuple(_for_samples(leaf, rows) for leaf in self.arguments.leaves)
        return replace(self, arguments=replace(self.arguments, leaves=leaves))

    def __call__(self, *tensors: Tensor, rows: Any) -> Tensor:
        """Do it with some tensors, which stay as they are: others may read them."""
        if self.writes:
            tensors = tuple(tensor.clone() for tensor in tensors)
        args, kwargs = self.of(rows).arguments.bind(tensors)
        result: Tensor = pytree.tree_leaves(self.function(*args, **kwargs))[self.slot]
        return result

    def __str__(self) -> str:
        return f"{name_of(self.function)}{self.arguments}[{self.slot}]"


def _for_samples(leaf: Any, rows: Any) -> Any:
    if isinstance(leaf, slice):
        return slice(*(_for_samples(end, rows) for end in (leaf.start, leaf.stop, leaf.step)))
    return leaf.times * rows if isinstance(leaf, Samples) else leaf


@dataclass(eq=False)
class Value:
    """A tensor of the trace.

    Attributes:
        tensor: Kept alive, so that its id stays its own.
        source: What it is, if it was not computed.
        parents: What it was computed from.
        operation: How to compute it again from them, if that is possible.
        grad: Whether gradients were enabled.
        read: Whether something else than a block or another operation read it.
        consumers: Values computed from it.
        feeds_block: Whether it was the input of a block.
        mixes: Whether it was computed from several tensors, or moved to a device.
        num_blocks: Blocks that were called before it was computed.
        draws: Whether random numbers were drawn for it.
        root: Of a block's output, where its gradient would arrive.
        spoiled: The network that has written into it, and where it was called.
    """

    tensor: Tensor
    source: Any = None  # a BatchLeaf, NetworkParameter or BlockOutput
    parents: tuple[Value, ...] = ()
    operation: Operation | None = None
    grad: bool = True
    read: bool = False
    consumers: list[Value] = field(default_factory=list)
    feeds_block: bool = False
    mixes: bool = False
    num_blocks: int = 0
    draws: bool = False
    root: Tensor | None = None
    spoiled: tuple[str, str] | None = None

    @property
    def is_parameter(self) -> bool:
        """Whether it is a source that is a parameter."""
        return isinstance(self.source, NetworkParameter)

    @property
    def is_needed(self) -> bool:
        """Like :attr:`is_used`, but a value that nothing touched is not needed."""
        return bool(self.read or self.consumers) and self.is_used

    @property
    def is_used(self) -> bool:
        """Whether the step itself depends on it, by some path that doesn't end in a block."""
        found = reached(self, lambda value: value.consumers)
        return any(value.read or not (value.consumers or value.feeds_block) for value in found)

    def check(self) -> None:
        """Refuse to use what a network has written into: that happens elsewhere, and later."""
        if self.spoiled is not None:
            name, line = self.spoiled
            raise SpoiledError(
                f"the network {name!r}, called at {line}, writes into what it is given, as "
                f"nn.ReLU(inplace=True) does, and the step uses that once more, at "
                f"{current_line()}: there it is as it was. Use inplace=False, or give the network "
                "x.clone()",
                name,
            )

    def sources(self) -> list[Value]:
        """The source values that it was computed from."""
        found = reached(self, lambda value: value.parents if value.source is None else ())
        return [value for value in found if value.source is not None]


def reached(start: T, following: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Something, and all that follows from it, each once."""
    stack, seen = [start], {start}
    while stack:
        value = stack.pop()
        yield value
        new = [other for other in dict.fromkeys(following(value)) if other not in seen]
        seen.update(new)
        stack += new


class _StepOperations(Operations):
    """Notes those of a step: what can't be done on shapes, and floating-point operations."""

    def __init__(self) -> None:
        super().__init__()
        self.num_by_values, self.flops = 0, 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_dynamic = torch.Tag.dynamic_output_shape in func.tags
        self.num_by_values += is_dynamic and swap.needs_values(func, args, kwargs or {})
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if count := flop_registry.get(func.overloadpacket):  # for both gradients twice as much
            is_trained = any(t.requires_grad for t in tensors_in(args)) and torch.is_grad_enabled()
            self.flops += count(*args, **kwargs or {}, out_val=made) * (3 if is_trained else 1)
        return made


class ProvenanceMode(TorchFunctionMode):
    """Records the operations of a step on tracked tensors.

    Attributes:
        reads: (value whose numbers were looked at, number of blocks called before, user's line).
        writes: (value written in place, number of blocks called before, user's line, whether only
            its gradient was set: cleared).
        gradient_reads: The user's lines that looked at the gradient of a parameter.
        is_paused: Whether nothing is recorded for a while.
        num_blocks: Pipelined blocks that were called so far.
        draws: To be entered as well, so that random numbers are noticed.
        draws_samples: Whether tensors of random numbers were drawn, rather than single ones.
        devices: (values whose device was asked for, number of blocks called before).
        sizes: (value whose sizes were asked for, beyond the first, the same, user's line).
        kept: The module's own buffers, by their memories, which stay theirs as they are held.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Tensor] = {}
        self._values: dict[int, Value] = {}
        self._lying_in: dict[int, dict[int, Tensor]] = {}  # memories, with their tensors by ids
        self._parameters: dict[int, NetworkParameter] = {}  # by their memories and ids
        self.is_paused = False
        self.num_blocks = 0
        self.reads: list[tuple[Value, int, str]] = []
        self.writes: list[tuple[Value, int, str, bool]] = []
        self.gradient_reads: list[str] = []
        self.draws_samples = False
        self.devices: list[tuple[tuple[Value, ...], int]] = []
        self.sizes: list[tuple[Value, int, str]] = []
        self.draws = _StepOperations()

    @property
    def mixes(self) -> bool:
        """Whether values of the batch meet others, move or tell their device before the last block.

        If they do later, they are used and have values, unless only their device is asked for.
        """
        found = (v for v in self._values.values() if v.mixes and v.num_blocks < self.num_blocks)
        meet = any(not source.is_parameter for value in found for source in value.sources())
        return meet or any(
            when < self.num_blocks or not all(value.is_needed for value in values)
            for values, when in self.devices
        )

    def track(self, tensor: Tensor, source: object) -> Value:
        """Make ``tensor`` a source."""
        if isinstance(source, NetworkParameter):
            self._parameters[memory_of(tensor)] = self._parameters[id(tensor)] = source
        return self._put(Value(tensor, source))

    def _put(self, value: Value) -> Value:
        tensor = value.tensor
        self._values[id(tensor)] = value
        self._lying_in.setdefault(memory_of(tensor), {})[id(tensor)] = tensor
        return value

    def lookup(self, tensor: Tensor) -> Value | None:
        """The value of a tensor, if it is tracked."""
        return self._values.get(id(tensor))

    def mark_read(self, tree: Any) -> None:
        """The tensors in ``tree`` leave the step."""
        for value in filter(None, map(self.lookup, tensors_in(tree))):
            value.read = True

    def spoil(self, tensor: Tensor, name: str) -> None:
        """A network has written into a tensor, and all that shares its memory."""
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - nobody looks at values here
            lying = self._lying_in.get(memory_of(tensor), {})
        for place in lying:
            self._values[place].spoiled = name, current_line()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        known = tuple(filter(None, map(self.lookup, tensors)))
        parents = () if func in DRAWN_LIKE else known
        before = self.draws.num_draws, self.draws.num_by_values
        self.draws.written.clear()
        result = self._done(partial(func, *args, **kwargs), tensors, parents)
        after = self.draws.num_draws, self.draws.num_by_values
        self._note_access(func, parents, result)
        written = self._written(func, args)
        is_read = after != before or not written.keys().isdisjoint(map(id, tensors))
        if not is_read and tensors and _describes(func, args, kwargs, result):
            return result
        self._refuse_inner(tensors)
        for value in known:
            value.check()
        if parents:
            # What comes from nowhere that is known is as it is.
            parents = tuple(self.lookup(tensor) or self._put(Value(tensor)) for tensor in tensors)
            operation = Operation(func, Arguments.of(args, kwargs), bool(written))
            made = Value(tensors[0], None, parents, operation, torch.is_grad_enabled())
            made.num_blocks, made.draws = self.num_blocks, after[0] > before[0]
            made.mixes = len(tensors) > 1 or func in MOVES
            self._record(made, result, written, clears=func == _GRADIENT.__set__)
        if after != before:
            self._note_draws(known, result, draws=after[0] > before[0])
        return result

    def _done(
        self, operation: Callable[[], Any], tensors: Sequence[Tensor], parents: Iterable[Value]
    ) -> Any:
        """Do an operation; what the module's own tensors are changed by is read."""
        own = (t for t in tensors if memory_of(t) in self.kept and not isinstance(t, FakeTensor))
        kept = [(t, t.detach().clone()) for t in own]
        try:
            result = operation()
        except Exception:
            self._refuse_inner(tensors)
            raise
        if not all(torch.equal(tensor, before) for tensor, before in kept):
            for parent in parents:  # statistics of a batch, say
                parent.read = True
        return result

    def _note_access(
        self, func: Callable[..., Any], parents: tuple[Value, ...], result: Any
    ) -> None:
        if func == _GRADIENT.__get__ and any(parent.is_parameter for parent in parents):
            self.gradient_reads.append(current_line())
        if func == _DATA.__get__ and parents and (own := self.parameter_in(parents[0].tensor)):
            self._parameters[memory_of(result)] = own  # a fake one shows another memory
        if func in _SIZES and parents and parents[0].tensor.dim() > 1:
            line = current_line()
            if _BEHIND_ROWS.search(line):
                self.sizes.append((parents[0], self.num_blocks, line))
        if isinstance(result, torch.device):
            self.devices.append((parents, self.num_blocks))

    def _refuse_inner(self, tensors: Iterable[Tensor]) -> None:
        if any(isinstance(t, FakeTensor) and self.lookup(t) is None for t in tensors):
            raise CaptureError(
                f"the step reads a tensor from within a pipelined network, at {current_line()}, "
                "which an attribute or a forward hook that changes what a part returns has kept: "
                "there it is on another rank, and one micro-batch of it at a time. Keep it in a "
                "forward hook that returns nothing (no pre-hook), or return it from forward "
                "(torchvision's create_feature_extractor, timm's features_only=True and "
                "transformers' output_hidden_states=True make networks that do)"
            )

    def _note_draws(self, parents: Iterable[Value], result: Any, *, draws: bool) -> None:
        """Note an operation that can't be done on meta tensors: they have no values."""
        for parent in parents:
            parent.read = True
        if draws:  # or all that is drawn later would differ
            self.draws_samples |= any(tensor.numel() > 1 for tensor in tensors_in(result))

    def _written(self, func: Callable[..., Any], args: Sequence[Any]) -> dict[int, Tensor]:
        """What a call has changed, with all that shares its memory; by their ids."""
        if func in _SETTERS:
            return {id(args[0]): args[0]}
        found: dict[int, Tensor] = {}
        for tensor in self.draws.written:
            found |= self._lying_in.get(memory_of(tensor), {})
        return found

    def _record(
        self, made: Value, result: Any, written: Mapping[int, Tensor], *, clears: bool
    ) -> None:
        """Note what an operation returned and changed; ``made`` is like each of these values."""
        targets = [parent for parent in made.parents if id(parent.tensor) in written]
        line = current_line() if targets else ""
        self.writes += [(target, self.num_blocks, line, clears) for target in targets]
        # An EMA written into a parameter stays there: it is not a use of its result.
        to_parameter = any(self.parameter_in(each.tensor) for each in targets)
        given = (source.source for each in made.parents for source in each.sources())
        if to_parameter and any(isinstance(source, BlockOutput) for source in given):
            raise CaptureError(
                "the step, or a forward hook, writes what it computes from a network's output into "
                f"a pipelined network, at {line}: that runs later, and on another rank. Keep it in "
                "a buffer of the LightningModule itself, or let forward write it"
            )
        made.feeds_block = to_parameter
        values = [
            replace(
                made, tensor=leaf, consumers=[],
                operation=made.operation and replace(made.operation, slot=slot),
            )
            for slot, leaf in enumerate(pytree.tree_leaves(result))
            if isinstance(leaf, Tensor)
        ]  # fmt: skip
        if not to_parameter:
            returned = {id(value.tensor) for value in values}
            others = [t for t in written.values() if id(t) not in returned]
            values += self._changed_beside(
                made, [t for t in others if not clears or self.lookup(t)]
            )
        for parent in () if values else made.parents:
            if to_parameter:
                parent.feeds_block = True
                continue
            parent.read = True
            if not targets:
                self.reads.append((parent, self.num_blocks, current_line()))
        for value in values:
            self._put(value)
            for parent in value.parents:
                parent.consumers.append(value)

    def parameter_in(self, tensor: Tensor) -> NetworkParameter | None:
        """The parameter in whose memory a tensor lies, as its data does."""
        return self._parameters.get(id(tensor)) or self._parameters.get(memory_of(tensor))

    def _changed_beside(self, made: Value, tensors: Iterable[Tensor]) -> Iterator[Value]:
        """What else has other numbers now, in a way that can't be computed again: views, say."""
        for tensor in tensors:
            old = self.lookup(tensor)
            parents = made.parents if old is None else (old, *made.parents)
            yield replace(made, tensor=tensor, parents=parents, consumers=[], operation=None)


def _describes(func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> bool:
    """Whether a function tells something of tensors that doesn't depend on their values."""
    if isinstance(result, RemovableHandle) or func is Tensor.requires_grad_:
        return True
    is_plain = all(isinstance(leaf, _DESCRIPTIONS) for leaf in pytree.tree_leaves(result))
    return is_plain and not swap.needs_values(func, args, kwargs)
