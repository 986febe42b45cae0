"""One rank of a training by ``torch.distributed.pipelining``, with its own schedules.

python -m benchmarks.schedules.torch_side zbv linear rank size port seconds.json
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from benchmarks.schedules.stages import WINDOW, batches, stages

WINDOWS = 6


def schedule_of(name: str, kind: str, rank: int, size: int) -> tuple[Any, list[Any]]:
    """The schedule of a rank, and its stages."""
    number = size if name == "1f1b" else 2 * size
    places = [stage for stage in range(number) if _rank_of(stage, name, size) == rank]
    modules = stages(kind, number)
    own: list[Any] = [PipelineStage(modules[s], s, number, torch.device("cpu")) for s in places]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    if name == "1f1b":
        return Schedule1F1B(own[0], WINDOW, loss), own
    made = ScheduleInterleaved1F1B if name == "interleaved" else ScheduleZBVZeroBubble
    return made(own, WINDOW, loss), own


def _rank_of(stage: int, name: str, size: int) -> int:
    is_back = name == "zbv" and stage >= size
    return 2 * size - 1 - stage if is_back else stage % size


def main() -> None:
    """Train, and write the seconds of each window but the first."""
    name, kind, rank, size, port, file = sys.argv[1:]
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=int(rank), world_size=int(size))
    schedule, own = schedule_of(name, kind, int(rank), int(size))
    optimizer = torch.optim.SGD([p for s in own for p in s.submod.parameters()], lr=1e-3)
    x = torch.cat(batches())
    target = torch.zeros(()) if kind == "sleeping" else x
    target = target.expand(len(x), 64) if kind == "sleeping" else target
    has_first = any(stage.is_first for stage in own)
    has_last = any(stage.is_last for stage in own)
    ends = []
    for _ in range(WINDOWS):
        optimizer.zero_grad()
        schedule.step(*(x,) * has_first, **({"target": target} if has_last else {}))
        optimizer.step()
        dist.barrier()
        ends.append(time.perf_counter())
    if int(rank) == 0:
        seconds = [b - a for a, b in pairwise(ends)]
        Path(file).write_text(json.dumps(seconds), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
