"""A step that puts another network in the place of one, found in its code before the training.

A trace can't see it: such steps do it now and then, as SMoG does every 300 batches. Only what the
code says is found; whatever else happens is noticed when it happens, by other calls than traced.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType

from torch import nn

from lightning_tspipe.errors import CaptureError
from lightning_tspipe.networks.modules import LIBRARIES


def refuse_rebinding(module: nn.Module, names: tuple[str, ...]) -> None:
    """Refuse a ``training_step`` that assigns to a pipelined network, itself or by its methods.

    Args:
        module: The LightningModule.
        names: The networks, dotted.

    Raises:
        CaptureError: It does; says where.
    """
    for method, stored in _methods(module):
        for target in sorted(stored):
            whole = next((name for name in names if f"{name}.".startswith(f"{target}.")), None)
            if whole is not None:
                raise CaptureError(
                    f"{type(module).__name__}.{method} puts another module in the place of "
                    f"self.{target}, and training_step calls it. The pipelined {whole!r} was cut "
                    "into stages, which others hold. Copy values instead, in a hook that all "
                    f"ranks run, such as on_train_batch_start: self.{target}.load_state_dict(...)"
                )


def _methods(module: nn.Module) -> Iterator[tuple[str, set[str]]]:
    """``training_step`` and the methods of ``self`` that it uses: to what of self each assigns."""
    todo, seen = ["training_step"], {"training_step"}
    while todo:
        name = todo.pop()
        function = inspect.unwrap(getattr(type(module), name, None))  # type: ignore[arg-type]
        if not inspect.isfunction(function) or function.__module__.split(".")[0] in LIBRARIES:
            continue
        read, stored = _attributes(function.__code__)
        yield name, stored
        todo += sorted(read - seen)
        seen |= read


def _attributes(code: CodeType) -> tuple[set[str], set[str]]:
    """Attributes ``a.b`` of a function's first argument that are read, and that are assigned to.

    By its bytecode: the file with its source may have been edited since it was read.
    """
    read, stored = set(), set()
    path: list[str] | None = None
    me = {"self", *code.co_varnames[:1]} if code.co_argcount else {"self"}
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        loaded = value[-1] if isinstance(value, tuple) and value else value  # two in one, from 3.13
        if name.startswith(("LOAD_FAST", "LOAD_DEREF")) or name.endswith("_LOAD_FAST"):
            path = [] if loaded in me else None
        elif path is not None and name in {"LOAD_ATTR", "LOAD_METHOD"}:
            path.append(value)
            read.add(".".join(path))
        elif path is not None and name == "STORE_ATTR":
            stored.add(".".join([*path, value]))
            path = None
        elif name not in {"CACHE", "EXTENDED_ARG"}:
            path = None
    for inner in (const for const in code.co_consts if isinstance(const, CodeType)):
        more_read, more_stored = _attributes(inner)
        read, stored = read | more_read, stored | more_stored
    return read, stored
