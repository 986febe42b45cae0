"""Training steps that optimize by hand, and what is noted while they train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from pytorch_lightning import Callback as OtherCallback
from torch import Tensor, nn

from tests.exactness.modules import ema_by_hand
from tests.integration.trainings import (
    Session,
    Trained,
    Training,
)


@dataclass(frozen=True)
class ByHand:
    """Changes a module (``Byol`` of the exactness tests) into one that optimizes by hand.

    Attributes:
        step: Its step.
        configure: Its optimizers, from the module.
    """

    step: Callable[[Any, Any, int], Any]
    configure: Callable[[Any], Any]

    def __call__(self, module: Any) -> None:
        module.automatic_optimization = False
        module.probe = nn.Linear(6, 1)  # lives with the loss
        module.training_step = lambda batch, batch_idx: self.step(module, batch, batch_idx)
        module.configure_optimizers = lambda: self.configure(module)


def calls(module: Any, batch: Any) -> tuple[list[Tensor], list[Tensor]]:
    if module.ema == "by hand":
        ema_by_hand(module.teacher, module.student[0])
    students = [module.student(view) for view in batch["views"]]
    with torch.no_grad():
        teachers = [module.teacher(view) for view in batch["views"]]
    return students, teachers


def distance(students: list[Tensor], teachers: list[Tensor]) -> Tensor:
    pairs = zip(students, reversed(teachers), strict=True)
    loss: Tensor = sum(-F.cosine_similarity(p, z).mean() for p, z in pairs)  # type: ignore[assignment]
    return loss + 0.1 * students[0].mean(0).square().sum()


def body_and_tail(module: Any) -> Any:
    """Two optimizers over parts of several stages, the second with a head of the loss rank."""
    body = torch.optim.SGD(module.student[0].parameters(), 0.1, momentum=0.9, weight_decay=1e-2)
    tail = torch.optim.AdamW(
        [{"params": module.student[2].parameters()},
         {"params": module.probe.parameters(), "weight_decay": 0.0}], lr=0.01, weight_decay=0.1,
    )  # fmt: skip
    schedulers = [
        torch.optim.lr_scheduler.StepLR(body, 2, 0.5),
        torch.optim.lr_scheduler.ExponentialLR(tail, 0.7),
    ]
    return [body, tail], schedulers


def network_and_probe(module: Any) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD(module.student.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2),
        torch.optim.Adam(module.probe.parameters(), lr=0.01),
    ]


def one(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)


def two_losses(module: Any, batch: Any, batch_idx: int) -> Any:
    """Two backwards, two optimizers, clipping, a scheduler per batch and one per epoch."""
    body, tail = module.optimizers()
    students, teachers = calls(module, batch)
    body.zero_grad()
    tail.zero_grad()
    loss = distance(students, teachers)
    guess = F.mse_loss(module.probe(students[0]).squeeze(1), batch["weight"])
    module.manual_backward(loss, retain_graph=True)
    module.manual_backward(guess)
    module.clip_gradients(body, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
    module.clip_gradients(tail, gradient_clip_val=0.01, gradient_clip_algorithm="value")
    body.step()
    tail.step()
    per_batch, per_epoch = module.lr_schedulers()
    per_batch.step()
    if module.trainer.is_last_batch:
        per_epoch.step()
    module.log("train_loss", (loss + guess).detach(), batch_size=1)
    return loss + guess


def sample_by_sample(module: Any, batch: Any, batch_idx: int) -> Any:
    """Means over the samples only, as replicas of a pipeline need them; every other batch steps."""
    body, tail = module.optimizers()
    students, teachers = calls(module, batch)
    loss = -F.cosine_similarity(students[0], teachers[1]).mean() / 2
    guess = F.mse_loss(module.probe(students[1]).squeeze(1), batch["weight"]) / 2
    module.manual_backward(loss)
    module.manual_backward(guess)
    if batch_idx % 2 == 1:
        module.clip_gradients(body, gradient_clip_val=0.1)
        for optimizer in (tail, body):
            optimizer.step()
            optimizer.zero_grad()
    return loss + guess


def accumulated(module: Any, batch: Any, batch_idx: int) -> Any:
    """A step every other batch, and one that returns nothing."""
    optimizer = module.optimizers()
    students, teachers = calls(module, batch)
    loss = distance(students, teachers) / 2
    module.manual_backward(loss)
    if batch_idx % 2 == 1:
        module.clip_gradients(optimizer, gradient_clip_val=0.05)
        optimizer.step()
        optimizer.zero_grad()


def adversarial(module: Any, batch: Any, batch_idx: int) -> Any:
    """A critic beside the loss, which learns first; the network sees what it learned."""
    network, critic = module.optimizers()
    students, teachers = calls(module, batch)
    module.toggle_optimizer(critic)
    critique = F.softplus(module.probe(students[0].detach())).mean()
    critique = critique + F.softplus(-module.probe(teachers[0])).mean()
    critic.zero_grad()
    module.manual_backward(critique)
    critic.step()
    module.untoggle_optimizer(critic)
    with network.toggle_model():
        loss = distance(students, teachers) + F.softplus(-module.probe(students[0])).mean()
        network.zero_grad()
        module.manual_backward(loss)
        network.step()
    return {"loss": loss, "critique": critique.detach()}


def alternating(module: Any, batch: Any, batch_idx: int) -> Any:
    """Another part of the network learns from each batch."""
    chosen = module.optimizers()[batch_idx % 2]
    with module.toggled_optimizer(chosen):
        students, teachers = calls(module, batch)
        loss = distance(students, teachers) + module.probe(students[0]).square().mean()
        module.manual_backward(loss)
        chosen.step()
        chosen.zero_grad()
    return loss


def now_and_then(module: Any, batch: Any, batch_idx: int) -> Any:
    """Some batches teach the probe only: the network keeps its weights, whatever their decay."""
    network, probe = module.optimizers()
    students, _ = calls(module, batch)
    network.zero_grad()
    probe.zero_grad()
    features = students[0] if batch_idx % 2 == 0 else students[0].detach()
    loss = F.mse_loss(module.probe(features).squeeze(1), batch["weight"])
    module.manual_backward(loss)
    network.step()
    probe.step()
    return loss


def without_lightning(module: Any, batch: Any, batch_idx: int) -> Any:
    """The optimizers themselves, their learning rates written by hand."""
    body, tail = module.optimizers(use_pl_optimizer=False)
    for group in body.param_groups:
        group["lr"] *= 0.9
    students, teachers = calls(module, batch)
    loss = distance(students, teachers) + module.probe(students[0]).square().mean()
    module.zero_grad()
    loss.backward()
    body.step()
    tail.step()
    module.lr_schedulers()[1].step()
    return loss


class Notes(Callback, OtherCallback):
    """What every rank should agree on, batch by batch; and the optimizers at the end."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []
        self.steps: list[int] = []
        self.scales: list[float] = []
        self.hooks: list[str] = []
        self.states: list[Any] = []

    def on_before_backward(self, *_: Any) -> None:
        self.hooks.append("before backward")

    def on_after_backward(self, *_: Any) -> None:
        self.hooks.append("after backward")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.hooks.append(f"step of {trainer.optimizers.index(optimizer)}")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        groups = [group for each in trainer.optimizers for group in each.param_groups]
        self.rates.append([group["lr"] for group in groups])
        self.steps.append(trainer.global_step)
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            self.scales.append(trainer.precision_plugin.scaler.get_scale())

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.states = [trainer.strategy.optimizer_state(each) for each in trainer.optimizers]


@dataclass
class Noted:
    """What a rank knows in the end."""

    trained: Trained
    rates: list[list[float]]
    steps: list[int]
    scales: list[float]
    hooks: list[str] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)


def train_and_note(training: Training) -> Noted:
    """Fit, and tell."""
    notes = Notes()
    trained = Session(training, notes).fit().trained
    return Noted(trained, notes.rates, notes.steps, notes.scales, notes.hooks, notes.states)


def train_scaled(training: Training) -> Noted:
    """The same with 16-bit precision's scaler; float64 is left as it is."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    trainer = {**training.trainer, "plugins": plugins}
    return train_and_note(Training(**{**vars(training), "trainer": trainer}))
