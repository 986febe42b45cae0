"""Measured costs of the atoms of a network, and the step that networks take part in."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.planning.ties import Tied

Seconds = Mapping[int, float]
"""Seconds by micro-batch size."""


@dataclass(frozen=True)
class AtomProfile:
    """Costs of one atom.

    Attributes:
        name: Name for users (``"backbone.layer1.0"``).
        forward: Seconds by micro-batch size.
        backward: Seconds by micro-batch size; empty for a network that is never trained.
        input_backward: Seconds of the half that makes the input's gradient; empty if unknown.
        weight_backward: Seconds of the half that makes the weights' gradients.
        output_bytes_per_sample: Bytes of the output that the next atom gets.
        activation_bytes_per_sample: Bytes of activations saved from forward to backward.
        parameter_bytes: Bytes of all parameters and buffers, and of their averages.
        trainable_bytes: Bytes of the parameters that get a gradient.
        result_bytes_per_sample: Bytes sent to the loss: a tap, or the network's output.
        joined: Whether the next atom must be in the same stage (they share what has one place).
        recomputed: Whether it is recomputed in the backward, so that only its input is saved.
        flops_per_sample: Floating-point operations of its forward; 0 if unknown.
    """

    name: str
    forward: Seconds
    backward: Seconds = field(default_factory=dict)
    input_backward: Seconds = field(default_factory=dict)
    weight_backward: Seconds = field(default_factory=dict)
    output_bytes_per_sample: int = 0
    activation_bytes_per_sample: int = 0
    parameter_bytes: int = 0
    trainable_bytes: int = 0
    result_bytes_per_sample: int = 0
    joined: bool = False
    recomputed: bool = False
    flops_per_sample: float = 0.0


@dataclass(frozen=True)
class NetworkProfile:
    """The atoms of one network, in order."""

    atoms: tuple[AtomProfile, ...]

    @property
    def num_atoms(self) -> int:
        """Number of atoms."""
        return len(self.atoms)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes at which every atom was measured, ascending."""
        if not self.atoms:
            return ()
        return tuple(sorted(set.intersection(*(set(atom.forward) for atom in self.atoms))))

    def holding(self, more_bytes: Sequence[int]) -> NetworkProfile:
        """The same network with additional bytes beside the parameters of each atom."""
        pairs = zip(self.atoms, more_bytes, strict=True)
        atoms = (replace(atom, parameter_bytes=atom.parameter_bytes + more) for atom, more in pairs)
        return NetworkProfile(tuple(atoms))

    def joining(self, joined: Collection[int]) -> NetworkProfile:
        """The same network, where these atoms must stay with the next one."""
        atoms = (replace(atom, joined=place in joined) for place, atom in enumerate(self.atoms))
        return NetworkProfile(tuple(atoms))

    @cached_property
    def joined(self) -> frozenset[int]:
        """The atoms that must stay with the next one."""
        return frozenset(place for place, atom in enumerate(self.atoms) if atom.joined)

    @property
    def can_split(self) -> bool:
        """Whether the halves of the backward were measured."""
        return all(atom.input_backward for atom in self.atoms)

    def sums(self, kind: str, size: int) -> tuple[float, ...]:
        """Running sums over the atoms, from 0: seconds of ``kind`` for ``size`` samples.

        Args:
            kind: ``"forward"``, ``"backward"``, ``"input_backward"`` or ``"weight_backward"``.
            size: Samples; between measured sizes the time is interpolated.

        Returns:
            ``num_atoms + 1`` numbers: atoms i to j - 1 take ``sums[j] - sums[i]``.
        """
        return tuple(accumulate((_seconds(atom, kind, size) for atom in self.atoms), initial=0.0))

    @cached_property
    def parameter_sums(self) -> tuple[int, ...]:
        """Running sums over the atoms, from 0: bytes of parameters and buffers."""
        return tuple(accumulate((atom.parameter_bytes for atom in self.atoms), initial=0))

    @cached_property
    def gradient_sums(self) -> tuple[int, ...]:
        """Running sums over the atoms, from 0: bytes of gradients."""
        return tuple(accumulate((atom.trainable_bytes for atom in self.atoms), initial=0))

    @property
    def recomputed(self) -> frozenset[int]:
        """The atoms that are recomputed in the backward."""
        return frozenset(place for place, atom in enumerate(self.atoms) if atom.recomputed)

    def recomputing(self, atoms: Collection[int]) -> NetworkProfile:
        """The same network with some atoms recomputed in the backward."""
        return NetworkProfile(
            tuple(replace(a, recomputed=place in atoms) for place, a in enumerate(self.atoms))
        )

    @cached_property
    def saved_sums(self) -> tuple[int, ...]:
        """Running sums over the atoms, from 0: bytes per sample saved for the backward.

        Of consecutive recomputed atoms, the input of the first one is saved; at the beginning of a
        stage it was received, and is counted there.
        """
        kept = [0 if atom.recomputed else atom.activation_bytes_per_sample for atom in self.atoms]
        for place in self.recomputed:
            if place and not self.atoms[place - 1].recomputed:
                kept[place] = self.atoms[place - 1].output_bytes_per_sample
        return tuple(accumulate(kept, initial=0))

    @cached_property
    def recompute_sums(self) -> tuple[int, ...]:
        """Running sums over the atoms, from 0: bytes per sample needed to recompute them."""
        needs = (atom.activation_bytes_per_sample * atom.recomputed for atom in self.atoms)
        return tuple(accumulate(needs, initial=0))


@dataclass(frozen=True)
class Step:
    """A training step, and the costs of its networks on the device where they were measured.

    Attributes:
        student: Profile of the trainable network.
        teacher: Profile of the forward-only network, or None.
        num_calls: Calls per step of the student and of the teacher.
        batch_sizes: Samples in each call of the student; the teacher's calls are the first of them.
            A single number serves all calls.
        paired: Whether the teacher's atoms are the student's first ones, and must lie on the same
            ranks (an EMA); otherwise the teacher is cut where that is best.
        optimizer_bytes_per_parameter_byte: 0 for SGD, 1 with momentum, 2 for Adam.
        input_bytes_per_sample: One sample of a call's input.
        update_seconds_per_byte: Of the optimizer step, per byte of trained parameters; a paired
            teacher's update costs as much per byte.
        frozen: Whether the teacher is the student's frozen part, which the rest of it reads.
        is_fed: Whether the student's inputs are made of the teacher's outputs.
        loss_seconds_per_sample: What the loss multiplies, there and back (language models' heads,
            say), for a sample of the largest call; beside what any loss takes.
        loss_parameter_bytes: Bytes of the parameters that lie with the loss.
        loss_trainable_bytes: Bytes of those that get a gradient.
        loss_working_bytes: Bytes that the loss needs while it runs (of logits, say), beside what it
            is given and the gradients that it leaves; 0 if unknown.
        loss_working_bytes_per_sample: The same for each sample of the largest call.
        tied: What has several readers.
    """

    student: NetworkProfile
    teacher: NetworkProfile | None
    num_calls: tuple[int, int]
    batch_sizes: tuple[int, ...]
    paired: bool = True
    optimizer_bytes_per_parameter_byte: float = 1.0
    input_bytes_per_sample: int = 0
    update_seconds_per_byte: float = 0.0
    frozen: bool = False
    is_fed: bool = False
    loss_seconds_per_sample: float = 0.0
    loss_parameter_bytes: int = 0
    loss_trainable_bytes: int = 0
    loss_working_bytes: int = 0
    loss_working_bytes_per_sample: int = 0
    tied: tuple[Tied, ...] = ()


def _seconds(atom: AtomProfile, kind: str, size: int) -> float:
    seconds = seconds_at(getattr(atom, kind), size)
    if atom.recomputed and kind in ("backward", "input_backward"):
        seconds += seconds_at(atom.forward, size)
    return seconds


def seconds_at(times: Seconds, size: int) -> float:
    """Seconds for ``size`` samples: measured, or interpolated between the nearest sizes.

    Above the measured sizes it is extrapolated from the last two; below them from the first two,
    but not below a proportional share.

    Raises:
        ConfigurationError: A size of 0 or less.

    >>> seconds_at({2: 1.0, 4: 1.5}, 3)
    1.25
    """
    if size <= 0:
        raise ConfigurationError(f"a micro-batch of {size} samples; at least 1 is needed")
    if size in times:
        return times[size]
    sizes = sorted(times)
    if not sizes:
        return 0.0
    if len(sizes) == 1:
        return times[sizes[0]] * size / sizes[0]
    # The segment that holds the size, or the outermost one.
    right = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    slope = (times[high] - times[low]) / (high - low)
    return max(times[low] + slope * (size - low), times[low] * min(1.0, size / low), 0.0)
