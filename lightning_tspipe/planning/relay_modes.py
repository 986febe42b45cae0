"""Modes of blockwise training on several devices: Pipe-BD's, and its baselines.

A *pass* is one forward of the teacher with the work of the students beside it. Relaying needs one
pass per batch; training block by block, as data parallelism does, one for each block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.planning.relay import (
    RelayPlan,
    RelayProfile,
    described,
    distribute,
    fastest,
)

Mode = Literal["tr", "dpu", "ahd", "ir", "dp", "ls"]
MODES: tuple[Mode, ...] = ("tr", "dpu", "ahd", "ir", "dp", "ls")


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
    mode: Mode,
    profile: RelayProfile,
    num_devices: int,
    memory_limit: int | None = None,
) -> RelayPlan:
    """The distribution of blocks that a mode uses.

    Raises:
        PartitionError: There is no such distribution.
    """
    num_blocks = len(profile.blocks)
    limits = None if memory_limit is None else [memory_limit] * num_devices
    if mode in {"ir", "dp"}:
        plan = described(RelayPlan((0, num_blocks), (num_devices,)), profile)
        return within(memory_limit, plan)
    if mode == "ls":
        return within(memory_limit, _packed(profile, num_devices))
    width = None if mode == "ahd" else 1
    if width == 1 and num_blocks < num_devices:
        raise PartitionError(
            f"{num_blocks} blocks for {num_devices} devices: with mode={mode!r} each device needs "
            "one. Let devices share blocks (mode='ahd'), or use fewer devices"
        )
    return distribute(profile, num_devices, memory_limits=limits, max_width=width)


def within(memory_limit: int | None, plan: RelayPlan) -> RelayPlan:
    """The plan, if it fits the memory of each device.

    Raises:
        PartitionError: It does not.
    """
    for stage, held in enumerate(plan.stage_bytes):
        if memory_limit is not None and held > memory_limit:
            names = ", ".join(plan.names[plan.cuts[stage] : plan.cuts[stage + 1]])
            raise PartitionError(
                f"the blocks {names} on one device need {held / 1e6:.1f} MB where "
                f"{plan.widths[stage]} share them, and a device may hold {memory_limit / 1e6:.1f} "
                "MB. Let mode='ahd' divide them, or use a smaller batch or a larger memory_limit"
            )
    return plan


def _packed(profile: RelayProfile, num_devices: int) -> RelayPlan:
    """Contiguous blocks for each device, which runs the teacher from its first block."""
    batch, blocks = profile.batch_size, profile.blocks

    def seconds(first: int, last: int, _width: int = 1) -> float:
        students = sum(block.student[batch] + block.update for block in blocks[first:last])
        return sum(block.teacher[batch] for block in blocks[:last]) + students

    found = fastest(len(blocks), num_devices, 1, seconds, lambda *_: True)
    if found is None:
        raise PartitionError(f"{len(blocks)} blocks for {num_devices} devices: use fewer devices")
    times = tuple(seconds(first, last) for first, last in pairwise(found.cuts))
    return replace(described(found, profile), stage_seconds=times)


def seconds_per_batch(mode: Mode, plan: RelayPlan, profile: RelayProfile) -> float:
    """Seconds per batch from the costs of the blocks alone, on devices that never wait."""
    if mode != "dp":
        return plan.step_seconds
    width = plan.num_devices
    share = -(-profile.batch_size // width)
    return sum(
        sum(other.teacher[share] for other in profile.blocks[: index + 1])
        + block.student[share]
        + block.update
        + profile.reduction_seconds(index, index + 1, width)
        for index, block in enumerate(profile.blocks)
    )
