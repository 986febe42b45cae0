"""Writes a range of a trace as one Python function, by ``torch.fx``.

Parameters, buffers and submodules are read from the traced module at every run; what nobody reads
any more is let go of.
"""

from __future__ import annotations

import itertools
import linecache
import operator
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

Tensors = tuple[Tensor, ...]
RangeFunction = Callable[[Tensors], tuple[Tensors, Tensors]]

_COUNTER = itertools.count()
_SWITCH = torch._C._set_grad_enabled  # noqa: SLF001 - the function, not the context manager


def write_function(  # noqa: PLR0913 - what a range is
    root: nn.Module,
    nodes: Iterable[fx.Node],
    *,
    received: Sequence[fx.Node],
    passed: Sequence[fx.Node],
    emitted: Sequence[fx.Node],
    devices: frozenset[torch.device],
) -> RangeFunction:
    """Write and compile the function that makes some calls of a trace.

    If it fails, gradients may stay switched off: where the trace is under ``no_grad``.

    Args:
        root: The traced module; parameters, buffers and submodules are its own.
        nodes: The calls, in order.
        received: Whose values the function is given.
        passed: Whose values it returns first.
        emitted: Whose values it returns second.
        devices: Where the network was when it was traced: in the calls, these stand for the device
            of what the function is given.
    """
    graph = fx.Graph()
    values = graph.placeholder("received")
    made = {
        node: graph.call_function(operator.getitem, (values, place))
        for place, node in enumerate(received)
    }
    device = graph.call_function(getattr, (made[received[0]], "device")) if devices else None

    def value(node: fx.Node) -> fx.Node:
        return graph.get_attr(str(node.target)) if node.op == "get_attr" else made[node]

    def untied(node: fx.Node) -> fx.Node:
        # What goes through untouched must not be the stage's own input, a leaf of its graph.
        own = value(node)
        return graph.call_method("view_as", (own, own)) if node in received else own

    def here(leaf: Any) -> Any:
        return device if isinstance(leaf, torch.device) and leaf in devices else leaf

    outside = graph.call_function(torch.is_grad_enabled)
    is_off = False
    for node in nodes:
        if node.meta["no_grad"] != is_off:
            is_off = not is_off
            graph.call_function(_SWITCH, (False if is_off else outside,))
        made[node] = copy = graph.node_copy(node, value)
        copy.args, copy.kwargs = map_aggregate(copy.args, here), map_aggregate(copy.kwargs, here)
    if is_off:
        graph.call_function(_SWITCH, (outside,))
    graph.output((tuple(map(untied, passed)), tuple(map(value, emitted))))
    code = graph.python_code("self")
    name = f"<atoms {next(_COUNTER)} of {type(root).__name__}>"
    # Where tracebacks look for source lines.
    linecache.cache[name] = (len(code.src), None, code.src.splitlines(keepends=True), name)
    exec(compile(code.src, name, "exec"), code.globals)  # noqa: S102 - nothing else is in it
    return MethodType(code.globals["forward"], root)
