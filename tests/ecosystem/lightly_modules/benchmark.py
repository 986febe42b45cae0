"""What lightly's benchmark modules have in common: groups, schedule, online validation."""

from __future__ import annotations

from typing import Any

from lightly.models.utils import get_weight_decay_parameters
from lightly.utils.scheduler import CosineWarmupScheduler
from torch import Tensor, nn


def parameter_groups(module: Any, name: str, networks: list[nn.Module]) -> list[dict[str, Any]]:
    """Weight decay for matrices only; none for the classifier."""
    params, params_no_weight_decay = get_weight_decay_parameters(networks)
    return [
        {"name": name, "params": params},
        {"name": f"{name}_no_weight_decay", "params": params_no_weight_decay, "weight_decay": 0.0},
        {
            "name": "online_classifier",
            "params": module.online_classifier.parameters(),
            "weight_decay": 0.0,
        },
    ]


def with_schedule(module: Any, optimizer: Any, num_warmup_epochs: int = 1) -> Any:
    """The optimizer, its learning rate changed after every step."""
    total = int(module.trainer.estimated_stepping_batches)
    scheduler = CosineWarmupScheduler(
        optimizer=optimizer,
        warmup_epochs=int(total / module.trainer.max_epochs * num_warmup_epochs),
        max_epochs=total,
    )
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def validate_online(module: Any, batch: Any, batch_idx: int) -> Tensor:
    """The online classifier on the features of a validation batch."""
    images, targets = batch[0], batch[1]
    features = module.forward(images).flatten(start_dim=1)
    loss, log = module.online_classifier.validation_step((features.detach(), targets), batch_idx)
    module.log_dict(log, prog_bar=True, sync_dist=True, batch_size=len(targets))
    return loss
