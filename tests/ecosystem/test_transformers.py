"""Networks of transformers train in the pipeline what they train on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks.networks.hugging_face import entries
from lightning_tspipe import TSPipeStrategy
from lightning_tspipe.networks.arguments import tensors_in
from tests.choosing import some_of
from tests.integration.jobs import run
from tests.integration.trainings import CLOSE, Epochs, Session, Trained, Training

SIZES = (4, 4, 3)
OPTIONS = {"num_microbatches": 2, "costs": "flops"}
ROUGH = {"rtol": 1e-6, "atol": 1e-9}
"""For those that compute norms, or what experts weigh, in float32 whatever they are given."""


class Distils(LightningModule):
    """Matches all that a smaller or equal network returns.

    Args:
        name: Of an architecture.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self._entry = entries()[name]
        self.student: nn.Module = without_chance(self._entry.build())
        self.teacher: nn.Module = without_chance(self._entry.build()).requires_grad_(False)

    def batches(self) -> list[Any]:
        torch.manual_seed(1)
        return [self._entry.call(size) for size in SIZES]

    def training_step(self, batch: Any, _: int) -> Tensor:
        args, kwargs = batch
        with torch.no_grad():
            aims = floating(self.teacher(*args, **kwargs))
        made = floating(self.student(*args, **kwargs))
        return torch.stack([mse_loss(*pair) for pair in zip(made, aims, strict=True)]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.student.parameters(), lr=0.05, momentum=0.9)


def without_chance(network: nn.Module) -> nn.Module:
    """A network that draws nothing: each micro-batch would draw other numbers than the batch."""
    config: Any = network.config
    config._experts_implementation = "eager"  # others refuse float64
    config.pos_embed_rescale = None  # DINOv3's
    for module in network.modules():
        own = {name: 0.0 for name, value in vars(module).items() if is_chance(name, value)}
        vars(module).update(own)
    return network


def is_chance(name: str, value: Any) -> bool:
    return isinstance(value, float) and (name == "p" or "drop" in name)


def floating(returned: Any) -> list[Tensor]:
    return [each for each in tensors_in(returned.to_tuple()) if each.is_floating_point()]


def train(training: Training, names: Sequence[str]) -> list[Trained]:
    found = []
    for name in names:
        module = Distils(name)
        strategy: Any = TSPipeStrategy(**OPTIONS) if training.num_ranks > 1 else "auto"
        session = Session(training, module=module, strategy=strategy)
        found.append(session.fit(Epochs([module.batches()])).trained)
    return found


GROUPS = {
    "experts": ("Mixtral",),
    "one of each": ("Llama", "DeepseekV3", "Swin", "T5"),
    "dense decoders": ("Qwen3", "GPTNeoX", "Cohere", "GPT2"),
    "more experts": ("Qwen3Moe", "GptOss"),
    "float32 inside": ("Gemma2", "Gemma3", "DINOv3ViT"),
    "images": ("Dinov2", "ViT", "Swinv2", "Segformer", "SiglipVision", "IJepa"),
    "encoders": ("ModernBert", "DebertaV2", "Albert"),
    "two towers": ("Bart", "WhisperEncoder"),
    "states": ("Mamba", "Falcon", "OPT"),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("group", some_of(GROUPS, slow=["two towers", "experts"]))
def test_it_trains_the_same(group: str, tmp_path: Path) -> None:
    names, together = GROUPS[group], Training(num_ranks=2)
    alone = replace(together, strategy="auto", num_ranks=1)
    (expected,) = run(train, alone, names, num_ranks=1, folder=tmp_path / "alone", seconds=200.0)
    actual, _ = run(train, together, names, folder=tmp_path / "together", seconds=200.0)
    close = ROUGH if group == "float32 inside" else CLOSE
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.losses, other.losses, **close)
        torch.testing.assert_close(one.weights, other.weights, **close)
