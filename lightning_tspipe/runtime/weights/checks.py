"""What must hold of weights that several batches under way have read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.late import Late


@dataclass
class WeightChecks:
    """Refuses weights that something else than their optimizer's step changes, or that are lost.

    What a device says of values is looked at later, so that the host doesn't wait for it.

    Args:
        names: Of the parameters.
        parameters: The parameters.
        sees_values: Whether changes that leave no other trace (through ``.data``) are looked for.
    """

    names: Sequence[str]
    parameters: Sequence[nn.Parameter]
    sees_values: bool
    _seen: list[tuple[int, int]] = field(default_factory=list)
    _sums: Tensor | None = None
    _verdicts: list[tuple[Late, Callable[[Any], None]]] = field(default_factory=list)

    def updated(self) -> None:
        """An optimizer has changed the weights, as it may."""
        self._seen, self._sums = self._marks(), self._values()

    def forget(self) -> None:
        """From now on they may be anything."""
        self._seen, self._sums = [], None

    def look(self) -> None:
        """What the device has said of the checks so far.

        Raises:
            ConfigurationError: One has failed.
        """
        verdicts, self._verdicts = self._verdicts, []
        for verdict, judge in verdicts:
            judge(verdict.tolist())

    def unchanged(self) -> None:
        """The weights are as the last update left them, as far as the host can see.

        Raises:
            ConfigurationError: Names one that is not.
        """
        if not self._seen:
            self.updated()
        self._refuse_changed([a != b for a, b in zip(self._seen, self._marks(), strict=True)])

    def values_unchanged(self) -> None:
        """So are their values; :meth:`look` tells."""
        values = self._values()
        if self._sums is not None and values is not None:
            self._verdicts.append((Late(self._sums != values), self._refuse_changed))

    def finite(self, predicted: Sequence[Tensor], steps: int) -> None:
        """Values that were predicted by so many updates are numbers; :meth:`look` tells."""
        if predicted:
            found = torch.stack([_sums_of(predicted), _sums_of(self.parameters)]).isfinite()
            self._verdicts.append((Late(~found), partial(self._refuse_lost, steps)))

    def gradients(self) -> None:
        """Gradients are such that updates by them can be predicted.

        Raises:
            ConfigurationError: One is sparse.
        """
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise ConfigurationError(
                    f"{name!r} has a sparse gradient, and updates by sparse gradients can't be "
                    "predicted. Use nn.Embedding(sparse=False)"
                )

    def _refuse_changed(self, are_changed: Sequence[bool]) -> None:
        for name, is_changed in zip(self.names, are_changed, strict=True):
            if is_changed:
                raise ConfigurationError(
                    f"{name!r} was changed between two updates, while forwards of later batches "
                    "are under way that have read it. With schedule='1f1b' only optimizer.step may "
                    "change what is trained; use schedule='gpipe', or do it where an epoch begins"
                )

    def _refuse_lost(self, steps: int, are_lost: Sequence[Sequence[bool]]) -> None:
        for name, is_lost, was_lost in zip(self.names, *are_lost, strict=True):
            if is_lost:
                whose = "it holds one itself" if was_lost else (
                    "its optimizer's state holds one, or the learning rate is too high"
                )  # fmt: skip
                raise ConfigurationError(
                    f"the prediction of {name!r} by {steps} updates is not finite: {whose}"
                )

    def _marks(self) -> list[tuple[int, int]]:
        """What differs when a parameter was written to, or replaced."""
        return [(p._version, p.data_ptr()) for p in self.parameters]  # noqa: SLF001

    def _values(self) -> Tensor | None:
        """A number for each parameter that other values would hardly have."""
        if not self.sees_values or not self.parameters:
            return None
        return _sums_of(self.parameters).nan_to_num(nan=0.0)


def _sums_of(tensors: Iterable[Tensor]) -> Tensor:
    """Sums in float64, shape (tensors,); those of half precision would leave its range."""
    sums = [t.detach().sum(dtype=torch.float32 if t.itemsize < 4 else t.dtype) for t in tensors]
    return torch.stack([each.double() for each in sums])
