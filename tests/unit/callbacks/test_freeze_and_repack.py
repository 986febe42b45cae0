from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_tspipe import (
    AutoCache,
    ConfigurationError,
    FreezeAndRepack,
    GradientNormFreeze,
    ScheduledFreeze,
)
from lightning_tspipe.callbacks.freezing import Decision, Observed, decide, layers_of

BATCHES = [torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
           for n in range(3)]  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.norm(self.linear(x)).tanh()
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.blocks(self.stem(x * self.scale))))
        return out


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.student = Net().double()
        self.losses: list[float] = []

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.student(batch).square().sum(1).mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


def fit(
    callback: FreezeAndRepack,
    folder: Path,
    *others: Callback,
    epochs: int = 3,
    ckpt_path: Path | None = None,
) -> Classifier:
    module = Classifier()
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, max_epochs=epochs,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback, *others],
        default_root_dir=folder,
    )  # fmt: skip
    loader: Any = Stateful(BATCHES)
    trainer.fit(module, loader, ckpt_path=ckpt_path, weights_only=False)
    return module


def by_hand(frozen: dict[int, int], epochs: int = 3) -> Classifier:
    """The same in a few plain lines: stem with scale, then the blocks, one after another."""
    module = Classifier()
    optimizer = module.configure_optimizers()
    net = module.student
    for epoch in range(epochs):
        number = frozen.get(epoch, 0)
        parts = [nn.ModuleList([net.stem]), *net.blocks][:number]
        parameters = [p for part in parts for p in part.parameters()] + [net.scale][: bool(number)]
        for parameter in parameters:
            parameter.requires_grad_(requires_grad=False)
            parameter.grad = None
        for part in parts:
            part.eval()
        for batch in BATCHES:
            optimizer.zero_grad()
            module.training_step(batch).backward()
            optimizer.step()
    return module


def test_layers_are_blocks_in_the_order_of_the_forward() -> None:
    module = Classifier()
    layers = layers_of(module, ["student"])
    names = ["stem", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert [layer.name for layer in layers] == [f"student.{name}" for name in names]
    assert layers[0].parameters[0] == "student.scale"
    # Dropout has nothing to train: it belongs to the block before it.
    assert layers[3].modules[-1] is module.student.drop
    found = [name for layer in layers for name in layer.parameters]
    assert sorted(found) == sorted(name for name, _ in module.named_parameters())


def test_layers_that_the_user_names() -> None:
    module = Classifier()
    names = ["student.stem", "student.blocks.1", "student.head"]
    layers = layers_of(module, ["student"], names)
    assert [layer.name for layer in layers] == names
    assert "student.blocks.2.linear.weight" in layers[1].parameters
    with pytest.raises(ConfigurationError, match="in the order in which they are registered"):
        layers_of(module, ["student"], ["student.head", "student.stem"])


def test_a_parameter_of_two_layers_is_refused() -> None:
    module = Classifier()
    module.student.blocks[2].linear.weight = module.student.stem.weight
    with pytest.raises(ConfigurationError, match="the same parameter in two layers"):
        layers_of(module, ["student"])


def test_frozen_layers_are_as_in_a_loop_by_hand(tmp_path: Path) -> None:
    callback = FreezeAndRepack(ScheduledFreeze({1: 2, 2: 4}), num_active=1)
    module = fit(callback, tmp_path)
    expected = by_hand({1: 2, 2: 4})
    assert module.losses == expected.losses
    torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert [entry["num_frozen"] for entry in callback.history] == [2, 4]
    assert not any(p.requires_grad for p in module.student.blocks.parameters())
    assert not module.student.blocks[0].norm.training
    assert module.student.head.training


def observed(norms: tuple[float, ...], frozen: int = 0, freezable: int | None = None) -> Observed:
    names = tuple(f"layer{n}" for n in range(len(norms)))
    return Observed(1, names, frozen, len(norms) - 1 if freezable is None else freezable, norms)


@pytest.mark.parametrize(
    ("norms", "frozen", "freezable", "expected"),
    [
        ((9, 8, 7, 6, 5, 4, 3, 2, 1), 0, 8, 3),  # alpha decides
        ((9, 1, 7, 6, 5, 4, 3, 2, 1.5), 0, 8, 1),  # the smallest norm decides
        ((0, 0, 0, 6, 5, 4, 3, 2, 1), 3, 8, 5),  # of the six that are left, two
        ((0, 0, 0, 1, 5, 4, 3, 2, 9), 3, 8, 3),
        ((9, 8, 7, 6, 5, 4, 3, 2, 1), 0, 2, 2),  # the last ones never
    ],
)
def test_the_rule_of_the_paper(
    norms: tuple[float, ...], frozen: int, freezable: int, expected: int
) -> None:
    decision = GradientNormFreeze(1 / 3)(observed(norms, frozen, freezable))
    assert decision.num_frozen == expected
    assert "smallest gradient norm" in decision.reason


def test_gradient_norms_are_those_of_the_epoch(tmp_path: Path) -> None:
    seen: list[Observed] = []

    def policy(now: Observed) -> int:
        seen.append(now)
        return 0

    fit(FreezeAndRepack(policy), tmp_path, epochs=2)
    module = Classifier()
    optimizer = module.configure_optimizers()
    squares = 0.0
    for batch in BATCHES:
        optimizer.zero_grad()
        module.training_step(batch).backward()
        squares += sum(float((p.grad**2).sum()) for p in module.student.head.parameters()
                       if p.grad is not None)  # fmt: skip
        optimizer.step()
    assert [now.epoch for now in seen] == [0, 1]
    assert not seen[0].norms
    assert seen[1].norms[-1] == pytest.approx((squares / len(BATCHES)) ** 0.5, rel=1e-12)


class SaveAt(Callback):
    """Saves after some optimizer step."""

    def __init__(self, step: int, path: Path) -> None:
        self._step, self._path = step, path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            trainer.save_checkpoint(self._path)


@pytest.mark.parametrize("step", [5, 6])  # within an epoch, and at the end of one
def test_a_run_that_stops_goes_on_with_what_is_frozen(step: int, tmp_path: Path) -> None:
    def callback() -> FreezeAndRepack:
        return FreezeAndRepack(GradientNormFreeze(0.6), num_active=1)

    path = tmp_path / "stopped.ckpt"
    whole, again = callback(), callback()
    expected = fit(whole, tmp_path, SaveAt(step, path), epochs=4)
    found = fit(again, tmp_path, epochs=4, ckpt_path=path)
    assert len(whole.history) > 1
    assert again.history[:1] == whole.history[:1]
    assert [e["num_frozen"] for e in again.history] == [e["num_frozen"] for e in whole.history]
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=0)


class Stateful:
    """A loader that knows where it was."""

    def __init__(self, batches: list[Tensor]) -> None:
        self._batches, self._next = batches, 0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Any:
        first = self._next % len(self._batches)  # the end is not always asked for
        for number in range(first, len(self._batches)):
            self._next = number + 1
            yield self._batches[number]

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.5, 2.0, float("nan"), "1/3"])
def test_a_share_that_is_none(alpha: Any) -> None:
    with pytest.raises(ConfigurationError, match="greater than 0 and less than 1"):
        GradientNormFreeze(alpha)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FreezeAndRepack("norm"), "a function of what was observed"),  # type: ignore[arg-type]
        (lambda: FreezeAndRepack(num_active=0), "at least 1 layer must stay active"),
        (lambda: ScheduledFreeze({}), "give the number of frozen layers"),
        (lambda: ScheduledFreeze({1: 4, 2: 3}), "a frozen layer stays frozen"),
        (lambda: GradientNormFreeze(start_epoch=0), "needs the gradients of an epoch"),
    ],
)
def test_arguments_that_cannot_be(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (5, "something must be trained"),
        (1, "a frozen layer stays frozen"),
        ("all", "not the number of frozen layers"),
        (True, "not the number of frozen layers"),
    ],
)
def test_decisions_that_cannot_be(said: Any, message: str) -> None:
    now = observed((0, 0, 3, 4, 5), frozen=2)
    assert decide(lambda _: 3, now) == Decision(3, "decided by <lambda>")
    with pytest.raises(ConfigurationError, match=message):
        decide(lambda _: said, now)


def test_everything_frozen_ends_the_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="something must be trained"):
        fit(FreezeAndRepack(lambda seen: 5 * seen.epoch), tmp_path)
    with pytest.raises(ConfigurationError, match="nothing can freeze"):
        fit(FreezeAndRepack(num_active=5), tmp_path)


def test_a_schedule_that_freezes_too_much_is_refused_at_the_start(tmp_path: Path) -> None:
    """Not in its epoch, hours later."""
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=3, default_root_dir=tmp_path, logger=False,
        callbacks=[FreezeAndRepack(ScheduledFreeze({1: 1, 2: 5}))], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match="freezes 5 of 5 layers, but at most 3 may"):
        trainer.fit(Classifier(), Stateful(BATCHES))
    assert not trainer.global_step


class Distilled(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = deepcopy(self.student).requires_grad_(False)

    def training_step(self, batch: Tensor) -> Tensor:
        distance: Tensor = (self.student(batch) - self.teacher(batch)).square().sum()
        return distance


def test_a_step_that_calls_a_teacher_is_refused_before_it_runs(tmp_path: Path) -> None:
    trainer = Trainer(
        strategy="tspipe", accelerator="cpu", devices=1, callbacks=[FreezeAndRepack()],
        max_epochs=1, default_root_dir=tmp_path, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Distilled()
    with pytest.raises(ConfigurationError, match="where training_step calls the student only"):
        trainer.fit(module, Stateful(BATCHES))
    assert not trainer.global_step


def test_what_cannot_be_cached_is_told_or_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lightning_tspipe"):
        fit(FreezeAndRepack(ScheduledFreeze({1: 2})), tmp_path)
    assert "are not cached: activations are cached by sample" in caplog.text
    with pytest.raises(ConfigurationError, match=r"WithIds\(dataset\)"):
        fit(FreezeAndRepack(ScheduledFreeze({1: 2}), cache=AutoCache()), tmp_path)
    assert FreezeAndRepack(cache=None).cache is None
    with pytest.raises(ConfigurationError, match="give 'auto', AutoCache"):
        FreezeAndRepack(cache="always")  # type: ignore[arg-type]
