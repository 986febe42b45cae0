"""torch's own pipeline, as an independent oracle."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from tests.exactness.setting import Setting, State, gradients_of


def torch_gpipe(setting: Setting, cuts: tuple[int, ...]) -> tuple[float | None, State]:
    """One rank of a step of ``ScheduleGPipe`` on the classifier's first batch.

    Args:
        setting: A ``Classifier``; each rank is one stage.
        cuts: First layer of each stage, and their number.

    Returns:
        The loss on the last stage, elsewhere None; the gradients of this stage.
    """
    rank, num_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    module = setting.build()
    ((images, labels),) = setting.epochs(module)[0]
    layers = module.get_submodule("net")[cuts[rank] : cuts[rank + 1]]  # type: ignore[index]
    stage = PipelineStage(layers, rank, num_ranks, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, setting.num_microbatches, loss_fn=F.cross_entropy)
    losses: list[torch.Tensor] = []
    is_last = rank == num_ranks - 1
    inputs = (images,) if rank == 0 else ()
    schedule.step(*inputs, target=labels if is_last else None, losses=losses if is_last else None)
    dist.barrier()
    dist.destroy_process_group()
    loss = torch.stack(losses).mean().item() if is_last else None
    return loss, gradients_of(dict(module.named_parameters()))
