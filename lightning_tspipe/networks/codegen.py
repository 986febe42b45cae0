"""Writes a range of a trace as one Python function.

In the manner of ``torch.fx``::

    def run(received):
        v0, = received
        v1 = f0(v0); v0 = None           # a submodule, the original object
        v2 = f1(v1, o1.class_token)      # a parameter, read from its owner at every run
        return (v2,), (v1,)              # what the next atom gets, what the network returns
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

Tensors = tuple[Tensor, ...]
RangeFunction = Callable[[Tensors], tuple[Tensors, Tensors]]

_COUNTER = itertools.count()


@dataclass(frozen=True, slots=True)
class Calls:
    """A range of a trace.

    Attributes:
        nodes: The calls, in order.
        received: Whose values the function is given.
        passed: Whose values it returns first.
        emitted: Whose values it returns second.
    """

    nodes: Sequence[fx.Node]
    received: Sequence[fx.Node]
    passed: Sequence[fx.Node]
    emitted: Sequence[fx.Node]


def write_function(
    root: nn.Module, calls: Calls, devices: frozenset[torch.device]
) -> RangeFunction:
    """Write and compile the function that makes these calls.

    Args:
        root: The traced module; parameters, buffers and submodules are its own.
        calls: What the function does.
        devices: Where the network was when it was traced: in the calls, these stand for the device
            of what the function is given.
    """
    writer = _Writer(root, calls.received, devices)
    kept = {*calls.passed, *calls.emitted}
    last_use = {argument: node for node in calls.nodes for argument in node.all_input_nodes}
    for node in calls.nodes:
        unused = [a for a in [*node.all_input_nodes, node] if last_use.get(a, node) is node]
        writer.call(node, [a for a in unused if a not in kept and a.op != "get_attr"])
    writer.result(calls.passed, calls.emitted)
    return writer.compile()


class _Writer:
    """Source lines and the objects that they mention."""

    def __init__(
        self, root: nn.Module, received: Sequence[fx.Node], devices: frozenset[torch.device]
    ) -> None:
        self._root = root
        self._devices = devices
        self._received = frozenset(received)
        self._variables = {node: f"v{place}" for place, node in enumerate(received)}
        self._globals: dict[str, Any] = {"no_grad": torch.no_grad}
        targets = "".join(f"{variable}, " for variable in self._variables.values())
        self._lines = ["def run(received):", f"    {targets}= received"]
        if devices:
            self._lines.append("    device = v0.device")
        self._in_no_grad = False

    def call(self, node: fx.Node, unused: Sequence[fx.Node]) -> None:
        """Add one call, and let go of the variables that nobody reads after it."""
        arguments = [self._expression(a) for a in node.args]
        arguments += [f"{key}={self._expression(value)}" for key, value in node.kwargs.items()]
        if node.op == "call_method":
            callee = f"{arguments.pop(0)}.{node.target}"
        else:
            callee = self._object(node.meta["module"] if node.op == "call_module" else node.target)
        name = self._variables[node] = f"v{len(self._variables)}"
        line = f"{name} = {callee}({', '.join(arguments)})"
        if unused:
            line += "; " + " = ".join(self._variables[n] for n in unused) + " = None"
        if node.meta["no_grad"] and not self._in_no_grad:
            self._lines.append("    with no_grad():")
        self._in_no_grad = node.meta["no_grad"]
        self._lines.append(("        " if self._in_no_grad else "    ") + line)

    def result(self, passed: Sequence[fx.Node], emitted: Sequence[fx.Node]) -> None:
        """Add the return statement."""
        values = "".join(f"{self._passed(node)}, " for node in passed)
        outputs = "".join(f"{self._expression(node)}, " for node in emitted)
        self._lines.append(f"    return ({values}), ({outputs})")

    def _passed(self, node: fx.Node) -> str:
        # What goes through untouched must not be the stage's own input, a leaf of its graph.
        variable = self._expression(node)
        return f"{variable}.view_as({variable})" if node in self._received else variable

    def compile(self) -> RangeFunction:
        """The function."""
        source = "\n".join(self._lines)
        name = f"<atoms {next(_COUNTER)} of {type(self._root).__name__}>"
        # Where tracebacks look for source lines.
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), self._globals)  # noqa: S102 - nothing else is in it
        return self._globals["run"]  # type: ignore[no-any-return]

    def _object(self, value: object) -> str:
        name = f"g{len(self._globals)}"
        self._globals[name] = value
        return name

    def _expression(self, value: object) -> str:
        if isinstance(value, fx.Node):
            return self._attribute(value) if value.op == "get_attr" else self._variables[value]
        if isinstance(value, list | tuple | dict | slice):
            return self._container(value)
        if isinstance(value, torch.device) and value in self._devices:
            return "device"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        return self._object(value)

    def _container(self, value: list[Any] | tuple[Any, ...] | dict[Any, Any] | slice) -> str:
        if isinstance(value, dict):
            items = (f"{key!r}: {self._expression(item)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
        if isinstance(value, slice):
            bounds = (value.start, value.stop, value.step)
            return f"slice({', '.join(map(self._expression, bounds))})"
        inner = "".join(f"{self._expression(item)}, " for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"

    def _attribute(self, node: fx.Node) -> str:
        owner, _, name = str(node.target).rpartition(".")
        return f"{self._object(self._root.get_submodule(owner))}.{name}"
