"""Writes down, call by call, what a forward does with torch's functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import _cur_sdpa_kernel_backends
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter
from torch.utils.checkpoint import checkpoint

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.networks.location import current_line
from lightning_tspipe.networks.operations import Operations
from lightning_tspipe.networks.tape import Call, Context, Size, Value, memory_of

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PRINTER = PythonPrinter()


class Recorder(TorchFunctionMode):
    """Writes calls down.

    Args:
        device: Where they run.
        env: Knows what was asked about sizes.

    Attributes:
        calls: So far, in order.
        constants: Tensors that come from outside, by name.
        operations: To be entered as well.
        scope: Dotted path of the module that calls.
        is_paused: Whether nothing is written down for a while.
        num_guards_of_calls: How often calls asked for sizes, and not what made the calls.
    """

    def __init__(self, device: torch.device, env: ShapeEnv) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.constants: dict[str, Tensor] = {}
        self.operations = Operations()
        self.scope = ""
        self.is_paused = False
        self.num_guards_of_calls = 0
        self._device, self._env = device, env
        self._depth = _depth_of_autocast()
        self._values: dict[int, tuple[Tensor, Value]] = {}  # tensors are held: ids stay theirs
        self._memories: dict[int, int] = {}
        self._kernels = _cur_sdpa_kernel_backends()
        self._regions: dict[Any, int] = {}

    # Values

    def enter(self, tensor: Tensor, name: str = "", state: str = "") -> Value:
        """Give a tensor a name on the tape."""
        made = Value(
            name or f"v{len(self._values)}", tuple(map(self.plain, tensor.shape)), tensor.dtype,
            self._memory_of(tensor), state, isinstance(tensor, nn.Parameter),
        )  # fmt: skip
        self._values[id(tensor)] = tensor, made
        return made

    def value_of(self, tensor: Tensor) -> Value:
        """What a tensor is on the tape; one that no call has made is a constant.

        Raises:
            PartitionError: It can't be one.
        """
        if id(tensor) in self._values:
            return self._values[id(tensor)][1]
        shape = tuple(tensor.shape)
        if isinstance(tensor, FakeTensor):
            raise PartitionError(
                f"a tensor of shape {shape} comes from a place that can't be seen: it was made in "
                "another forward, say"
            )
        if tensor.requires_grad:
            raise PartitionError(
                f"a tensor of shape {shape} requires gradients and is no parameter of the network. "
                "Register it (nn.Parameter), or give it to the forward"
            )
        made = self.enter(tensor, f"c{len(self._values)}")
        self.constants[made.name] = tensor
        return made

    def _memory_of(self, tensor: Tensor) -> int:
        return self._memories.setdefault(memory_of(tensor), len(self._memories))

    def plain(self, leaf: Any) -> Any:
        """A leaf of arguments, or of a result, as the tape has it."""
        if isinstance(leaf, Tensor):
            return self.value_of(leaf)
        if isinstance(leaf, _SYMBOLIC):
            expression = leaf.node.expr
            if not expression.free_symbols:
                return leaf.node.pytype(expression)
            if leaf.node.has_hint() is False:  # as that of what `nonzero` finds
                raise DynamicOutputShapeException(expression)
            return Size(re.sub(r"\bs\d+\b", "b", _PRINTER.doprint(expression)))
        if isinstance(leaf, slice):
            return slice(*map(self.plain, (leaf.start, leaf.stop, leaf.step)))
        return tuple(map(self.plain, leaf)) if isinstance(leaf, torch.Size) else leaf

    # Calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        return self.record(func, args, kwargs)

    def record(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[..., Any] | None = None,
        state: Sequence[str] = (),
    ) -> Any:
        """Run a call, and write it down if it makes, changes or draws something.

        Args:
            function: What the tape calls.
            args: Its positional arguments.
            kwargs: The others.
            run: Does the same here, if not the function.
            state: Names of parameters and buffers that it reads without being given them.
        """
        self.is_paused = True
        try:
            seen = self.operations
            num_draws, num_products = seen.num_draws, seen.num_products
            seen.written.clear()
            own_args, own_kwargs = pytree.tree_map(self.plain, (args, kwargs))
            num_guards = len(self._env.guards)
            result = (run or function)(*args, **kwargs)
            # What torch decides by sizes, it decides again whenever this runs.
            self.num_guards_of_calls += len(self._env.guards) - num_guards
            leaves, structure = pytree.tree_flatten(result)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            # What a call makes for itself, and writes, nobody knows.
            memories = set(map(memory_of, seen.written)) & self._memories.keys()
            writes = frozenset(map(self._memories.__getitem__, memories))
            draws = seen.num_draws > num_draws
            if not (tensors or writes or draws):
                return result
            made = [
                self._values[id(t)][1] if id(t) in self._values else self.enter(t) for t in tensors
            ]
            call = Call(
                function, own_args, own_kwargs, tuple(made), structure,
                tuple(map(self.plain, leaves)), self._context(), writes, tuple(state), draws,
                seen.num_products > num_products, self.scope, _name_of(function), current_line(),
            )  # fmt: skip
            names = [value.state for value in call.values if value.state]
            call.state = tuple(dict.fromkeys([*names, *state]))
            self.calls.append(call)
            return result
        finally:
            self.is_paused = False

    def _context(self) -> Context:
        kind, autocast = self._device.type, None
        if _depth_of_autocast() > self._depth:  # the forward has entered one, perhaps to switch off
            autocast = kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        kernels = _cur_sdpa_kernel_backends()
        chosen = None if kernels == self._kernels else tuple(kernels)
        return Context(not torch.is_grad_enabled(), autocast, chosen, self._region())

    def _region(self) -> int:
        """Which checkpointed region is around; it has hooks of its own on what autograd saves."""
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001
        pack = None if hooks is None else hooks[0]
        if getattr(pack, "__module__", "") != checkpoint.__module__:
            return 0
        return self._regions.setdefault(pack, len(self._regions) + 1)


def _depth_of_autocast() -> int:
    """How many contexts of autocast are around."""
    depth: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth - 1


def _name_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    owner = getattr(function, "__self__", None)
    return getattr(owner, "__name__", name) if name in {"__get__", "apply"} else name
