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
# The first ones also keep the first dimension of their argument.
_FRESH_KEEPING_CALLS = names_in("""
    adaptive_avg_pool2d add avg_pool2d batch_norm clone conv1d conv2d conv3d elu gelu group_norm
    layer_norm leaky_relu linear max_pool2d mul normalize relu relu6 sigmoid silu softmax tanh
""")
_FRESH_CALLS = _FRESH_KEEPING_CALLS | names_in("""
    bmm cat div einsum exp hardsigmoid hardswish log log_softmax matmul mean mm neg pow rsqrt rsub
    scaled_dot_product_attention softplus sqrt stack sub sum truediv where
""")
_KEEPING_CALLS = _FRESH_KEEPING_CALLS | names_in("contiguous dropout iadd imul relu_")
_FRESH_KEEPING_MODULES = names_in("""
    torch.nn.modules.activation torch.nn.modules.batchnorm torch.nn.modules.conv
    torch.nn.modules.instancenorm torch.nn.modules.normalization torch.nn.modules.pooling
    torch.nn.modules.upsampling
""")
_FRESH_MODULES = _FRESH_KEEPING_MODULES | names_in("torch.nn.modules.rnn torch.nn.modules.sparse")
_KEEPING_MODULES = _FRESH_KEEPING_MODULES | names_in(
    "torch.nn.modules.dropout torch.nn.modules.linear"
)
_PRODUCTS = names_in("baddbmm bmm einsum matmul scaled_dot_product_attention")
_NOT_WRITES = names_in("index inv invert is_ is_not")
_MAX_LIVE = 4
"""Tensors that a cut may pass on; with more, sending them costs more than a cut can gain."""


def ordered_calls(trace: Trace) -> list[fx.Node]:
    """The calls of a trace; those that don't depend on the input stand right before their use.

    So a bias that ``forward`` prepares at its top is not live through the whole network.
    Calls that draw random numbers stay in place.
    """
    _read_batch_size_in_place(trace.graph)
    nodes = [node for node in trace.graph.nodes if node.op.startswith("call_")]
    fixed = set(trace.inputs)
    for node in nodes:
        if _is_pinned(node) or fixed.intersection(node.all_input_nodes):
            fixed.add(node)
    placed: dict[fx.Node, None] = {}
    for node in (*(node for node in nodes if node in fixed), *trace.leaves):
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
    forbidden = {place for node in nodes for place in _before_write(node, position)}
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
            and index not in forbidden
            and not any(value in numbers or _is_sequence(value) for value in live)
        ):
            cuts.append((index, tuple(live)))
            has_product = False
    return cuts


def _read_batch_size_in_place(graph: fx.Graph) -> None:
    """Read the batch size where it is used, instead of where ``forward`` read it.

    ``b = x.size(0)`` at the top of a ``forward`` and ``x.view(b, -1)`` at its end would keep ``b``
    alive, and so forbid every cut between. Where the calls on the way are known to keep the first
    dimension, the ``view`` can ask its own argument.
    """
    batched: set[fx.Node] = set()  # tensors whose first dimension is the input's
    sizes: set[fx.Node] = set()  # numbers that are the input's batch size
    for node in list(graph.nodes):
        if node.op == "placeholder" or _keeps_batch(node, batched, sizes):
            batched.add(node)
        elif _is_batch_size(node, batched):
            sizes.add(node)
        own = [argument for argument in node.all_input_nodes if argument in batched]
        for size in sizes.intersection(node.all_input_nodes) if own else ():
            with graph.inserting_before(node):
                new = graph.call_method("size", (own[0], 0))
            new.meta = dict(node.meta)
            node.replace_input_with(size, new)
            if not size.users:
                graph.erase_node(size)


def _is_batch_size(node: fx.Node, batched: set[fx.Node]) -> bool:
    if node.op == "call_method" and node.target == "size":
        return node.args[0] in batched and _axis(node) == 0
    if node.target is not operator.getitem or node.args[1] != 0:
        return False
    shape: Any = node.args[0]
    is_shape = shape.target is getattr and shape.args[1] == "shape"
    is_size = shape.op == "call_method" and shape.target == "size" and _axis(shape) is None
    return (is_shape or is_size) and shape.args[0] in batched


def _axis(node: fx.Node) -> object:
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")


def _keeps_batch(node: fx.Node, batched: set[fx.Node], sizes: set[fx.Node]) -> bool:
    tensors = [argument for argument in node.all_input_nodes if argument.op != "get_attr"]
    tensors = [argument for argument in tensors if argument not in sizes]
    if not tensors or not batched.issuperset(tensors):
        return False
    if node.op == "call_module":
        module = node.meta["module"]
        if isinstance(module, nn.Flatten):
            return bool(module.start_dim > 0)
        return type(module).__module__ in _KEEPING_MODULES and not returns_tuple(module)
    name = target_name(node)
    second = node.args[1] if len(node.args) > 1 else None
    if name in ("view", "reshape"):
        return second in sizes
    if name == "flatten":
        return isinstance(second, int) and second > 0
    return name in _KEEPING_CALLS and len(tensors) == len(node.all_input_nodes)


def _is_product(node: fx.Node, root: nn.Module) -> bool:
    """Whether the call multiplies matrices: most of the work is there.

    By its name, or since it reads a parameter of two dimensions or more.
    """
    module = module_of(node)
    read = (read_attribute(root, a) for a in node.all_input_nodes if a.op == "get_attr")
    tensors = read if module is None else module.parameters()
    return target_name(node) in _PRODUCTS or any(tensor.dim() > 1 for tensor in tensors)


def read_attribute(root: nn.Module, node: fx.Node) -> Tensor:
    """The parameter or buffer that the node stands for."""
    return operator.attrgetter(str(node.target))(root)  # type: ignore[no-any-return]


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


def _before_write(node: fx.Node, position: dict[fx.Node, int]) -> range:
    """Positions at which a cut would pass on a tensor that ``node`` then writes."""
    written = written_argument(node)
    roots = memory_roots(written) if written is not None else ()
    owner = min((position.get(root, -1) for root in roots), default=position[node])
    return range(owner, position[node])


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
