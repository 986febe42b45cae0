"""What objects and dictionaries hold, replaced for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

_MISSING = object()


@contextmanager
def entries_replaced(entries: Sequence[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """While inside, dictionaries have other values under names that they have already.

    Args:
        entries: (dictionary, name, value); none twice.
    """
    originals = [table[name] for table, name, _ in entries]
    for table, name, value in entries:
        table[name] = value
    try:
        yield
    finally:
        for (table, name, _), original in zip(entries, originals, strict=True):
            table[name] = original


@contextmanager
def attributes_replaced(replacements: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """While inside, objects have other attributes, or tensors other gradients or data.

    Args:
        replacements: (object, name, value); none twice.
    """
    replacements = list(replacements)
    previous = [_own(owner, name) for owner, name, _ in replacements]
    for owner, name, value in replacements:
        _set(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(replacements, previous, strict=True):
            if original is _MISSING:
                object.__delattr__(owner, name)
            else:
                _set(owner, name, original)


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute; a module's own way takes longer than all else that happens meanwhile."""
    (setattr if isinstance(owner, type) else object.__setattr__)(owner, name, value)


def _own(owner: Any, name: str) -> Any:
    """What an object has itself under a name; ``_MISSING`` where it has its class's."""
    # ``vars`` of a tensor don't show its gradient or its data.
    return getattr(owner, name) if isinstance(owner, Tensor) else vars(owner).get(name, _MISSING)
