"""A student whose first atoms are frozen: they are a forward-only network of their own.

It runs where a teacher would, also a batch ahead, and the rest of the student reads what it puts
out. There is no staleness in that: frozen weights don't change::

    student   | atom 0 | atom 1 | atom 2 | atom 3 | atom 4 |
    frozen    |<-- 'teacher', no backward ->|<- 'student' ->|
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor
from typing_extensions import override

from lightning_tspipe.capture.plan import CallPlan, Inputs, NetworkName, ValueRef
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.runtime.batches.metadata import Known
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.stages.network import ChainNetwork
from lightning_tspipe.runtime.stages.routes import RouteChain, Run


class Front(Protocol):
    """Something that knows what a frozen part returned for a sample before."""

    @property
    def num_known(self) -> int:
        """Behind so many atoms something may be known."""

    def placed(
        self, part: FrozenPart, calls: Sequence[CallPlan], seconds: Callable[[], float]
    ) -> bool:
        """A part is about to be cut, and all its values are here; every rank calls it.

        Args:
            part: The frozen part.
            calls: Of the student, in the step.
            seconds: Measures or looks up how long the part runs in the first of them.

        Returns:
            Whether anything is going to be known of it.
        """

    def see(self, batch: Any, inputs: Inputs) -> Known:
        """On the data rank, a batch whose frozen part will run, and its calls' inputs."""

    def run(
        self, part: FrozenPart, known: Known, rows: slice, received: Tensors, atoms: tuple[int, int]
    ) -> Tensors:
        """What some atoms return for some samples of a batch.

        Args:
            part: The frozen part.
            known: What :meth:`see` gave for the batch.
            rows: The samples in it.
            received: What the first atom gets; nothing where it is known.
            atoms: The first one, and one after the last.
        """


class FrozenPart(ChainNetwork):
    """The frozen atoms of a student: the same chain, run without a backward.

    Args:
        student: The whole chain.
        num_atoms: Its first atoms that are frozen.

    Attributes:
        num_frozen: The same.
        front: Knows what the part returned for a sample before; None: nothing does.
        known: What it knows of the batches that were told of, by their numbers.
    """

    def __init__(self, student: ChainNetwork, num_atoms: int) -> None:
        super().__init__("teacher", "student", student.module, student.routes, student.atoms)
        self.num_frozen = num_atoms
        self.front: Front | None = None
        self.known: Mapping[int, Known] = {}

    @override
    def run(
        self,
        chain: RouteChain,
        received: Tensors,
        start: int,
        stop: int,
        *,
        grad: bool,
        run: Run | None = None,
        place: tuple[int, slice] | None = None,
    ) -> tuple[Tensors, dict[ValueRef, Tensor]]:
        if self.front is None or place is None:  # or somebody asks for shapes
            return super().run(chain, received, start, stop, grad=grad, run=run)
        number, rows = place
        if rows.start == rows.stop:  # of a batch with fewer samples than micro-batches
            return (), {}
        return self.front.run(self, self.known[number], rows, received, (start, stop)), {}

    def compute(self, received: Tensors, start: int, stop: int) -> Tensors:
        """What some atoms return, without gradients, whatever is known."""
        return self.longest.run(received, start, stop, grad=False)[0]


def refuse_teacher(captured: Captured) -> None:
    """Refuse a step that calls a teacher: what is frozen will run in its place.

    Raises:
        ConfigurationError: It does.
    """
    if "teacher" in captured.networks:
        raise ConfigurationError(
            "the step calls a teacher, but FreezeAndRepack runs the frozen layers in its place. "
            "Use FreezeAndRepack where training_step calls the student only: the module may have "
            "an average of its weights (MomentumEMA), which validation_step may call"
        )


def with_frozen(captured: Captured, frozen: Collection[str]) -> tuple[Captured, FrozenPart | None]:
    """Make the frozen beginning of the student a network of its own.

    Args:
        captured: A step with a student, and without a teacher.
        frozen: Names of the parameters that are frozen; they need no gradients.

    Returns:
        The captured step, and the frozen part; None if the first atom is trained.
    """
    student = captured.networks.get("student")
    # Where calls take different ways, the frozen beginning stays a part of the student.
    is_one = student is not None and student.follows_one_route
    number = num_frozen_atoms(parameter_names(student), frozen) if student and is_one else 0
    if student is None or number == 0:
        return captured, None
    part = FrozenPart(student, number)
    networks: dict[NetworkName, ChainNetwork] = {"student": student, "teacher": part}
    return replace(captured, networks=networks), part


def parameter_names(network: ChainNetwork) -> tuple[tuple[str, ...], ...]:
    """For each atom, the names of its parameters."""
    return tuple(tuple(atom.parameter_names) for atom in network.atoms)


def num_frozen(atoms: Iterable[Sequence[bool]]) -> int:
    """Atoms up to the last one with a frozen parameter, and before the first one that is trained.

    What follows it without parameters may be random (dropout), and belongs to the next layer.

    Args:
        atoms: For each atom, whether each of its parameters is frozen.
    """
    last = 0
    for number, frozen in enumerate(atoms, start=1):
        if not all(frozen):
            break
        if frozen:
            last = number
    return last


def num_frozen_atoms(parameters: Sequence[Sequence[str]], frozen: Collection[str]) -> int:
    """Atoms at the beginning of a network that are frozen; as ``num_frozen``, by names.

    Args:
        parameters: For each atom, the names of its parameters.
        frozen: Names of the parameters that are frozen.
    """
    return num_frozen([name in frozen for name in own] for own in parameters)
