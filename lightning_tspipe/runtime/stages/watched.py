"""What torch's own modules read of themselves whenever they run: a mode, a slope, a probability."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from lightning_tspipe.replacing import PLAIN


class Watched:
    """Tells whether attributes of torch's modules have changed.

    Others may write their own whenever they run; what those read is guarded where it is recorded.

    Args:
        modules: Any.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        own = [each for each in modules if type(each).__module__.startswith("torch.nn.")]
        self._tables: list[dict[str, Any]] = list(map(vars, own))
        self._number = 0
        self._known = self._look()

    @property
    def number(self) -> int:
        """How often something was seen to have changed."""
        known = zip(self._known, self._tables, strict=True)
        if not all(before.items() <= table.items() for before, table in known):
            self._number, self._known = self._number + 1, self._look()
        return self._number

    def _look(self) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in table.items() if isinstance(value, PLAIN)}
            for table in self._tables
        ]
