"""Taking things out of a module for a while: parameters, forwards, attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from lightning_tspipe.errors import CaptureError
from lightning_tspipe.networks.location import current_line
from lightning_tspipe.networks.modules import (
    CONTAINERS,
    containers_of_class,
    hold_the_same,
    is_torchs,
)
from lightning_tspipe.replacing import TensorSwap, attributes_replaced

# Who notes what modules return is no state of theirs.
_IGNORED = ("_forward_hooks", "_output_capturing_hooks_installed")


class Stub(partial[Any]):
    """Stands for a method of a network while a step runs; in a copy of the network, it refuses."""

    def __deepcopy__(self, _: object) -> Any:
        return _refuse_copy


def _refuse_copy(*_: object, **__: object) -> NoReturn:
    raise CaptureError(
        f"the step copies a pipelined network and calls the copy, at {current_line()}: its values "
        "are spread over the ranks. Make the copy before the training, and update it in each step"
    )


def meta_like(tensor: Tensor) -> Tensor:
    """A tensor of the same shape without memory."""
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def needs_values(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether an operation looks at numbers, as a selection by a mask: shapes won't do for it."""
    try:
        args, kwargs = pytree.tree_map_only(Tensor, meta_like, (args, kwargs))
        func(*args, **kwargs)
    except (NotImplementedError, RuntimeError, TypeError):
        return True
    return False


def run_on_zeros(
    function: Callable[..., Any],
    given: tuple[Any, Any],
    modules: Iterable[nn.Module],
    shape_of: Callable[[Tensor], Sequence[int]] = Tensor.size,
) -> Any:
    """What a function returns with zeros for all values, where shapes won't do for it.

    Args:
        function: It.
        given: What it is given, by position and by name.
        modules: Those that it calls.
        shape_of: The shape that the zeros for a tensor are to have.
    """

    def zeros(tensor: Tensor) -> Tensor:
        device = "cpu" if tensor.is_meta else tensor.device
        made = torch.zeros(shape_of(tensor), dtype=tensor.dtype, device=device)
        return made.requires_grad_(tensor.requires_grad)

    with unset_fake_temporarily(), TensorSwap(modules, zeros)():
        args, kwargs = pytree.tree_map_only(Tensor, zeros, given)
        return function(*args, **kwargs)


def or_on_zeros(
    module: nn.Module, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """What a module returns for tensors without values; if it needs values, it runs on zeros."""
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:  # as that of experts that a router chooses
        given = pytree.tree_leaves((args, kwargs))
        like = next((leaf for leaf in given if isinstance(leaf, Tensor)), None)
        if like is None:
            raise
        try:
            made = run_on_zeros(function, (args, kwargs), module.modules())
        except Exception:  # noqa: BLE001 - then it isn't that
            raise error from None
        return pytree.tree_map_only(
            Tensor,
            lambda t: like.new_empty(t.shape, dtype=t.dtype, requires_grad=t.requires_grad),
            made,
        )


@contextmanager
def without_values(
    modules: Iterable[nn.Module], make: Callable[[Tensor], Tensor] = meta_like
) -> Iterator[None]:
    """While inside, modules have stand-ins of their tensors, which have no values.

    Args:
        modules: The modules, their parts too.
        make: Makes the stand-in of a tensor.
    """
    modules = list(modules)
    own = dict.fromkeys(module for module in modules if not is_torchs(module))
    calls = (
        (module, "_compiled_call_impl", partial(or_on_zeros, module, module._call_impl))  # noqa: SLF001
        for module in own
    )
    # A cumulative average asks how many batches there were, which nobody knows of these.
    averages = (m for m in modules if isinstance(m, _BatchNorm) and m.momentum is None)
    momenta = ((module, "momentum", 1.0) for module in averages)
    with TensorSwap(modules, make)(), attributes_replaced([*calls, *momenta]):
        yield


def forwards_replaced(
    forwards: Mapping[nn.Module, Callable[..., Any]],
) -> AbstractContextManager[None]:
    """While inside, calling one of the modules runs the given function instead of its forward."""
    return attributes_replaced((module, "forward", made) for module, made in forwards.items())


class StandIn:
    """Has a method that stands for the forward of a module.

    Attributes:
        module: The module.
        forward: What it stands for.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward: Callable[..., Any] = module.forward


def as_they_are(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """While inside, nothing stands for the forwards of modules."""
    forwards = (getattr(vars(module).get("forward"), "__self__", None) for module in modules)
    return forwards_replaced({f.module: f.forward for f in forwards if isinstance(f, StandIn)})


def silenced(
    module: nn.Module,
    function: Callable[..., None] = lambda *_args, **_kwargs: None,
    names: Iterable[str] = ("log", "log_dict", "print"),
) -> AbstractContextManager[None]:
    """While inside, methods by which a module tells something to the world do something else."""
    return attributes_replaced((module, name, function) for name in names if hasattr(module, name))


@contextmanager
def attributes_restored(
    modules: Iterable[nn.Module], *, tensors: bool = False
) -> Iterator[list[nn.Module]]:
    """Undo what happens to attributes of modules, in containers, and to values of their tensors.

    Containers stay the same objects, which others may hold.

    Args:
        modules: The modules.
        tensors: Whether the values of parameters and buffers are saved and restored too.

    Yields:
        Afterwards, the modules whose attributes were changed.
    """
    modules = list(modules)
    places = [table for m in modules for table in (m._parameters, m._buffers, vars(m))]  # noqa: SLF001
    held = [tensor for table in places for tensor in table.values()] if tensors else []
    values = [(t, t.detach().clone()) for t in held if isinstance(t, Tensor) and _is_writable(t)]
    shared = (c for module in modules for c in containers_of_class(module).values())
    before = [
        {name: (v, v.copy() if isinstance(v, CONTAINERS) else None) for name, v in vars(m).items()}
        for m in modules
    ]
    written: list[nn.Module] = []
    try:
        with tables_restored(shared):
            yield written
    finally:
        for module, attributes in zip(modules, before, strict=True):
            if _is_written(vars(module), attributes):
                written.append(module)
            vars(module).clear()
            for name, (value, copied) in attributes.items():
                _refill(value, copied)
                vars(module)[name] = value
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)


def _is_writable(tensor: Tensor) -> bool:
    """Whether a tensor has values, and memory for each of them: torch writes into no other."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return not tensor.is_meta
    return all(step or size < 2 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def _is_written(now: dict[str, Any], before: dict[str, tuple[Any, Any]]) -> bool:
    names = {name for name in now if not name.startswith(_IGNORED)}
    return names != {name for name in before if not name.startswith(_IGNORED)} or any(
        now[name] is not value or (copied is not None and not hold_the_same(value, copied))
        for name, (value, copied) in before.items()
        if name in names
    )


@contextmanager
def tables_restored(tables: Iterable[Any]) -> Iterator[None]:
    """Undo what happens to lists, dicts and sets, which stay the same objects."""
    kept = [(table, table.copy()) for table in tables if isinstance(table, CONTAINERS)]
    try:
        yield
    finally:
        for table, copied in kept:
            if not hold_the_same(table, copied):
                _refill(table, copied)


def _refill(value: Any, copied: Any) -> None:
    """Put what a container had back into it; None: it is none."""
    if copied is not None:
        value.clear()
        if isinstance(value, list):
            value.extend(copied)
        else:
            value.update(copied)
