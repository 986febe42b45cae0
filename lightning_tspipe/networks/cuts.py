"""Where a trace can be cut: what is live there is passed on.

::

    conv1 ─ bn1 ─┬─ conv2 ─ bn2 ─ relu ─ conv3 ─ bn3 ─ add ─ relu_ ─ fc
      ^     ^    └──────────────────── ^ ───────────────┘       ^
      1     1                          2 live                   1       tensors that a cut passes on

A value is *live* after a call if a later call reads it. Parameters and buffers are read where they
are used, so they are never live; numbers that come from shapes are, and cannot be sent. Where one
tensor is live, any call may be the last of an atom. Where several are (inside a residual block),
only cuts that can balance something are made: between two products, which are calls that read a
weight matrix, and attention. No cut is made where a later call writes what would be passed on, as
``relu_`` does.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from lightning_tspipe.networks.modules import names_in, returns_tuple
from lightning_tspipe.networks.tracing import Trace

_NUMBER_METHODS = names_in("dim element_size get_device ndimension nelement numel size stride")
_NUMBER_ATTRIBUTES = names_in("device dtype is_cuda itemsize layout ndim requires_grad shape")
_ARITHMETIC = frozenset({operator.add.__module__, "operator", "math", "builtins"})
_RANDOM = ("bernoulli", "dropout", "multinomial", "normal", "poisson", "rand", "uniform")
# Calls whose result shares no memory with their arguments; what is missing here may be a view.
_FRESH_CALLS = names_in("""
    adaptive_avg_pool2d add avg_pool2d batch_norm bmm cat clone conv1d conv2d conv3d div elu einsum
    exp gelu group_norm hardsigmoid hardswish layer_norm leaky_relu linear log log_softmax matmul
    max_pool2d mean mm mul neg normalize pow relu relu6 rsqrt rsub scaled_dot_product_attention
    sigmoid silu softmax softplus sqrt stack sub sum tanh truediv where
""")
_FRESH_MODULES = names_in("""
    torch.nn.modules.activation torch.nn.modules.batchnorm torch.nn.modules.conv
    torch.nn.modules.instancenorm torch.nn.modules.normalization torch.nn.modules.pooling
    torch.nn.modules.rnn torch.nn.modules.sparse torch.nn.modules.upsampling
""")
_PRODUCTS = names_in("baddbmm bmm einsum matmul scaled_dot_product_attention")
_NOT_WRITES = names_in("index inv invert is_ is_not")
_MAX_LIVE = 4
"""Tensors that a cut may pass on; with more, sending them costs more than a cut can gain."""


def sink_constants(trace: Trace) -> list[fx.Node]:
    """Order the calls such that those that don't depend on the input stand right before their use.

    So a bias that ``forward`` prepares at its top is not live through the whole network.
    Calls that draw random numbers stay in place.
    """
    fixed = set(trace.inputs)
    for node in trace.nodes:
        if _is_pinned(node) or fixed.intersection(node.all_input_nodes):
            fixed.add(node)
    placed: dict[fx.Node, None] = {}
    for node in (*(node for node in trace.nodes if node in fixed), *trace.leaves):
        _place(node, placed)
    return list(placed)


def _place(node: fx.Node, placed: dict[fx.Node, None]) -> None:
    if node not in placed and node.op.startswith("call_"):
        for argument in node.all_input_nodes:
            _place(argument, placed)
        placed[node] = None


def _is_pinned(node: fx.Node) -> bool:
    name = target_name(node)
    return (
        node.op == "call_module"
        or not node.users
        or any(word in name for word in _RANDOM)
        or written_argument(node) is not None
    )


def find_cuts(
    trace: Trace, nodes: Sequence[fx.Node], root: nn.Module
) -> list[tuple[int, tuple[fx.Node, ...]]]:
    """Positions in ``nodes`` after which the trace may be cut, each with what is live there."""
    position = {node: index for index, node in enumerate(nodes)}
    numbers = number_nodes(nodes)
    forbidden = [
        span for node in nodes for span in _write_spans(node, position) if span[0] < span[1]
    ]
    live = {node: _last_use(node, position) for node in trace.inputs}
    cuts = []
    moving = set(trace.inputs)  # what depends on the input; the rest is made again where it is read
    has_product = False  # since the last cut
    for index, node in enumerate(nodes[:-1]):
        live[node] = _last_use(node, position)
        live = {value: last for value, last in live.items() if last > index}
        if not moving.isdisjoint(node.all_input_nodes):
            moving.add(node)
        has_product = has_product or _is_product(node, root)
        is_useful = len(live) == 1 or (has_product and _is_product(nodes[index + 1], root))
        if (
            is_useful
            and 1 <= len(live) <= _MAX_LIVE
            and moving.issuperset(live)
            and (node in live or node in trace.leaves)
            and not any(start <= index < stop for start, stop in forbidden)
            and not any(value in numbers or _is_sequence(value) for value in live)
        ):
            cuts.append((index, tuple(live)))
            has_product = False
    return cuts


def _is_product(node: fx.Node, root: nn.Module) -> bool:
    """Whether the call multiplies matrices: most of the work is there."""
    return target_name(node) in _PRODUCTS or _reads_matrix(node, root)


def _reads_matrix(node: fx.Node, root: nn.Module) -> bool:
    """Whether the call reads a parameter of two dimensions or more."""
    module = module_of(node)
    if module is not None:
        return any(parameter.dim() > 1 for parameter in module.parameters())
    return any(
        argument.op == "get_attr" and read_attribute(root, argument).dim() > 1
        for argument in node.all_input_nodes
    )


def read_attribute(root: nn.Module, node: fx.Node) -> Tensor:
    """The parameter or buffer that the node stands for."""
    owner, _, name = str(node.target).rpartition(".")
    return getattr(root.get_submodule(owner), name)  # type: ignore[no-any-return]


def _last_use(node: fx.Node, position: dict[fx.Node, int]) -> int:
    return max((position[user] for user in node.users if user in position), default=-1)


def target_name(node: fx.Node) -> str:
    """Name of what the node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "call")


def number_nodes(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes whose values are numbers (or tuples of them) that come from shapes."""
    numbers: set[fx.Node] = set()
    for node in nodes:
        if node.op == "call_method":
            is_number = node.target in _NUMBER_METHODS
        elif node.op == "call_function" and node.target is getattr:
            is_number = node.args[1] in _NUMBER_ATTRIBUTES
        else:
            arguments = node.all_input_nodes
            is_number = (
                node.op == "call_function"
                and getattr(node.target, "__module__", "") in _ARITHMETIC
                and bool(arguments)
                and numbers.issuperset(arguments)
            )
        if is_number:
            numbers.add(node)
    return numbers


def _is_sequence(node: fx.Node) -> bool:
    """Whether the value may be a tuple: someone takes an element of it by its number."""
    return returns_tuple(module_of(node)) or any(
        user.target is operator.getitem and isinstance(user.args[1], int) for user in node.users
    )


def module_of(node: fx.Node) -> nn.Module | None:
    """The submodule that the node calls, if it calls one."""
    if node.op != "call_module":
        return None
    return node.meta["module"]  # type: ignore[no-any-return]


def written_argument(node: fx.Node) -> fx.Node | None:
    """The argument that the call changes in place, or None."""
    out = node.kwargs.get("out")
    if isinstance(out, fx.Node):
        return out
    if not _is_in_place(node):
        return None
    first = node.args[0] if node.args else node.kwargs.get("input")
    return first if isinstance(first, fx.Node) else None


def _is_in_place(node: fx.Node) -> bool:
    module = module_of(node)
    if module is not None:
        return bool(getattr(module, "inplace", False))
    name = target_name(node)
    if name.endswith("_") and not name.endswith("__"):
        return True
    if getattr(node.target, "__module__", "") == operator.add.__module__:
        return name.startswith("i") and hasattr(operator, f"__{name}__") and name not in _NOT_WRITES
    return bool(_argument(node, "inplace"))


def _argument(node: fx.Node, name: str) -> Any:
    if name in node.kwargs or not callable(node.target):
        return node.kwargs.get(name)
    try:
        bound = inspect.signature(node.target).bind_partial(*node.args, **node.kwargs)
    except (TypeError, ValueError):  # builtins have no signature, and no such argument either
        return None
    return bound.arguments.get(name)


def _write_spans(node: fx.Node, position: dict[fx.Node, int]) -> list[tuple[int, int]]:
    """Spans of positions at which a cut would pass on a tensor that ``node`` then writes."""
    written = written_argument(node)
    if written is None:
        return []
    owner = min((position.get(root, -1) for root in memory_roots(written)), default=math.inf)
    return [(int(owner), position[node])] if owner < math.inf else []


def memory_roots(node: fx.Node) -> set[fx.Node]:
    """The nodes that may have allocated the memory of this node's value."""
    roots, pending, seen = set(), [node], {node}
    while pending:
        current = pending.pop()
        if current.op == "get_attr":
            continue  # parameters and buffers are not passed on
        if current.op == "placeholder" or _is_fresh(current):
            roots.add(current)
            continue
        before = set(current.all_input_nodes) - seen
        seen |= before
        pending += before
    return roots


def _is_fresh(node: fx.Node) -> bool:
    if written_argument(node) is not None:
        return False
    module = module_of(node)
    return target_name(node) in _FRESH_CALLS if module is None else allocates(module)


def allocates(module: nn.Module) -> bool:
    """Whether a module's result is known to share no memory with its input."""
    if getattr(module, "inplace", False):
        return False
    return type(module) is nn.Linear or type(module).__module__ in _FRESH_MODULES
