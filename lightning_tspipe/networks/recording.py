"""Recording: a forward is run once on tensors without values, and what it calls is written down.

Nothing is known about torch's functions here: what a call reads, makes, writes and draws is seen
when it runs. Whole calls of the tape are

- torch's own modules, modules without submodules, with hooks, and compiled ones,
- custom autograd functions, whose backward is theirs,
- modules that need values (the experts that a router chooses, say), that write attributes of
  themselves, or that draw from random generators of Python or numpy; found when they fail.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CellType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.nn.attention import _cur_sdpa_kernel_backends
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._sympy.printers import PythonPrinter
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.networks.arguments import Arguments, TensorKind, tensors_in
from lightning_tspipe.networks.batchnorm import uncounted
from lightning_tspipe.networks.fakes import Fakes
from lightning_tspipe.networks.guards import Guards
from lightning_tspipe.networks.hooks import is_noted
from lightning_tspipe.networks.location import current_line
from lightning_tspipe.networks.modules import blocks_of, is_basic, is_leaf, tables_in, title
from lightning_tspipe.networks.swap import (
    TensorSwap,
    attributes_replaced,
    attributes_restored,
    tables_restored,
)
from lightning_tspipe.networks.tape import Call, Context, Size, Tape, Value, memory_of
from lightning_tspipe.random_states import other_random_state, random_stream

_CONSTANTS = (type(None), bool, int, float, complex, str, enum.Enum, torch.dtype, torch.device)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PRINTER = PythonPrinter()
_NEEDS_VALUES = (
    DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode,
)  # fmt: skip
_PATCHING = threading.Lock()
_LOG_OF_FAKES = logging.getLogger(FakeTensor.__module__)
_LruCache = type(functools.lru_cache(len))
_SMALLEST = 2
"""Samples: sizes of 0 and 1 would be taken for fixed ones."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """A leaf of a return value that is no tensor: part of the structure, not of the outputs."""

    value: object


pytree.register_pytree_node(
    Constant,
    lambda constant: ([], constant.value),
    lambda _, value: value,
    serialized_type_name="lightning_tspipe.Constant",
)


class Operations(TorchDispatchMode):
    """Notes what the operations behind calls do.

    Attributes:
        num_draws: How many have drawn random numbers.
        num_products: How many have multiplied matrices.
        written: The tensors that they have changed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_draws = self.num_products = 0
        self.written: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = given_to(func, args, kwargs)
        # An attention draws for its dropout only.
        is_off = "dropout_p" in given and not given["dropout_p"][0]
        self.num_draws += torch.Tag.nondeterministic_seeded in func.tags and not is_off
        self.num_products += func.overloadpacket in flop_registry
        self.written += tensors_in([value for value, is_written in given.values() if is_written])
        return func(*args, **kwargs)


def given_to(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, tuple[Any, bool]]:
    """What an operation is given, defaults too, and whether it changes that, by name."""
    schema = func._schema.arguments  # noqa: SLF001 - there is no public way
    found = {each.name: each.default_value for each in schema}
    found |= {each.name: value for each, value in zip(schema, args, strict=False)}
    found |= kwargs
    written = {each.name for each in schema if each.alias_info and each.alias_info.is_write}
    return {name: (value, name in written) for name, value in found.items()}


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


def record(
    module: nn.Module,
    name: str,
    arguments: Arguments,
    device: torch.device,
    entries: Mapping[nn.Module, str] | None = None,
) -> Tape:
    """Record a forward, in the present modes of its modules.

    Args:
        module: The network.
        name: What messages call it.
        arguments: How it is called.
        device: Where it will run.
        entries: Submodules whose hooks the step runs, and what messages call them: those that it
            calls, and those of which is noted what they return. None: it calls the network.

    Raises:
        PartitionError: It can't be recorded.
    """
    entries = {module: name} if entries is None else entries
    for entry, called in entries.items():
        if "forward" in vars(entry) and not is_basic(entry):
            raise PartitionError(
                f"{title(entry, called)} has its forward replaced on the instance; "
                "override forward in the class instead"
            )
    recording = _Recording(module, name, arguments, device, entries)
    while True:
        try:
            with _apart(module):
                tape = recording.run()
                recording.check_again(tape)
                return tape
        except _AgainError as again:
            recording = again.recording
        except Exception as error:
            failed = recording.failed
            is_entry = failed is module or failed in entries
            if failed is None or is_entry or type(failed) in recording.whole:
                if isinstance(error, PartitionError):
                    raise
                where, called = failed or module, entries.get(failed or module, name)
                raise _refusal(title(where, called), error) from error
            recording = dataclasses.replace(recording, whole=recording.whole | {type(failed)})


def _refusal(where: str, error: Exception) -> PartitionError:
    what = f"recording its forward failed with {type(error).__name__}: {error}"
    if isinstance(error, _NEEDS_VALUES):
        what = "its control flow, or a shape, depends on the values of tensors"
    return PartitionError(
        f"{where} cannot be cut: {what}. Give the class a method `pipeline_blocks(self)` that "
        "returns the submodules whose application in turn equals forward, each from one tensor to "
        "one tensor (for example `return [self.stem, *self.layers, self.head]`), or move the "
        "statement that failed into a submodule"
    )


class _AgainError(Exception):
    """Leaves a recording that has to be made in another way.

    Args:
        recording: The other attempt.
    """

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self.recording = recording


@contextmanager
def _apart(module: nn.Module) -> Iterator[None]:
    """While inside, a recording leaves no trace: it may be made while a network runs."""
    with (
        # Somebody else's fake tensors are none here; what fails is told, not logged.
        _disable_current_modes(),
        attributes_replaced([(_LOG_OF_FAKES, "disabled", True)]),
        tables_restored(tables_in(map(vars, module.modules()))),
        uncounted(module.modules()),
    ):
        yield


@contextmanager
def _caches_emptied(modules: Iterable[nn.Module]) -> Iterator[None]:
    """While inside, cached functions beside the modules' classes have nothing cached.

    What they return is a call of the tape like others, and tensors without values do not stay.
    """
    kinds = {type(module) for module in modules}
    files = {kind.__module__ for kind in kinds} & sys.modules.keys()
    tables = [*map(vars, kinds), *(vars(sys.modules[file]) for file in files)]
    cached = [cache for table in tables for value in table.values() for cache in _caches_of(value)]
    for function in cached:
        function.cache_clear()
    try:
        yield
    finally:
        for function in cached:
            function.cache_clear()


def _caches_of(value: object) -> list[Any]:
    """A cached function, or those that a decorated function calls."""
    if isinstance(value, _LruCache):
        return [value]
    cells = getattr(value, "__closure__", None) or ()
    found = (cell.cell_contents for cell in cells if cell != CellType())  # which is empty
    return [value for value in found if isinstance(value, _LruCache)]


def _heirs(kind: Any) -> Iterator[Any]:
    for heir in kind.__subclasses__():
        yield heir
        yield from _heirs(heir)


@dataclasses.dataclass(eq=False)
class _Recording:
    """One attempt to record a forward.

    Attributes:
        module: The network, as its name, arguments, device and entries are in :func:`record`.
        whole: Classes of modules that are called as a whole.
        fewest: Samples that it is recorded with at least.
        tells_who_draws: Whether to look which module draws from generators of Python or NumPy.
        failed: The innermost module in which it failed; None: none has.
    """

    module: nn.Module
    name: str
    arguments: Arguments
    device: torch.device
    entries: Collection[nn.Module]
    whole: frozenset[type[nn.Module]] = frozenset()
    fewest: int = _SMALLEST
    tells_who_draws: bool = False

    def __post_init__(self) -> None:
        self.failed: nn.Module | None = None
        self._paths = {child: path for path, child in self.module.named_modules()}
        self._env = ShapeEnv()
        self._fake = Fakes(self.device, self._env)
        self._recorder = Recorder(self.device, self._env)
        self._inside: set[nn.Module] = set()

    def run(self) -> Tape:
        """Do it."""
        recorder, module, guards = self._recorder, self.module, Guards(self.module, self.entries)
        with ExitStack() as stack:
            written = stack.enter_context(attributes_restored(self._paths))
            stack.enter_context(random_stream(None))
            stack.enter_context(self._seen())
            given = self._given = list(map(self._input, self.arguments.tensors))
            args, kwargs = self.arguments.bind(given)
            stack.enter_context(TensorSwap(self._paths, self._fake_like)())
            stack.enter_context(guards.watching(self._is_whole))
            stack.enter_context(_caches_emptied(self._paths))
            inputs = tuple(recorder.enter(t, f"x{n or ''}") for n, t in enumerate(given))
            named = (*module.named_parameters(), *module.named_buffers())
            state = {path: recorder.enter(tensor, path, path) for path, tensor in named}
            for context in (torch.enable_grad(), self._fake, recorder.operations, recorder):
                stack.enter_context(context)
            before = other_random_state()
            leaves, structure = self._flatten(self._forward(module, args, kwargs))
            if not self.tells_who_draws and other_random_state() != before:
                raise _AgainError(dataclasses.replace(self, tells_who_draws=True))
        for owner in written:
            if owner in self._inside:
                continue  # whoever is called as a whole writes them again
            self.failed = owner
            raise TypeError(f"{type(owner).__name__}.forward writes attributes of the module")
        num_own = len(self._env.guards) - recorder.num_guards_of_calls
        is_fixed = num_own > 0 or bool(self._env.replacements) or self.fewest < _SMALLEST
        batch = self.arguments.batch if is_fixed else None
        if batch is not None and batch < self.fewest:  # it looks at how few samples there are
            raise _AgainError(dataclasses.replace(self, fewest=batch))
        return Tape(
            self.arguments, inputs, state, recorder.calls, leaves, structure, batch, self.device,
            recorder.constants, guards,
        )  # fmt: skip

    def check_again(self, tape: Tape) -> None:
        """Refuse a forward that keeps in an object what its next call reads, or a number."""
        for path, now in tape.guards.kept.items():
            owner = path
            while owner not in self._paths.values():
                owner = owner.rpartition(".")[0]
            self.failed = self.module.get_submodule(owner)
            if isinstance(now, (int, float, str)):
                raise TypeError(f"forward writes `{path}`")
            try:
                found = str(dataclasses.replace(self).run())
            except Exception as error:  # noqa: BLE001 - it has met what is of no use to it
                found = str(error)
            if found != str(tape):
                raise TypeError(f"what a call keeps in `{path}` is read by the next one")

    # What it runs on

    def _input(self, kind: TensorKind) -> Tensor:
        """An input whose first dimension is the number of samples, whatever that is."""
        rows = () if kind.is_whole else (max(kind.shape[0], self.fewest),)
        others = kind.shape[len(rows) :]
        real = torch.empty((*rows, *others), dtype=kind.dtype, device=self.device)
        sizes = [DimDynamic.DUCK] * len(rows) + [DimDynamic.STATIC] * len(others)
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        return self._fake.from_tensor(real, symbolic_context=context)

    def _fake_like(self, tensor: Tensor) -> Tensor:
        with self._fake:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device
            )

    # What it calls

    @contextmanager
    def _seen(self) -> Iterator[None]:
        """While inside, calls of modules and of custom autograd functions come here first."""
        calls = [
            (child, "_compiled_call_impl", partial(self._call, child))
            for child in self._paths
            if child is not self.module
        ]
        thread = threading.get_ident()
        with _PATCHING, attributes_replaced(calls):
            apply = torch.autograd.Function.__dict__["apply"]

            def seen(kind: Any, *args: Any, **kwargs: Any) -> Any:
                original = apply.__get__(None, kind)
                if threading.get_ident() != thread or self._recorder.is_paused:
                    return original(*args, **kwargs)
                return self._recorder.record(original, args, kwargs)

            with (
                mock.patch.object(torch.autograd.Function, "apply", classmethod(seen)),
                attributes_replaced(
                    (
                        kind,
                        "forward",
                        staticmethod(partial(self._named, kind, kind.forward, thread)),
                    )
                    for kind in _heirs(torch.autograd.Function)
                    if "forward" in vars(kind)
                ),
            ):
                yield
                self._recorder.is_paused = True  # whoever kept `apply` may call it

    def _named(self, kind: Any, forward: Callable[..., Any], thread: int, /, *args: Any) -> Any:
        """The forward of a custom function that is called by a name for its ``apply``.

        Raises:
            PartitionError: It can't be told whether gradients are on.
        """
        if threading.get_ident() != thread or self._recorder.is_paused:
            return forward(*args)
        if kind.setup_context is not torch.autograd.Function.setup_context:
            raise PartitionError(
                f"{kind.__name__}.apply is called by another name, at {current_line()}, and has "
                "`setup_context`. Call it as it is"
            )
        context, *given = args
        wants = any(tensor.requires_grad for tensor in tensors_in(given))
        with torch.set_grad_enabled(any(context.needs_input_grad) or not wants):
            own = torch.no_grad()(partial(forward, context))
            return self._recorder.record(kind.apply, tuple(given), {}, own)

    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A submodule is called."""
        recorder = self._recorder
        if recorder.is_paused:
            return module._call_impl(*args, **kwargs)  # noqa: SLF001
        before, recorder.scope = recorder.scope, self._paths[module]
        try:
            if not self._is_whole(module):
                return self._forward(module, args, kwargs)
            self._inside.update(module.modules())
            state = [
                recorder.value_of(tensor).state
                for tensor in (*module.parameters(), *module.buffers())
            ]
            return recorder.record(module, args, kwargs, partial(self._run_whole, module), state)
        except Exception:
            self.failed = self.failed or module
            raise
        finally:
            recorder.scope = before

    def _is_whole(self, module: nn.Module) -> bool:
        if module in self.entries:
            return is_basic(module)
        has_entries = any(part in self.entries for part in module.modules())
        return type(module) in self.whole or (is_leaf(module) and not has_entries)

    def _forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        blocks = blocks_of(module)
        if blocks is not None:
            if not blocks or module in blocks or not self._paths.keys() >= set(blocks):
                raise PartitionError(
                    f"{title(module, self._paths[module] or self.name)}.pipeline_blocks() must "
                    "return submodules of the module, at least one, and not the module itself"
                )
            if len(args) == 1 and not kwargs:
                (value,) = args
                for block in blocks:
                    value = block(value)
                return value
            if not (module.training and type(module) is nn.TransformerEncoder):
                self.failed = self.failed or module  # in eval mode it has a kernel of its own
                raise TypeError(f"{type(module).__name__} is given more than one tensor")
        before = other_random_state() if self.tells_who_draws else ()
        returned = self._own_call(module)(*args, **kwargs)
        if self.tells_who_draws and other_random_state() != before:
            self.failed = self.failed or module
            raise TypeError(f"{type(module).__name__} draws from `random` or `numpy.random`")
        return returned

    def _own_call(self, module: nn.Module) -> Callable[..., Any]:
        """What to call of a module: without the step's hooks, but noted where it is to be."""
        is_quiet = module is self.module or module in self.entries
        return module.forward if is_quiet and not is_noted(module) else module._call_impl  # noqa: SLF001

    def _run_whole(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run a module, of which only the result matters."""
        with random_stream(None):
            try:
                return self._own_call(module)(*args, **kwargs)
            except Exception:
                if type(module) not in self.whole:
                    raise
                return self._made_by_running(module, args, kwargs)

    def _made_by_running(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What a module returns, as fake tensors; found with zeros in place of all values."""
        first, second = self.arguments.batch or _SMALLEST, 2 * (self.arguments.batch or _SMALLEST)
        leaves, structure = pytree.tree_flatten(self._run_on_zeros(module, args, kwargs, first))
        others = pytree.tree_leaves(self._run_on_zeros(module, args, kwargs, second))
        samples: Any = self.arguments.rows(dict(enumerate(self._given)))

        def made(one: Any, other: Any) -> Any:
            if not isinstance(one, Tensor):
                return one
            sizes = [
                size if size == size_of_other else samples * (size // first)
                for size, size_of_other in zip(one.shape, other.shape, strict=True)
            ]
            return torch.empty(sizes, dtype=one.dtype, device=self.device)

        return pytree.tree_unflatten(
            [made(one, other) for one, other in zip(leaves, others, strict=True)], structure
        )

    def _run_on_zeros(self, module: nn.Module, args: Any, kwargs: Any, batch: int) -> Any:
        def zeros(tensor: Tensor) -> Tensor:
            sizes = map(self._recorder.plain, tensor.shape)
            shape = [size(batch) if isinstance(size, Size) else size for size in sizes]
            return torch.zeros(shape, dtype=tensor.dtype, device=self.device)

        with torch._C._DisableTorchDispatch(), TensorSwap(module.modules(), zeros)():  # noqa: SLF001
            given = pytree.tree_map_only(Tensor, zeros, (args, kwargs))
            return self._own_call(module)(*given[0], **given[1])

    # What it returns

    def _flatten(self, returned: Any) -> tuple[tuple[Value, ...], pytree.TreeSpec]:
        def wrap(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return leaf
            if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
                pytree.register_dataclass(type(leaf))
                return pytree.tree_map(wrap, leaf)
            if not isinstance(leaf, _CONSTANTS):
                raise PartitionError(
                    f"{title(self.module, self.name)} returns a {type(leaf).__name__}, which "
                    "cannot be sent between stages; return tensors in tuples, lists, dicts or "
                    "dataclasses (of models of transformers, with use_cache=False)"
                )
            return Constant(leaf)

        leaves, spec = pytree.tree_flatten(pytree.tree_map(wrap, returned))
        values = tuple(map(self._recorder.value_of, leaves))
        if not values:
            raise PartitionError(
                f"{title(self.module, self.name)} returns no tensor, or a number that depends on "
                "its input; return tensors and constants only"
            )
        return values, spec
