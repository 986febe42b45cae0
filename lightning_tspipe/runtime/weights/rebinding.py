"""Modules that are put in the place of networks, as SMoG makes a new teacher of its student.

Stages hold the networks that were cut, and hooks of callbacks are theirs. So a network stays where
it is, and takes what the other one holds; from then on, that one is the network by another name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from lightning_tspipe.errors import CaptureError
from lightning_tspipe.networks.location import current_line

_SETTINGS = (int, float, complex, str, bytes, tuple, type(None))
_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}


def keep_networks(
    module: nn.Module, trained: Iterable[str], forward_only: Iterable[str]
) -> RemovableHandle:
    """From now on, networks stay when others are assigned to their names, and take their values.

    Args:
        module: The module that has them.
        trained: Dotted names of those that nothing may replace, since optimizers hold their
            parameters.
        forward_only: Of those that another one of the same structure may.

    Returns:
        What ends it.
    """
    places: dict[tuple[nn.Module, str], tuple[str, nn.Module, bool]] = {}
    for names, is_trained in ((forward_only, False), (trained, True)):  # which is also said of both
        for name in names:
            holder, path = module, ""
            for key in name.split("."):
                path, kept = f"{path}.{key}".lstrip("."), holder.get_submodule(key)
                places[holder, key] = path, kept, is_trained
                holder = kept

    def assigned(holder: nn.Module, key: str, made: nn.Module | None) -> nn.Module | None:
        name, kept, is_trained = places.get((holder, key), ("", made, False))
        if made is None or kept is None or made is kept:
            return None
        if is_trained or _structure(kept) != _structure(made):
            why = (
                "Optimizers hold the parameters of the one that is trained"
                if is_trained
                else "It was cut into stages, and the other one has other parts or settings"
            )
            raise CaptureError(
                f"another module is put in the place of the network {name!r}, at {current_line()}. "
                f"{why}. Copy values instead, as in {name}.load_state_dict(...)"
            )
        _take(name, kept, made)
        return kept

    return register_module_module_registration_hook(assigned)  # type: ignore[arg-type]


def _structure(module: nn.Module) -> list[Any]:
    """How a module is built: its parts, their settings, and the shapes of what they hold."""
    return [
        (path, type(part), settings, [(key, None if t is None else t.shape) for key, t in held])
        for path, part in module.named_modules()
        for held in [[*part._parameters.items(), *part._buffers.items()]]  # noqa: SLF001 - all of them
        for settings in [{k: v for k, v in vars(part).items() if _is_setting(k, v)}]
    ]


def _is_setting(name: str, value: Any) -> bool:
    return isinstance(value, _SETTINGS) and name not in _OF_EVERY_MODULE


def _take(name: str, kept: nn.Module, made: nn.Module) -> None:
    """A network takes the values of another one, which becomes the same."""
    for own, other in zip(kept.modules(), list(made.modules()), strict=True):
        for key in (*own._parameters, *own._buffers):  # noqa: SLF001 - as above
            old, new = getattr(own, key), getattr(other, key)
            if old is None:
                continue
            if new.is_meta and not old.is_meta:
                raise CaptureError(
                    f"the network {name!r} gets a module in its place, at {current_line()}, whose "
                    f"values of {key!r} are on another rank. Averages lie where their originals "
                    "do if the step says so when it begins: let its first batch update them, too"
                )
            with torch.no_grad():
                old.copy_(new)
        object.__setattr__(other, "__dict__", vars(own))
