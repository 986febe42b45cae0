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
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.networks.arguments import Arguments, TensorKind, tensors_in
from lightning_tspipe.networks.fakes import Fakes
from lightning_tspipe.networks.guards import Guards
from lightning_tspipe.networks.hooks import is_noted
from lightning_tspipe.networks.location import current_line
from lightning_tspipe.networks.modules import blocks_of, is_basic, is_leaf, tables_in, title
from lightning_tspipe.networks.recorder import Recorder
from lightning_tspipe.networks.swap import (
    as_they_are,
    attributes_restored,
    run_on_zeros,
    tables_restored,
)
from lightning_tspipe.networks.tape import Size, Tape, Value
from lightning_tspipe.random_states import other_random_state, random_stream
from lightning_tspipe.replacing import TensorSwap, attributes_replaced

_CONSTANTS = (type(None), bool, int, float, complex, str, enum.Enum, torch.dtype, torch.device)
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
        as_they_are(module.modules()),
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
            stack.enter_context(TensorSwap(self._paths, self._fake.like)())
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
        def shape_of(tensor: Tensor) -> list[int]:
            sizes = map(self._recorder.plain, tensor.shape)
            return [size(batch) if isinstance(size, Size) else size for size in sizes]

        function, given = self._own_call(module), (args, kwargs)
        return run_on_zeros(function, given, module.modules(), shape_of)

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
