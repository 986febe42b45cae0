"""Reads the batch size where it is used, instead of where ``forward`` read it.

``b = x.size(0)`` at the top of a ``forward`` and ``x.view(b, -1)`` at its end would keep ``b``
alive, and so forbid every cut between. Where the calls on the way are known to keep the first
dimension, the ``view`` can ask its own argument.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn

from lightning_tspipe.networks.modules import names_in

_KEEPING_MODULES = names_in("""
    torch.nn.modules.activation torch.nn.modules.batchnorm torch.nn.modules.conv
    torch.nn.modules.dropout torch.nn.modules.instancenorm torch.nn.modules.linear
    torch.nn.modules.normalization torch.nn.modules.pooling torch.nn.modules.upsampling
""")
_KEEPING_CALLS = names_in("""
    adaptive_avg_pool2d add avg_pool2d batch_norm clone contiguous conv1d conv2d conv3d dropout elu
    gelu group_norm iadd imul layer_norm leaky_relu linear max_pool2d mul normalize relu relu6 relu_
    sigmoid silu softmax tanh
""")


def read_batch_size_in_place(graph: fx.Graph) -> None:
    """Change the graph accordingly."""
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
        return _module_keeps_batch(node.meta["module"])
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    second = node.args[1] if len(node.args) > 1 else None
    if name in ("view", "reshape"):
        return second in sizes
    if name == "flatten":
        return isinstance(second, int) and second > 0
    return name in _KEEPING_CALLS and len(tensors) == len(node.all_input_nodes)


def _module_keeps_batch(module: nn.Module) -> bool:
    if isinstance(module, nn.Flatten):
        return module.start_dim > 0
    return type(module).__module__ in _KEEPING_MODULES and not isinstance(
        module, nn.MultiheadAttention
    )
