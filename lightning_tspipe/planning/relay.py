"""Distribution of blocks over devices in blockwise distillation: Pipe-BD's modes, and baselines.

Blocks don't wait for each other, so a step takes as long as its slowest stage (Jang et al.,
*Pipe-BD*, DATE 2023, section 4.3). A stage is a range of blocks on a range of devices, which divide
the batch::

    blocks    0    1 2   3 4 5          seconds of a stage =  teacher and student at its share
    devices  A B    C     D               + sum of gradients + update + what is relayed to it

The best distribution of the first n blocks over the first d devices is some last stage after the
best distribution of fewer blocks over fewer devices: so trying every last stage is exact.

A *pass* is one forward of the teacher with the work of the students beside it. Relaying needs one
pass per batch; training block by block, as data parallelism does, one for each block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, starmap
from operator import mul
from typing import Literal

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.ir.shares import largest_share
from lightning_tspipe.planning.table import aligned

Mode = Literal["tr", "dpu", "ahd", "ir", "dp", "ls"]
MODES: tuple[Mode, ...] = ("tr", "dpu", "ahd", "ir", "dp", "ls")

_REMEDY = "Use a smaller batch or a larger memory_limit, or let more devices share (mode='ahd')"


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

    def priced(self, plan: RelayPlan, memory_limit: int | None = None) -> RelayPlan:
        """A plan with the seconds and bytes of its stages filled in.

        Raises:
            PartitionError: A stage needs more than the limit.
        """
        stages = list(zip(plan.cuts[:-1], plan.cuts[1:], plan.widths, strict=True))
        names = tuple(block.name for block in self.blocks)
        held = tuple(self.stage_bytes(*stage) for stage in stages)
        for (first, last, width), size in zip(stages, held, strict=True):
            if memory_limit is not None and size > memory_limit:
                raise PartitionError(
                    f"the blocks {', '.join(names[first:last])} on one device need "
                    f"{size / 1e6:.1f} MB where {width} share them, but a device may hold "
                    f"{memory_limit / 1e6:.1f} MB. {_REMEDY}"
                )
        seconds = tuple(self.stage_seconds(*stage) for stage in stages)
        return RelayPlan(plan.cuts, plan.widths, seconds, held, names)


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
            busy = sum(map(mul, self.widths, self.stage_seconds))
            used = busy / (self.num_devices * self.step_seconds)
            text += f"\n{1e3 * self.step_seconds:.2f} ms per step, devices busy {used:.0%}"
        return text


def distribute(
    profile: RelayProfile,
    num_devices: int,
    *,
    memory_limit: int | None = None,
    max_width: int | None = None,
    seconds: Callable[[int, int, int], float] | None = None,
) -> RelayPlan:
    """The distribution whose slowest stage is fastest; of equals, the one with less work.

    Args:
        profile: The blocks.
        num_devices: Number of devices, all of which are used.
        memory_limit: Bytes that each device may hold.
        max_width: Most devices that may share a stage; 1: none is shared.
        seconds: Seconds of a stage, by its first block, the one after its last, and its width; by
            default those of a stage that relays.

    Raises:
        PartitionError: There is no distribution: too few blocks, or too little memory.
    """
    num_blocks, seconds = len(profile.blocks), seconds or profile.stage_seconds
    limit = math.inf if memory_limit is None else memory_limit
    widest = min(num_devices, max_width or num_devices, profile.batch_size)
    if num_blocks * widest < num_devices:
        raise PartitionError(
            f"{num_blocks} blocks for {num_devices} devices, of which at most {widest} may share "
            "a block: use fewer devices, more blocks, or let devices share blocks (mode='ahd')"
        )
    for index, block in enumerate(profile.blocks):
        least = profile.stage_bytes(index, index + 1, widest)
        if least > limit:
            raise PartitionError(
                f"block {index} ({block.name}) fits no device: it needs {least / 1e6:.1f} MB "
                f"where {widest} devices share the batch, but each may hold {limit / 1e6:.1f} MB. "
                f"{_REMEDY}"
            )
    best: dict[tuple[int, int], _Option] = {(0, 0): (0.0, 0.0, (), ())}
    for blocks in range(1, num_blocks + 1):
        for devices in range(1, num_devices + 1):
            found = [
                (max(known[0], taken), known[1] + width * taken,
                 (*known[2], first), (*known[3], width))
                for first in range(blocks)
                for width in range(1, min(widest, devices) + 1)
                if (known := best.get((first, devices - width))) is not None
                and profile.stage_bytes(first, blocks, width) <= limit
                for taken in [seconds(first, blocks, width)]
            ]  # fmt: skip
            if found:
                best[blocks, devices] = min(found)
    if (num_blocks, num_devices) not in best:
        raise PartitionError(
            f"no distribution of {num_blocks} blocks over {num_devices} devices fits the memory: "
            f"a device may hold {limit / 1e6:.1f} MB. Use more devices, or: {_REMEDY}"
        )
    _, _, cuts, widths = best[num_blocks, num_devices]
    return profile.priced(RelayPlan((*cuts, num_blocks), widths))


_Option = tuple[float, float, tuple[int, ...], tuple[int, ...]]
"""Seconds of the slowest stage, those of all devices (to prefer less work), cuts and widths."""


@dataclass(frozen=True)
class Work:
    """The work of one stage in a pass.

    Attributes:
        first: The first block of the teacher that runs.
        trained: The student's blocks; the teacher runs up to the last of them.
        ranks: The ranks that share the stage.
    """

    first: int
    trained: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def forwards(self) -> range:
        """The teacher's blocks that run."""
        return range(self.first, max(self.trained) + 1)


@dataclass(frozen=True)
class Pass:
    """One forward of the teacher, divided into stages.

    Attributes:
        stages: The work of each stage.
        is_relayed: Whether each stage gets the output of the one before; otherwise all of them get
            the batch.
    """

    stages: tuple[Work, ...]
    is_relayed: bool


def passes(mode: Mode, plan: RelayPlan) -> tuple[Pass, ...]:
    """The passes of a mode for each batch.

    Args:
        mode: ``tr``, ``dpu`` and ``ahd`` relay from stage to stage; ``ir`` relays within each
            device, all of which share one stage; ``dp`` trains block by block, all devices sharing
            each; ``ls`` gives whole blocks to devices that run the teacher from its first block.
        plan: The distribution of the blocks; for ``ls`` one stage for each device.
    """
    everyone = tuple(rank for ranks in plan.ranks for rank in ranks)
    num_blocks = plan.cuts[-1]
    if mode == "dp":
        return tuple(Pass((Work(0, (i,), everyone),), False) for i in range(num_blocks))
    stages = tuple(
        Work(first if mode != "ls" else 0, tuple(range(first, last)), ranks)
        for (first, last), ranks in zip(pairwise(plan.cuts), plan.ranks, strict=True)
    )
    return (Pass(stages, mode != "ls"),)


def plan_mode(
    mode: Mode, profile: RelayProfile, num_devices: int, memory_limit: int | None = None
) -> RelayPlan:
    """The distribution of blocks that a mode uses.

    Raises:
        PartitionError: There is no such distribution.
    """
    batch, blocks = profile.batch_size, profile.blocks
    if mode in {"ir", "dp"}:
        return profile.priced(RelayPlan((0, len(blocks)), (num_devices,)), memory_limit)
    if mode != "ls":
        width = None if mode == "ahd" else 1
        return distribute(profile, num_devices, memory_limit=memory_limit, max_width=width)

    def seconds(first: int, last: int, _width: int = 1) -> float:
        """Of a device that has whole blocks, and runs the teacher from its first block."""
        students = sum(block.student[batch] + block.update for block in blocks[first:last])
        return sum(block.teacher[batch] for block in blocks[:last]) + students

    found = distribute(
        profile, num_devices, memory_limit=memory_limit, max_width=1, seconds=seconds
    )
    return replace(found, stage_seconds=tuple(starmap(seconds, pairwise(found.cuts))))


def seconds_per_batch(mode: Mode, plan: RelayPlan, profile: RelayProfile) -> float:
    """Seconds per batch from the costs of the blocks alone, on devices that never wait."""
    if mode != "dp":
        return plan.step_seconds
    width = plan.num_devices
    share = largest_share(width, profile.batch_size)
    teachers = accumulate(block.teacher[share] for block in profile.blocks)
    return sum(
        teacher + block.student[share] + block.update + profile.reduction_seconds(n, n + 1, width)
        for n, (teacher, block) in enumerate(zip(teachers, profile.blocks, strict=True))
    )
