"""What a step draws between two networks that are trained, for both and for the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as fn

from lightning_tspipe import TSPipeStrategy
from lightning_tspipe.capture.trace import Networks, Tracer
from lightning_tspipe.cli.checking import draw_alike
from lightning_tspipe.errors import CaptureError
from tests.integration.comparing import alone
from tests.integration.jobs import run
from tests.integration.trainings import CLOSE, Epochs, Session, Trained, Training

TRAINING = Training(options={"num_microbatches": 2, "costs": "flops"}, sizes=((4, 4, 4), (4, 3, 4)))
Step = Callable[["Encoding", Tensor, Tensor], Tensor]


class Encoding(LightningModule):
    """An encoder, and what reads a noisy code."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.mean, self.scale = nn.Linear(8, 4), nn.Linear(8, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        self.denoiser = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(self, *batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def variational(module: Encoding, x: Tensor, y: Tensor) -> Tensor:
    """The reparametrization trick, and then noise for the loss."""
    hidden = module.encoder(x)
    mean, scale = module.mean(hidden), module.scale(hidden)
    made = module.decoder(mean + torch.randn_like(mean) * (0.5 * scale).exp())
    prior = (mean.square() + scale.exp() - 1 - scale).mean()
    return fn.mse_loss(made, y + 0.1 * torch.rand_like(y)) + 0.1 * prior


def latent_diffusion(module: Encoding, x: Tensor, _: Tensor) -> Tensor:
    """One noise, which goes into a network and is what it is to tell."""
    code = module.encoder(x)
    noise, time = torch.randn_like(code), torch.rand_like(code[:, :1])
    told = module.denoiser(code * (1 - time) + noise * time)
    return fn.mse_loss(told, noise)


def with_dropout(module: Encoding, x: Tensor, y: Tensor) -> Tensor:
    """As within a network."""
    return fn.mse_loss(module.decoder(module.mean(fn.dropout(module.encoder(x)))), y)


def with_dropout_and_loss(module: Encoding, x: Tensor, y: Tensor) -> Tensor:
    hidden = fn.dropout(module.encoder(x))
    return fn.mse_loss(module.decoder(module.mean(hidden)), y) + hidden.square().mean()


def with_dropout_for_two(module: Encoding, x: Tensor, y: Tensor) -> Tensor:
    hidden = fn.dropout(module.encoder(x))
    return fn.mse_loss(module.decoder(module.mean(hidden) + module.scale(hidden)), y)


def sampled(module: Encoding, x: Tensor, y: Tensor) -> Tensor:
    code = module.mean(module.encoder(x))
    code = torch.normal(code, torch.ones_like(code))
    return fn.mse_loss(module.decoder(code), y) + code.square().mean()


def train(training: Training, step: Step) -> Trained:
    made = torch.Generator().manual_seed(1)
    epochs = [
        [tuple(torch.randn(n, 6, generator=made) for _ in range(2)) for n in sizes]
        for sizes in training.sizes
    ]
    module, strategy = Encoding(step), TSPipeStrategy(**training.options)
    torch.manual_seed(0)
    if training.strategy == "auto":
        draw_alike(module)
        return Session(training, module=module).fit(Epochs(epochs)).trained
    return Session(training, module=module, strategy=strategy).fit(Epochs(epochs)).trained


@pytest.mark.parametrize("step", [variational, latent_diffusion])
def test_drawn_once_for_all(step: Step, tmp_path: Path) -> None:
    expected = run(train, alone(TRAINING), step, num_ranks=1, folder=tmp_path / "alone")[0]
    actual = run(train, TRAINING, step, num_ranks=2, folder=tmp_path)[0]
    torch.testing.assert_close(actual.losses, expected.losses, **CLOSE)
    torch.testing.assert_close(actual.weights, expected.weights, **CLOSE)


@pytest.mark.slow
def test_dropout_between_networks_is_of_one_seed(tmp_path: Path) -> None:
    training = replace(
        TRAINING, options={**TRAINING.options, "student": ["encoder", "mean", "decoder"]}
    )
    one, other = (
        run(train, training, with_dropout, num_ranks=2, folder=tmp_path / name)[0]
        for name in ("one", "other")
    )
    assert torch.equal(torch.stack(one.losses), torch.stack(other.losses))


@pytest.mark.parametrize("step", [with_dropout_and_loss, with_dropout_for_two, sampled])
def test_what_would_be_drawn_twice_is_refused(step: Step) -> None:
    module = Encoding(step)
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    networks = Networks(("encoder", "mean", "scale", "decoder"))
    tracer = Tracer(module, networks, torch.device("cpu"))
    with pytest.raises(CaptureError, match=r"drawn from an output of another network.*rand_like"):
        tracer.trace(lambda batch: module.training_step(batch, 0), (x, y), 0)
