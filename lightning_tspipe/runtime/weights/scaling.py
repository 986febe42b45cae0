"""Loss scaling of 16-bit precision: all ranks skip a step, or none does."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def shared_scaler(scaler: torch.amp.GradScaler, device: torch.device) -> torch.amp.GradScaler:
    """A scaler like the given one that skips a step if any rank found an overflow.

    Args:
        scaler: How one rank would scale.
        device: Where this rank computes.
    """
    if isinstance(scaler, ShardedGradScaler) or not scaler.is_enabled():
        return scaler
    shared = ShardedGradScaler(device.type, process_group=dist.group.WORLD)
    shared.load_state_dict(scaler.state_dict())
    return shared
