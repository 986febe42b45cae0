"""Dataclasses as plain values for JSON, and back by the types of their fields."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import repeat
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, Union, cast, get_args, get_origin, get_type_hints

from lightning_tspipe.errors import ConfigurationError

_types: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def to_plain(value: Any) -> Any:  # noqa: ANN401 - whatever fields and options hold
    """A value as JSON has it; what JSON has not becomes its ``repr``.

    >>> to_plain((frozenset({2, 1}), math.inf))
    [[1, 2], None]
    """
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(part) for key, part in value.items()}
    if isinstance(value, set | frozenset | list | tuple):
        parts: Iterable[Any] = sorted(value) if isinstance(value, set | frozenset) else value
        return [to_plain(part) for part in parts]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and math.isinf(value):
        return None
    return value if isinstance(value, str | int | float | None) else repr(value)


def from_plain(kind: Any, data: Any) -> Any:  # noqa: ANN401, PLR0911 - one for each kind
    """The value of a type that :func:`to_plain` turned into ``data``, also by way of JSON.

    Raises:
        KeyError: A field that the type does not have.
        TypeError: A field is missing, or holds something of another kind.
        ValueError: The same.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        make, types = cast("type[Any]", kind), _types(kind)
        return make(**{name: from_plain(types[name], part) for name, part in dict(data).items()})
    if origin in {Union, UnionType}:  # of one type and None
        (wanted,) = (one for one in arguments if one is not NoneType)
        return None if data is None else from_plain(wanted, data)
    if origin is tuple:
        kinds = repeat(arguments[0]) if arguments[-1] is Ellipsis else arguments
        return tuple(map(from_plain, kinds, data))
    if origin is frozenset:
        return frozenset(data)
    if origin is Mapping:
        return {arguments[0](key): part for key, part in data.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(data)
    return math.inf if kind is float and data is None else data


class Saved:
    """A dataclass that is saved as JSON, and read again by the types of its fields."""

    _origin: ClassVar[tuple[str, str]]
    """What it is, and what writes it, for the error."""

    def to_json(self) -> str:
        """Everything, as JSON that :meth:`from_json` reads."""
        return json.dumps(to_plain(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote.

        Raises:
            ConfigurationError: The text is something else.
        """
        try:
            value: Self = from_plain(cls, json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            what, writer = cls._origin
            message = f"not a {what} ({type(error).__name__}: {error}); {writer}"
            raise ConfigurationError(message) from error
        return value


def plain(value: Any) -> Any:  # noqa: ANN401 - as above
    """A value after a way through JSON, for comparison with one from a checkpoint."""
    return json.loads(json.dumps(to_plain(value)))
