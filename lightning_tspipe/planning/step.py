"""A training step as the planner sees it: networks, calls and samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.planning.profile import NetworkProfile


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


def per_replica(batch_sizes: Sequence[int], num_replicas: int) -> tuple[int, ...]:
    """Samples that one of several replicas gets of each call.

    Raises:
        ConfigurationError: The samples can't be divided evenly.
    """
    for size in batch_sizes:
        if num_replicas < 1 or size % num_replicas:
            raise ConfigurationError(
                f"a batch of {size} samples cannot be divided evenly among {num_replicas} replicas"
            )
    return tuple(size // num_replicas for size in batch_sizes)
