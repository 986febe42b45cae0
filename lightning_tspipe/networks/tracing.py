"""A trace of one network: what its ``forward`` does, as a graph of calls on the original modules.

``torch.fx`` records the calls. Where its own rules would silently compute something else, this
tracer differs: tensors that are made inside ``forward`` are made anew at every run, buffers are
read at run time, ``no_grad`` blocks are kept, and a submodule that cannot be looked into
(data-dependent control flow, hooks, autocast, attributes written in ``forward``) is called as a
whole.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.networks.arguments import Arguments
from lightning_tspipe.networks.huggingface import is_recorded, masks_as_calls
from lightning_tspipe.networks.modules import attributes_kept, blocks_of, is_leaf, names_in, title

_FACTORIES = names_in("""
    arange as_tensor bartlett_window empty eye from_numpy full hamming_window hann_window linspace
    logspace normal ones rand randint randn randperm scalar_tensor tensor tril_indices triu_indices
    zeros
""")
# Questions about a tensor that have an answer while tracing; everything else becomes a node.
_QUERIES = names_in("""
    __bool__ __float__ __get__ __hash__ __int__ __len__ dim element_size get_device has_names
    is_complex is_contiguous is_floating_point is_same_size is_tensor item ndimension nelement
    numel size stride tolist
""")
_CONSTANTS = (type(None), bool, int, float, complex, str, enum.Enum, torch.dtype, torch.device)
_TRACING = threading.Lock()  # torch.fx patches nn.Module while it traces


@dataclass(frozen=True)
class Constant:
    """A leaf of a return value that is no tensor: part of the structure, not of the outputs."""

    value: object


pytree.register_pytree_node(
    Constant,
    lambda constant: ([], constant.value),
    lambda _, value: value,
    serialized_type_name="lightning_tspipe.Constant",
)


@dataclass(frozen=True, slots=True)
class Trace:
    """What a network's ``forward`` does.

    Attributes:
        graph: All calls, in the order in which they run.
        inputs: The nodes of the tensors that it takes.
        leaves: The nodes of the return value's tensors, in ``tree_flatten`` order.
        spec: Structure of the return value; constants are part of it.
        devices: Where the network was when it was traced.
    """

    graph: fx.Graph
    inputs: tuple[fx.Node, ...]
    leaves: tuple[fx.Node, ...]
    spec: pytree.TreeSpec
    devices: frozenset[torch.device]


class _OpaqueError(Exception):
    """Something that a graph cannot express; the submodule in which it happens becomes a leaf."""


class _State(fx.Proxy):
    """Stands for a parameter or a buffer, which is read at run time; its shape is known."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, tensor: Tensor) -> None:
        super().__init__(node, tracer)
        self.shape, self.ndim = tensor.shape, tensor.ndim
        self.size, self.dim, self.numel = tensor.size, tensor.dim, tensor.numel


class _Tracer(fx.Tracer):
    """Records the calls of one ``forward``."""

    trace_asserts = True

    def __init__(
        self, module: nn.Module, opaque: frozenset[type[nn.Module]], arguments: Arguments
    ) -> None:
        super().__init__()
        self.opaque = opaque
        self._arguments = arguments
        self._state = {
            id(tensor): name
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        }
        self.failed: nn.Module | None = None
        self.returned: object = None
        self._thread = threading.get_ident()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        del module_qualified_name
        return type(m) in self.opaque or is_leaf(m)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:  # another rank of this process runs its network
            return forward(*args, **kwargs)
        is_whole = self.is_leaf_module(m, "")
        blocks = None if is_whole else blocks_of(m)
        try:
            if blocks is not None:
                return _apply(blocks, *args, **kwargs)
            output = super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or m  # the innermost one
            raise
        if is_whole and is_recorded(m, args, output):
            self.failed = m
            raise _OpaqueError(f"the network returns what hooks note of {type(m).__name__}")
        return output

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        del attr
        name = self._state.get(id(attr_val)) if isinstance(attr_val, Tensor) else None
        if name is None or threading.get_ident() != self._thread:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy(
                "get_attr", name, (), {}, proxy_factory_fn=lambda node: _State(node, self, attr_val)
            )
        return parameter_proxy_cache[name]

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        del is_module, concrete_args
        blocks = blocks_of(self.root)
        arguments = self._arguments

        def forward(root: nn.Module, *tensors: object) -> tuple[()]:
            args, kwargs = arguments.bind(tensors)
            call = partial(root_fn, root) if blocks is None else partial(_apply, blocks)
            self.returned = call(*args, **kwargs)
            return ()

        names = [f"x{index}" if index else "x" for index in range(len(arguments.tensors))]
        return forward, [
            self.root,
            *(self.create_proxy("placeholder", name, (), {}) for name in names),
        ]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["scope"] = self.scope.module_path
        if node.op == "call_module":
            node.meta["module"] = self.root.get_submodule(str(node.target))
        node.meta["no_grad"] = not torch.is_grad_enabled()
        return node


def _apply(blocks: Iterable[nn.Module], x: object) -> object:
    for block in blocks:
        x = block(x)
    return x


class _RecordTensorCalls(TorchFunctionMode):
    """Makes calls on tensors that are no proxies part of the graph, instead of folding them."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        leaves = pytree.tree_leaves((args, kwargs))
        has_tensor = any(isinstance(leaf, Tensor) for leaf in leaves)
        is_recorded = name in _FACTORIES or (has_tensor and name not in _QUERIES)
        if is_recorded and not any(isinstance(leaf, fx.Proxy) for leaf in leaves):
            return self._tracer.create_proxy("call_function", func, args, kwargs)
        return func(*args, **kwargs)


def _refusing_autocast() -> Callable[..., Any]:
    thread = threading.get_ident()
    enter: Callable[..., Any] = torch.amp.autocast_mode.autocast.__enter__

    def refuse(context: torch.amp.autocast_mode.autocast) -> Any:
        if threading.get_ident() == thread:
            raise _OpaqueError("it enters torch.autocast")
        return enter(context)

    return refuse


def trace(module: nn.Module, name: str, arguments: Arguments) -> Trace:
    """Record what the module's ``forward`` does, in its present modes.

    Args:
        module: The network.
        name: What messages call it.
        arguments: How it is called.

    Raises:
        PartitionError: ``forward`` cannot be recorded.
    """
    if "forward" in vars(module):
        raise PartitionError(
            f"{title(module, name)} has its forward replaced on the instance; "
            "override forward in the class instead"
        )
    opaque: frozenset[type[nn.Module]] = frozenset()
    while True:
        tracer = _Tracer(module, opaque, arguments)
        try:
            return _trace_once(tracer, module, name)
        except PartitionError:
            raise
        except Exception as error:
            failed = tracer.failed
            if failed is None or failed is module or type(failed) in opaque:
                raise PartitionError(
                    f"{title(module, name)} cannot be cut: recording its forward failed with "
                    f"{type(error).__name__}: {error}. Give the class a method "
                    "`pipeline_blocks(self)` that returns the submodules whose application in turn "
                    "equals forward, each from one tensor to one tensor (for example `return "
                    "[self.stem, *self.layers, self.head]`), or move the statement that failed "
                    "into a submodule"
                ) from error
            opaque |= {type(failed)}


def _trace_once(tracer: _Tracer, module: nn.Module, name: str) -> Trace:
    with ExitStack() as stack:
        stack.enter_context(_TRACING)
        stack.enter_context(masks_as_calls(module, tracer))
        written = stack.enter_context(attributes_kept(module.modules()))
        with (
            mock.patch.object(torch.amp.autocast_mode.autocast, "__enter__", _refusing_autocast()),
            torch.enable_grad(),
            _RecordTensorCalls(tracer),
        ):
            graph = tracer.trace(module)
            leaves, spec = _flatten(tracer, module, name)
    for owner in written:
        tracer.failed = owner
        raise _OpaqueError(f"{type(owner).__name__}.forward writes attributes of the module")
    inputs = tuple(node for node in graph.nodes if node.op == "placeholder")
    devices = frozenset(t.device for t in (*module.parameters(), *module.buffers()))
    return Trace(graph, inputs, leaves, spec, devices)


def _flatten(
    tracer: _Tracer, module: nn.Module, name: str
) -> tuple[tuple[fx.Node, ...], pytree.TreeSpec]:
    def wrap(leaf: object) -> object:
        if isinstance(leaf, fx.Proxy):
            return leaf
        if isinstance(leaf, Tensor):
            return tracer.proxy(cast("fx.Node", tracer.create_arg(leaf)))
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            pytree.register_dataclass(type(leaf))
            return pytree.tree_map(wrap, leaf)
        if not isinstance(leaf, _CONSTANTS):
            raise PartitionError(
                f"{title(module, name)} returns a {type(leaf).__name__}, which cannot be sent "
                "between stages; return tensors in tuples, lists, dicts or dataclasses"
            )
        return Constant(leaf)

    leaves, spec = pytree.tree_flatten(pytree.tree_map(wrap, tracer.returned))
    return tuple(leaf.node for leaf in leaves), spec
