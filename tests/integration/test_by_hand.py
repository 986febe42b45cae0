"""Optimization by hand, and loss scaling: what all ranks must do alike is done alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tspipe import DelayedTeacherUpdate, MomentumEMA
from tests.integration.by_hand import (
    ByHand,
    Noted,
    accumulated,
    adversarial,
    alternating,
    body_and_tail,
    network_and_probe,
    now_and_then,
    one,
    train_and_note,
    train_scaled,
    two_losses,
    without_lightning,
)
from tests.integration.jobs import run
from tests.integration.trainings import CLOSE, Training, delayed


def averaged() -> list[Any]:
    return [MomentumEMA(0.9, student="student.0"), DelayedTeacherUpdate()]


def no_own_ema(module: Any) -> None:
    module.ema = "none"


BY_HAND = Training(
    "Byol-group-2-by hand", "instance", {"num_microbatches": 1}, callbacks=delayed,
    change=ByHand(two_losses, body_and_tail),
)  # fmt: skip


def assert_equal(
    training: Training, folder: Path, function: Any = train_and_note
) -> tuple[Noted, list[Noted]]:
    """One device and every rank agree; also on hooks and counters, batch by batch.

    ``on_after_backward`` runs when all gradients are there: of several backwards in one batch, that
    is when an optimizer of the networks asks for them. All other hooks run in the order of one
    device; with one backward in a batch, that one too.
    """
    alone = replace(training, strategy="auto", num_ranks=1, options={})
    if training.options.get("schedule", "tspipe") != "tspipe":
        alone = replace(alone, callbacks=list)
    expected = run(function, alone, num_ranks=1, folder=folder)[0]
    ranks = run(function, training, num_ranks=training.num_ranks, folder=folder)
    assert len(expected.rates) >= 6
    assert len(set(map(float, expected.trained.losses))) == len(expected.trained.losses)
    for rank in ranks:  # in a hook, each knows it
        torch.testing.assert_close(rank.trained.losses, expected.trained.losses, **CLOSE)
    assert ranks[0].trained.weights.keys() == expected.trained.weights.keys()
    torch.testing.assert_close(ranks[0].trained.weights, expected.trained.weights, **CLOSE)
    torch.testing.assert_close(
        [state["state"] for state in ranks[0].states],
        [state["state"] for state in expected.states],
        **CLOSE,
    )
    for rank in ranks:
        assert rank.rates == expected.rates
        assert rank.steps == expected.steps
        assert rank.scales == expected.scales
        assert rank.hooks == ranks[0].hooks
        assert without_after(rank.hooks) == without_after(expected.hooks)
        assert len(rank.hooks) == len(expected.hooks)
        if getattr(training.change, "step", None) not in SEVERAL_BACKWARDS:
            assert rank.hooks == expected.hooks
    return expected, ranks


SEVERAL_BACKWARDS = {two_losses, adversarial}


def without_after(hooks: list[str]) -> list[str]:
    return [hook for hook in hooks if hook != "after backward"]


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (1, {"num_microbatches": 2}),
        (2, {"num_microbatches": 2}),
        (3, {"num_microbatches": 1}),
        (2, {"num_microbatches": 1, "schedule": "gpipe"}),
        pytest.param(3, {"num_microbatches": 3, "schedule": "sequential"}, marks=pytest.mark.slow),
        pytest.param(3, {"num_microbatches": 2, "split_backward": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_several_losses_optimizers_and_schedulers(
    num_ranks: int, options: dict[str, Any], tmp_path: Path
) -> None:
    training = replace(BY_HAND, num_ranks=num_ranks, options=options)
    expected, _ = assert_equal(training, tmp_path)
    assert expected.steps == list(range(2, 18, 2))
    assert expected.rates[-1] == pytest.approx([0.1 / 16, 0.0049, 0.0049])


STEPS = {
    "accumulated": ByHand(accumulated, one),
    "adversarial": ByHand(adversarial, network_and_probe),
    "alternating": ByHand(alternating, body_and_tail),
    "now and then": ByHand(now_and_then, network_and_probe),
    "without Lightning": ByHand(without_lightning, body_and_tail),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_order_of_calls(name: str, num_ranks: int, tmp_path: Path) -> None:
    # Another step than every one returns a loss.
    sizes = ((5, 5, 4, 2), (5, 5, 4, 2))
    training = replace(BY_HAND, change=STEPS[name], num_ranks=num_ranks, sizes=sizes)
    assert_equal(training, tmp_path)


def test_the_other_lightning(tmp_path: Path) -> None:
    assert_equal(replace(BY_HAND, world="pytorch_lightning"), tmp_path)


def test_steps_are_counted(tmp_path: Path) -> None:
    """Two steps per batch: the fourth batch is not the first one too many."""
    training = replace(BY_HAND, trainer={"max_steps": 11, "max_epochs": None})
    expected, _ = assert_equal(training, tmp_path)
    assert expected.steps == [2, 4, 6, 8, 10, 12]


def test_an_average_of_the_module_after_its_steps(tmp_path: Path) -> None:
    training = replace(BY_HAND, callbacks=averaged, change=_TwoLossesWithoutEma())
    assert_equal(training, tmp_path)


class _TwoLossesWithoutEma:
    step = staticmethod(two_losses)

    def __call__(self, module: Any) -> None:
        no_own_ema(module)
        ByHand(two_losses, body_and_tail)(module)


class Overflow:
    """Overflows in some batches, each time on another rank.

    Attributes:
        change: Changes the module before.
    """

    def __init__(self, change: Any) -> None:
        self.change = change
        self.step = getattr(change, "step", None)

    def __call__(self, module: Any) -> None:
        self.change(module)

        def on_after_backward() -> None:
            found = list(module.student.parameters())
            batch = module.trainer.fit_loop.total_batch_idx
            parameter = {1: found[0], 2: found[-1], 5: found[len(found) // 2]}.get(batch)
            if parameter is not None and parameter.grad is not None:
                parameter.grad.view(-1)[0] = float("inf")

        module.on_after_backward = on_after_backward


SCALED = Training(
    "Byol-group-2-by hand", "instance", {"num_microbatches": 2}, optimizer="adamw",
    callbacks=averaged, change=Overflow(no_own_ema),
)  # fmt: skip


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_all_ranks_skip_a_step_that_overflowed_on_one(num_ranks: int, tmp_path: Path) -> None:
    training = replace(SCALED, num_ranks=num_ranks, trainer={"gradient_clip_val": 0.05})
    expected, _ = assert_equal(training, tmp_path, train_scaled)
    assert expected.scales == [8.0, 4.0, 2.0, 2.0, 4.0, 2.0, 2.0, 4.0]
    assert expected.steps == list(range(1, 9))  # Lightning counts those that were skipped


def test_loss_scaling_by_hand(tmp_path: Path) -> None:
    training = replace(BY_HAND, num_ranks=3, change=Overflow(BY_HAND.change))
    expected, _ = assert_equal(training, tmp_path, train_scaled)
    assert expected.scales[:2] == [16.0, 8.0]
