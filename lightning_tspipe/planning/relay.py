"""Automatic hybrid distribution: assign blocks to devices in blockwise distillation.

Blocks don't wait for each other, so a step takes as long as its slowest stage (Jang et al.,
*Pipe-BD*, DATE 2023, section 4.3). A stage is a range of blocks on a range of devices, which divide
the batch::

    blocks    0    1 2   3 4 5          seconds of a stage =  teacher and student at its share
    devices  A B    C     D               + sum of gradients + update + what is relayed to it

The best distribution of the first n blocks over the first d devices is some last stage after the
best distribution of fewer blocks over fewer devices: so trying every last stage is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.ir.shares import largest_share
from lightning_tspipe.planning.table import aligned


@dataclass(frozen=True)
class BlockProfile:
    """Costs of one block of the teacher with its block of the student.

    Attributes:
        name: Name for messages and tables.
        teacher: Seconds of the teacher's forward, by number of samples.
        student: Seconds of the student's forward, loss and backward, by number of samples.
        update: Seconds of the optimizer's step.
        input_bytes: Bytes per sample of the input of both.
        gradient_bytes: Bytes of the student's gradients, which ranks that share the block sum.
        state_bytes: Bytes independent of the batch: weights of both, gradients of this step and of
            the one before, optimizer state.
        activation_bytes: Bytes per sample that the student saves for its backward.
    """

    name: str
    teacher: Mapping[int, float]
    student: Mapping[int, float]
    update: float = 0.0
    input_bytes: int = 0
    gradient_bytes: int = 0
    state_bytes: int = 0
    activation_bytes: int = 0

    def seconds(self, samples: int) -> float:
        """Seconds of teacher and student, without the update.

        Raises:
            PartitionError: This number of samples was not measured.
        """
        if samples not in self.teacher:
            raise PartitionError(
                f"block {self.name} was not measured with {samples} samples, only with "
                f"{', '.join(map(str, sorted(self.teacher)))}"
            )
        return self.teacher[samples] + self.student[samples]


@dataclass(frozen=True)
class RelayProfile:
    """Costs of all blocks and of the links between devices.

    Attributes:
        blocks: The blocks, in order.
        batch_size: Samples of a batch.
        latency: Seconds of latency of a message.
        bandwidth: Bytes per second between two devices.
    """

    blocks: tuple[BlockProfile, ...]
    batch_size: int
    latency: float = 0.0
    bandwidth: float = math.inf

    def stage_seconds(self, first: int, last: int, width: int) -> float:
        """Seconds per step of ``width`` devices that share the blocks ``first`` to ``last - 1``."""
        blocks, share = self.blocks[first:last], largest_share(width, self.batch_size)
        work = sum(block.seconds(share) + block.update for block in blocks)
        relayed = 0.0
        if first:
            relayed = self.latency + share * blocks[0].input_bytes / self.bandwidth
        return work + self.reduction_seconds(first, last, width) + relayed

    def reduction_seconds(self, first: int, last: int, width: int) -> float:
        """Seconds to sum the gradients of a shared stage: each rank sends its own to all others."""
        if width == 1:
            return 0.0
        travels = (width - 1) * sum(block.gradient_bytes for block in self.blocks[first:last])
        return self.latency + travels / self.bandwidth

    def stage_bytes(self, first: int, last: int, width: int) -> int:
        """Bytes that each device of a stage holds."""
        share = largest_share(width, self.batch_size)
        blocks = self.blocks[first:last]
        state = sum(block.state_bytes for block in blocks)
        # The outputs of all teacher blocks are held; of the students one runs at a time.
        activations = max(block.activation_bytes for block in blocks)
        return state + share * (activations + sum(block.input_bytes for block in blocks))


@dataclass(frozen=True)
class RelayPlan:
    """A distribution of blocks over devices.

    Attributes:
        cuts: First block of each stage, and the number of blocks.
        widths: Number of devices that share each stage.
        stage_seconds: Seconds per step of each stage; empty if nothing was measured.
        stage_bytes: Bytes that each device of a stage holds.
        names: Names of the blocks, for tables.
    """

    cuts: tuple[int, ...]
    widths: tuple[int, ...]
    stage_seconds: tuple[float, ...] = field(default=(), compare=False)
    stage_bytes: tuple[int, ...] = field(default=(), compare=False)
    names: tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.widths)

    @property
    def num_devices(self) -> int:
        """Number of devices of all stages."""
        return sum(self.widths)

    @property
    def step_seconds(self) -> float:
        """Seconds per step in the steady state: those of the slowest stage."""
        return max(self.stage_seconds)

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each stage; the first stage is on the last ranks, where data is read.

        >>> RelayPlan((0, 1, 3), (2, 1)).ranks
        ((2, 1), (0,))
        """
        ends = accumulate(self.widths)
        return tuple(
            tuple(self.num_devices - 1 - place for place in range(end - width, end))
            for end, width in zip(ends, self.widths, strict=True)
        )

    def __str__(self) -> str:
        rows = [["stage", "blocks", "ranks", "ms per step", "MB"]]
        for stage, ranks in enumerate(self.ranks):
            names = self.names[self.cuts[stage] : self.cuts[stage + 1]]
            measured = [f"{1e3 * self.stage_seconds[stage]:.2f}"] if self.stage_seconds else [""]
            held = [f"{self.stage_bytes[stage] / 1e6:.1f}"] if self.stage_bytes else [""]
            where = " ".join(map(str, ranks))
            rows.append([str(stage), ", ".join(names), where, *measured, *held])
        text = "\n".join(aligned(rows))
        if self.stage_seconds:
            busy = sum(
                width * seconds
                for width, seconds in zip(self.widths, self.stage_seconds, strict=True)
            )
            used = busy / (self.num_devices * self.step_seconds)
            text += f"\n{1e3 * self.step_seconds:.2f} ms per step, devices busy {used:.0%}"
        return text


def distributions(num_blocks: int, num_devices: int) -> Iterator[RelayPlan]:
    """All ways to give contiguous blocks to contiguous devices.

    >>> sum(1 for _ in distributions(3, 2))
    3
    """
    for cuts, widths in _distributions(num_blocks, num_devices):
        yield RelayPlan((*cuts, num_blocks), widths)


def _distributions(
    num_blocks: int, num_devices: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    if not num_blocks and not num_devices:
        yield (), ()
    for first in range(num_blocks):
        for width in range(1, num_devices + 1):
            for cuts, widths in _distributions(first, num_devices - width):
                yield (*cuts, first), (*widths, width)


def described(plan: RelayPlan, profile: RelayProfile) -> RelayPlan:
    """A plan with the seconds and bytes of its stages filled in."""
    stages = list(zip(plan.cuts[:-1], plan.cuts[1:], plan.widths, strict=True))
    return RelayPlan(
        plan.cuts,
        plan.widths,
        tuple(profile.stage_seconds(*stage) for stage in stages),
        tuple(profile.stage_bytes(*stage) for stage in stages),
        tuple(block.name for block in profile.blocks),
    )


def distribute(
    profile: RelayProfile,
    num_devices: int,
    *,
    memory_limits: Sequence[int] | None = None,
    max_width: int | None = None,
) -> RelayPlan:
    """The distribution whose slowest stage is fastest.

    Args:
        profile: The blocks.
        num_devices: Number of devices, all of which are used.
        memory_limits: Bytes that each device may hold, in the order of the stages; None: any.
        max_width: Most devices that may share a stage; 1: none is shared.

    Raises:
        PartitionError: There is no distribution: too few blocks, or too little memory.
    """
    num_blocks = len(profile.blocks)
    limits = list(memory_limits) if memory_limits is not None else [math.inf] * num_devices
    widest = min(num_devices, max_width or num_devices, profile.batch_size)
    if num_blocks * widest < num_devices:
        raise PartitionError(
            f"{num_blocks} blocks for {num_devices} devices, of which at most {widest} may share "
            "a block: use fewer devices, more blocks, or let more devices share one"
        )
    _check_blocks(profile, max(limits), widest)

    def fits(first: int, last: int, devices: range) -> bool:
        room = min(limits[devices.start : devices.stop])
        return profile.stage_bytes(first, last, len(devices)) <= room

    found = fastest(num_blocks, num_devices, widest, profile.stage_seconds, fits)
    if found is None:
        raise PartitionError(_too_little(profile, num_devices, min(limits), widest))
    return described(found, profile)


def fastest(
    num_blocks: int,
    num_devices: int,
    max_width: int,
    seconds: Callable[[int, int, int], float],
    fits: Callable[[int, int, range], bool],
) -> RelayPlan | None:
    """The distribution whose slowest stage is fastest; of equals, the one with less work.

    Args:
        num_blocks: Number of blocks.
        num_devices: Number of devices, all of which are used.
        max_width: Most devices that may share a stage.
        seconds: Seconds of a stage, by its first block, the one after its last, and its width.
        fits: Whether a stage fits the memory of a range of devices.
    """
    best: dict[tuple[int, int], tuple[float, float, tuple[int, ...], tuple[int, ...]]] = {
        (0, 0): (0.0, 0.0, (), ())
    }
    for blocks in range(1, num_blocks + 1):
        for devices in range(1, num_devices + 1):
            found = [
                (max(known[0], taken), known[1] + width * taken,
                 (*known[2], first), (*known[3], width))
                for first in range(blocks)
                for width in range(1, min(max_width, devices) + 1)
                if (known := best.get((first, devices - width))) is not None
                and fits(first, blocks, range(devices - width, devices))
                for taken in [seconds(first, blocks, width)]
            ]  # fmt: skip
            if found:
                best[blocks, devices] = min(found)
    if (num_blocks, num_devices) not in best:
        return None
    _, _, cuts, widths = best[num_blocks, num_devices]
    return RelayPlan((*cuts, num_blocks), widths)


def _check_blocks(profile: RelayProfile, limit: float, widest: int) -> None:
    for index, block in enumerate(profile.blocks):
        least = profile.stage_bytes(index, index + 1, widest)
        if least > limit:
            raise PartitionError(
                f"block {index} ({block.name}) fits no device: it needs {least / 1e6:.1f} MB "
                f"where {widest} devices share the batch, and the largest may hold "
                f"{limit / 1e6:.1f} MB. Use a smaller batch, smaller blocks, or a larger "
                "memory_limit"
            )


def _too_little(profile: RelayProfile, num_devices: int, limit: float, widest: int) -> str:
    least = sum(
        profile.stage_bytes(index, index + 1, widest) for index in range(len(profile.blocks))
    )
    return (
        f"no distribution of {len(profile.blocks)} blocks over {num_devices} devices fits the "
        f"memory: a device may hold {limit / 1e6:.1f} MB, and all blocks together need at least "
        f"{least / 1e6:.1f} MB. Use more devices, a smaller batch, or a larger memory_limit"
    )
