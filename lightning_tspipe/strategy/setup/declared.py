"""The submodules that are to be pipelined, as declared or by their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_tspipe.capture.rebinding import refuse_rebinding
from lightning_tspipe.capture.trace import Networks
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.strategy.setup.fanout import fanout_networks, fanout_of
from lightning_tspipe.strategy.setup.options import SetupOptions
from lightning_tspipe.strategy.setup.refusals import refuse_compiled


def find_networks(module: nn.Module, options: SetupOptions) -> Networks:
    """The pipelined submodules: as declared, else the attributes ``student`` and ``teacher``.

    A teacher may also be named by a callback that averages into it.

    Raises:
        ConfigurationError: Not found, or found twice.
    """
    if options.student is None and fanout_of(module) is not None:
        return fanout_networks(module, options)
    student = _names(module, options.student, "student")
    teacher = _names(module, options.teacher, "teacher") or _averages(module, options, student)
    if not student:
        children = ", ".join(name for name, _ in module.named_children()) or "none"
        raise ConfigurationError(
            f"{type(module).__name__} has no submodule `student`. Name the trained submodules in "
            "the order in which training_step calls them: TSPipeStrategy(student=[...], "
            f"teacher=[...]) (its submodules: {children})"
        )
    refuse_compiled(module, (*student, *teacher))
    refuse_rebinding(module, (*student, *teacher))
    seen: dict[int, str] = {}
    for name in (*student, *teacher):
        for path, child in module.get_submodule(name).named_modules():
            full = f"{name}.{path}".rstrip(".")
            other = seen.setdefault(id(child), full)
            if other != full:
                raise ConfigurationError(
                    f"{full!r} and {other!r} are the same submodule: student and teacher, and "
                    "their parts, must be modules of their own (copy.deepcopy makes one)"
                )
            if full in {*student, *teacher} and full != name:
                raise ConfigurationError(
                    f"{full!r} is declared and lies inside {name!r}, which is declared too: "
                    "declare the whole or its parts, not both"
                )
    averages = {name: options.averages[name] for name in teacher if name in options.averages}
    return Networks(student, teacher, averages=averages)


def _averages(module: nn.Module, options: SetupOptions, student: Sequence[str]) -> tuple[str, ...]:
    """Teachers that callbacks average parts of the student into; used if none is declared."""
    known = {name for name, _ in module.named_modules()}
    inside = tuple(f"{name}." for name in student)
    return tuple(
        copy
        for copy, original in options.averages.items()
        if copy in known and f"{original}.".startswith(inside)
    )


def _names(
    module: nn.Module, declared: str | Sequence[str] | None, default: str
) -> tuple[str, ...]:
    if declared is None:
        return (default,) if isinstance(getattr(module, default, None), nn.Module) else ()
    names = (declared,) if isinstance(declared, str) else tuple(declared)
    for name in names:
        try:
            module.get_submodule(name)
        except AttributeError:
            children = ", ".join(child for child, _ in module.named_children()) or "none"
            raise ConfigurationError(
                f"TSPipeStrategy({default}={declared!r}): {type(module).__name__} has no submodule "
                f"{name!r} (its submodules: {children})"
            ) from None
    if len(set(names)) < len(names):
        raise ConfigurationError(f"TSPipeStrategy({default}={declared!r}) names a submodule twice")
    return names


def relay_of(trainer: Any) -> Any:
    """The callback ``BlockwiseRelay``, if there is one."""
    callbacks = getattr(trainer, "callbacks", ())
    return next((c for c in callbacks if type(c).__name__ == "BlockwiseRelay"), None)
