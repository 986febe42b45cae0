"""A step that puts another network in the place of one, found in its source before the training.

A trace can't see it: such steps do it now and then, as SMoG does every 300 batches. Only what the
source says is found; whatever else happens is noticed when it happens, by other calls than traced.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator

from torch import nn

from lightning_tspipe.errors import CaptureError

_LIBRARIES = ("lightning", "pytorch_lightning", "torch")


def refuse_rebinding(module: nn.Module, names: tuple[str, ...]) -> None:
    """Refuse a ``training_step`` that assigns to a pipelined network, itself or by its methods.

    Args:
        module: The LightningModule.
        names: The networks, dotted.

    Raises:
        CaptureError: It does; says where.
    """
    for method, tree in _methods(module):
        stored = (n for n in ast.walk(tree) if isinstance(getattr(n, "ctx", None), ast.Store))
        for target in filter(None, map(_path, stored)):
            whole = next((name for name in names if f"{name}.".startswith(f"{target}.")), None)
            if whole is not None:
                raise CaptureError(
                    f"{type(module).__name__}.{method} puts another module in the place of "
                    f"self.{target}, and training_step calls it. The pipelined {whole!r} was cut "
                    "into stages, which others hold. Copy values instead, in a hook that all "
                    f"ranks run, such as on_train_batch_start: self.{target}.load_state_dict(...)"
                )


def _methods(module: nn.Module) -> Iterator[tuple[str, ast.AST]]:
    """``training_step`` and the methods of ``self`` that it calls, directly or not."""
    todo, seen = ["training_step"], {"training_step"}
    while todo:
        name = todo.pop()
        tree = _source(getattr(type(module), name, None))
        if tree is None:
            continue
        yield name, tree
        calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
        called = {found for call in calls if (found := _path(call))} - seen
        seen |= called
        todo += sorted(called)


def _source(function: object) -> ast.AST | None:
    if not inspect.isfunction(function) or function.__module__.split(".")[0] in _LIBRARIES:
        return None
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # typed in, or made by something
        return None


def _path(node: ast.AST) -> str:
    """``a.b`` of ``self.a.b``; empty for anything else."""
    found = re.fullmatch(r"self\.([\w.]+)", ast.unparse(node))
    return found[1] if found else ""
