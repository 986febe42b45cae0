"""What a worker tells the coordinator. Plain data: the coordinator never loads torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes that one process holds, by purpose.

    Attributes:
        student: Trainable parameters.
        gradients: Their gradients.
        optimizer: The optimizer's state.
        fixed: Parameters without gradients (the teacher) and the buffers of both networks.
    """

    student: int
    gradients: int
    optimizer: int
    fixed: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())


@dataclass(frozen=True, slots=True)
class Asks:
    """The loader is out of tokens; ``stamps`` are the times of its fetches since the last turn."""

    stamps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Weighs:
    """What this process holds for good, counted at one of its first optimizer steps.

    Attributes:
        held: By purpose.
        notes: What else a method counted, in bytes.
    """

    held: Bytes | None
    notes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """The method raised."""

    report: str


Message = Asks | Weighs | Failed
