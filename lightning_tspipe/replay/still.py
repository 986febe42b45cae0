"""A teacher's parameters with which a step computes: they must stay as they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lightning_tspipe.errors import CaptureError
from lightning_tspipe.late import Late, sample_of


class StillParameters:
    """Refuses changes: the teacher's outputs may be of an earlier step, computed with others.

    Args:
        parameters: By name; of some of them other ranks have the values.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = {name: own for name, own in parameters.items() if not own.is_meta}
        self._versions: list[int] = []
        self._samples: torch.Tensor | None = None
        self._late: Late | None = None

    def check(self) -> None:
        """They are as they were at the first check; what a device says is looked at in the next.

        Raises:
            CaptureError: Names one that has changed.
        """
        if not self._parameters:
            return
        versions = [own._version for own in self._parameters.values()]  # noqa: SLF001
        samples = torch.stack([sample_of(own) for own in self._parameters.values()])
        if self._samples is None:
            self._versions, self._samples = versions, samples
        changed = [a != b for a, b in zip(self._versions, versions, strict=True)]
        if self._late is not None:
            late = self._late.tolist()
            changed = [a or b for a, b in zip(changed, late, strict=True)]
        self._late = Late(samples != self._samples)
        for name, has_changed in zip(self._parameters, changed, strict=True):
            if has_changed:
                raise CaptureError(
                    f"the step computes with {name!r} of a teacher that changes: what the teacher "
                    "has returned may be of other weights than these. Call a part of the teacher "
                    "that has this parameter inside, as in self.teacher(...), or leave the teacher "
                    "as it is"
                )
