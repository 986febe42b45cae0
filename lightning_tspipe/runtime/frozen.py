"""A student whose first atoms are frozen: they are a forward-only network of their own.

It runs where a teacher would, also a batch ahead, and the rest of the student reads what it puts
out. There is no staleness in that: frozen weights don't change::

    student   | atom 0 | atom 1 | atom 2 | atom 3 | atom 4 |
    frozen    |<-- 'teacher', no backward ->|<- 'student' ->|
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor
from typing_extensions import override

from lightning_tspipe.capture.plan import NetworkName, ValueRef
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.runtime.execution import Ran
from lightning_tspipe.runtime.network import ChainNetwork
from lightning_tspipe.runtime.programs import Captured


class Front(Protocol):
    """Something that knows what a frozen part returns for a sample."""

    def see(self, number: int, batch: Any) -> None:
        """A batch whose frozen part will run; before it does."""

    def run(self, part: FrozenPart, number: int, rows: slice, inputs: Tensors) -> Tensors:
        """What it returns for some samples of a batch."""


class FrozenPart(ChainNetwork):
    """The frozen atoms of a student: the same chain, run without a backward.

    Args:
        student: The whole chain.
        num_atoms: Its first atoms that are frozen.
    """

    def __init__(self, student: ChainNetwork, num_atoms: int) -> None:
        vars(self).update(vars(student))  # the same atoms, the same shapes
        self.name = "teacher"
        self.called_as = "student"
        self.num_frozen = num_atoms
        self.front: Front | None = None
        self._now: tuple[int, slice] = (0, slice(0))

    @override
    def about_to_run(self, batch: int, rows: slice) -> None:
        self._now = batch, rows

    @override
    def run(
        self,
        received: Tensors,
        start: int,
        stop: int,
        *,
        grad: bool,
        run: Callable[[Tensors, int, int], Ran] | None = None,
    ) -> tuple[Tensors, dict[ValueRef, Tensor]]:
        if self.front is None or (start, stop) != (0, self.num_frozen):
            return super().run(received, start, stop, grad=grad, run=run)
        return self.front.run(self, *self._now, received), {}

    def compute(self, received: Tensors, start: int, stop: int) -> Tensors:
        """What some atoms return, without gradients, whatever is known."""
        return super().run(received, start, stop, grad=False)[0]

    @property
    def is_tapped(self) -> bool:
        """Whether the step uses something in its middle."""
        return any(output.atom < self.num_frozen for output in self.wanted)

    @override
    def output_stages(self, cuts: Sequence[int]) -> frozenset[int]:
        """The stages that emit something that the step uses; the last one need not.

        Args:
            cuts: First atom of each stage, and the number of frozen atoms.
        """
        inside = [o.atom for o in self.wanted if o.atom < self.num_frozen]
        return frozenset(
            stage
            for stage in range(len(cuts) - 1)
            if any(cuts[stage] <= atom < cuts[stage + 1] for atom in inside)
        )


def with_frozen(
    captured: Captured, frozen: Collection[str], front: Front | None = None
) -> tuple[Captured, int]:
    """Make the frozen beginning of the student a network of its own.

    Args:
        captured: A step with a student, and without a teacher.
        frozen: Names of the parameters that are frozen; they need no gradients.
        front: Knows what the frozen part returns, if this rank runs all of it.

    Returns:
        The captured step, and the number of frozen atoms; 0 if the first atom is trained.

    Raises:
        ConfigurationError: The step has a teacher.
    """
    student = captured.networks.get("student")
    number = 0 if student is None else num_frozen_atoms(student, frozen)
    if student is None or number == 0:
        return captured, 0
    if "teacher" in captured.networks:
        raise ConfigurationError(
            "the step calls a teacher, and FreezeAndRepack makes the frozen layers run in its "
            "place. Use FreezeAndRepack on trainable networks without a teacher"
        )
    part = FrozenPart(student, number)
    part.front = None if part.is_tapped else front
    networks: dict[NetworkName, ChainNetwork] = {"student": student, "teacher": part}
    return replace(captured, networks=networks), number


def num_frozen_atoms(student: ChainNetwork, frozen: Collection[str]) -> int:
    """Atoms up to the last one with a frozen parameter, and before the first one that is trained.

    What follows it without parameters may be random (dropout), and belongs to the next layer.
    """
    last = 0
    for index, atom in enumerate(student.atoms):
        names = set(atom.parameter_names)
        if names - set(frozen):
            break
        if names:
            last = index + 1
    return last
