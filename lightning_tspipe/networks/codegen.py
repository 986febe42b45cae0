"""Writes a part of a tape as one Python function.

Parameters and buffers are read from the network at every run; what nobody reads any more is let go
of.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from lightning_tspipe.networks.spans import Cut
from lightning_tspipe.networks.tape import Call, Context, Size, Value

Tensors = tuple[Tensor, ...]
RangeFunction = Callable[[Tensors], tuple[Tensors, Tensors]]

_COUNTER = itertools.count()
# Not what inherits from them: a named tuple has a constructor of its own.
_CONTAINERS = frozenset({tuple, list, dict})
_WRITTEN = frozenset({type(None), bool, int, str})


class Writer:
    """Writes one function.

    Args:
        root: The network that was recorded; parameters, buffers and submodules are its own.
        constants: Tensors from outside, by name.
        device: Where it was recorded: in the calls, it stands for that of what is received.
        quiet: Submodules whose hooks the step runs.
    """

    def __init__(
        self,
        root: nn.Module,
        constants: dict[str, Tensor],
        device: torch.device,
        quiet: Collection[nn.Module],
    ) -> None:
        self._root, self._device = root, device
        self._constants, self._quiet = constants, quiet
        self._globals: dict[str, Any] = {
            "switch": torch._C._set_grad_enabled,  # noqa: SLF001 - the function, no context
            "is_on": torch.is_grad_enabled, "picked": _picked,
            "checkpoint": partial(checkpoint, use_reentrant=False),
        }  # fmt: skip

    def write(
        self, begin: Cut, end: Cut, calls: Sequence[Call], emitted: Sequence[Value]
    ) -> RangeFunction:
        """Write and compile the function of some calls.

        If it fails, gradients may stay switched off: where the network switches them off.

        Args:
            begin: What the function is given.
            end: What it returns first.
            calls: What it runs, in order.
            emitted: What it returns second.
        """
        names = [value.name for value in begin.live]
        lines = [f"({''.join(f'{name}, ' for name in names)}) = received"]
        samples = begin.samples()
        if samples is not None:
            place, dimension, factor = samples
            lines.append(f"b = {names[place]}.shape[{dimension}] // {factor}")
        lines += [f"device = {names[0]}.device", "outside = is_on()"]
        last = self._last_uses(calls, (*end.live, *emitted))
        for region, numbered in itertools.groupby(enumerate(calls), lambda n: n[1].context.region):
            part = dict(numbered)
            body = self._body(part, last)
            lines += self._region(part, body, last) if region else body
        passed = [self._passed(value, begin) for value in end.live]
        given = [self._literal(value) for value in emitted]
        lines.append(f"return {_tuple(passed)}, {_tuple(given)}")
        source = "def run(received):\n" + "".join(f"    {line}\n" for line in lines)
        title = f"<atoms {next(_COUNTER)} of {type(self._root).__name__}>"
        # Where tracebacks look for source lines.
        linecache.cache[title] = (len(source), None, source.splitlines(keepends=True), title)
        exec(compile(source, title, "exec"), self._globals)  # noqa: S102 - nothing else is in it
        run: RangeFunction = self._globals["run"]
        return run

    def _body(self, calls: Mapping[int, Call], last: Mapping[str, int]) -> list[str]:
        """The lines of some calls, by their numbers."""
        lines, is_off = list[str](), False
        for number, call in calls.items():
            if call.context.no_grad != is_off:
                is_off = call.context.no_grad
                lines.append(f"switch({'False' if is_off else 'outside'})")
            lines.append(self._line(call))
            lines += self._let_go(call, number, last)
        return [*lines, "switch(outside)"] if is_off else lines

    def _region(
        self, calls: Mapping[int, Call], body: Sequence[str], last: Mapping[str, int]
    ) -> list[str]:
        """The same for a checkpointed region, as a function that runs again in the backward."""
        end, given, made = max(calls), dict[str, None](), dict[str, None]()
        for call in calls.values():
            given |= dict.fromkeys(name for name in self._names(call.values) if name not in made)
            made |= dict.fromkeys(self._names(call.made))
        passed = _tuple(name for name in made if last[name] > end)
        over = [name for name in given if last[name] <= end]
        return [
            f"def region({', '.join(given)}):", *(f"    {line}" for line in body),
            f"    return {passed}", f"{passed} = checkpoint({', '.join(['region', *given])})",
            *([f"{' = '.join(over)} = None"] if over else []),
        ]  # fmt: skip

    def _names(self, values: Iterable[Value]) -> list[str]:
        return [v.name for v in values if not v.state and v.name not in self._constants]

    def _let_go(self, call: Call, number: int, last: Mapping[str, int]) -> list[str]:
        names = dict.fromkeys(self._names((*call.values, *call.made)))
        over = [name for name in names if last[name] == number]
        return [f"{' = '.join(over)} = None"] if over else []

    def _passed(self, value: Value, begin: Cut) -> str:
        name = self._literal(value)
        # What goes through untouched must not be the stage's own input, a leaf of its graph.
        return f"{name}.view_as({name})" if value in begin.live else name

    def _last_uses(self, calls: Sequence[Call], kept: Iterable[Value]) -> dict[str, int]:
        """For each name, the number of the last call that reads it; all are before what is kept."""
        last: dict[str, int] = {}
        for number, call in enumerate(calls):
            last |= dict.fromkeys(self._names((*call.values, *call.made)), number)
        return last | dict.fromkeys(self._names(kept), len(calls))

    def _line(self, call: Call) -> str:
        function = self._global(call.function)
        if isinstance(call.function, nn.Module) and call.function in self._quiet:
            function += ".forward"
        words = [*map(self._literal, call.args)]
        words += [f"{name}={self._literal(value)}" for name, value in call.kwargs.items()]
        if call.context.autocast is not None or call.context.kernels is not None:
            words.insert(0, function)
            function = self._global(partial(_run_within, call.context))
        text = f"{function}({', '.join(words)})"
        new = [value.name for value in call.made if not value.state]
        if not new:
            return text
        if call.structure.is_leaf():
            return f"{new[0]} = {text}"
        names = ["_" if value.state else value.name for value in call.made]
        places = [place for place, leaf in enumerate(call.leaves) if isinstance(leaf, Value)]
        return f"({', '.join(names)}, ) = picked({text}, {places})"

    def _state(self, dotted: str) -> str:
        """A parameter or buffer, read from the table of its module: others may lie there now."""
        path, _, name = dotted.rpartition(".")
        owner = self._root.get_submodule(path)
        tables = (owner._parameters, owner._buffers)  # noqa: SLF001 - there is no public way
        table = next(table for table in tables if name in table)
        return f"{self._global(table)}[{name!r}]"

    def _literal(self, value: Any) -> str:
        match value:
            case Value():
                text = self._tensor(value)
            case Size():
                text = f"({value.code})"
            case slice():
                text = f"slice{_tuple(map(self._literal, (value.start, value.stop, value.step)))}"
            case tuple() | list() | dict() if type(value) in _CONTAINERS:
                text = self._container(value)
            case torch.device() if value == self._device:
                text = "device"
            case None | bool() | int() | str() if type(value) in _WRITTEN:
                text = repr(value)
            case _:
                text = self._other(value)
        return text

    def _tensor(self, value: Value) -> str:
        if value.state:
            return self._state(value.state)
        if value.name in self._constants:
            return f"{self._global(self._constants[value.name])}.to(device)"
        return value.name

    def _container(self, value: Any) -> str:
        if type(value) is dict:
            return "{" + ", ".join(f"{k!r}: {self._literal(v)}" for k, v in value.items()) + "}"
        text = _tuple(map(self._literal, value))
        return text if type(value) is tuple else f"list({text})"

    def _other(self, value: Any) -> str:
        """A constant, or another container, such as a named tuple."""
        leaves, structure = pytree.tree_flatten(value)
        if structure.is_leaf():
            return self._global(value)
        made = self._global(pytree.tree_unflatten)
        return f"{made}({_tuple(map(self._literal, leaves))}, {self._global(structure)})"

    def _global(self, value: Any) -> str:
        name = f"g{len(self._globals)}"
        self._globals[name] = value
        return name


def _run_within(
    context: Context, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run a function within what held around a recorded call."""
    with ExitStack() as stack:
        if context.autocast is not None:
            kind, is_on, dtype = context.autocast
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_on))
        if context.kernels is not None:
            stack.enter_context(sdpa_kernel(list(context.kernels)))
        return function(*args, **kwargs)


def _picked(result: Any, places: Sequence[int]) -> list[Tensor]:
    """Some leaves of a result, of which others may be tensors now and None then."""
    leaves = pytree.tree_leaves(result)
    return [leaves[place] for place in places]


def _tuple(texts: Iterable[str]) -> str:
    return f"({''.join(f'{text}, ' for text in texts)})"
