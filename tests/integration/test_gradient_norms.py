"""What is computed from the gradients of all parameters is that of all ranks, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightly.utils.lars import LARS
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from typing_extensions import override

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.strategy.training.gradient_watch import GradientWatch
from tests.integration.comparing import alone
from tests.integration.jobs import run, run_job
from tests.integration.test_pure_steps import TRAINING, Pair, batches
from tests.integration.trainings import CLOSE, Epochs, Session, Trained, Training

Gradients = list[Tensor]


def gradients_of(module: nn.Module) -> Gradients:
    return [p.grad for p in module.parameters() if p.grad is not None]


@contextmanager
def watched() -> Iterator[nn.Module]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    module(torch.ones(2, 3)).sum().backward()
    watch = GradientWatch(module.parameters())
    watch.start()
    try:
        yield module
    finally:
        watch.stop()


def flagged(module: nn.Module, then: Callable[[Tensor], Any], kind: Any = bool) -> bool:
    """Whether any gradient isn't finite, found out in the loop that writes something."""
    found = False
    with torch.no_grad():
        for parameter in module.parameters():
            assert parameter.grad is not None
            found |= bool(kind(~parameter.grad.isfinite().all()))
            then(parameter)
    return found


class ByTheNorm(torch.optim.SGD):
    """Its step depends on the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norm = nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.div_(norm + 1)
        return super().step(closure)


GLOBAL: dict[str, Callable[[nn.Module], Any]] = {
    "clip": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "Lightning's": lambda m: grad_norm(m, 2),
    "sum": lambda m: sum(g.square().sum() for g in gradients_of(m)),
    "numbers": lambda m: sum(g.norm().item() for g in gradients_of(m)),
    "decisions": lambda m: [g for g in gradients_of(m) if torch.isfinite(g).all()],
    "a flag": lambda m: flagged(m, lambda p: cast("Tensor", p.grad).div_(2)),
    "a count": lambda m: flagged(m, lambda p: p.sub_(cast("Tensor", p.grad)), int),
    "an optimizer": lambda m: ByTheNorm(m.parameters(), lr=0.1).step(),
    "one vector": lambda m: torch.cat([g.flatten() for g in gradients_of(m)]).norm(),
}


@pytest.mark.parametrize("compute", GLOBAL.values(), ids=GLOBAL)
def test_one_number_of_several_gradients(compute: Callable[[nn.Module], Any]) -> None:
    with watched() as module, pytest.raises(ConfigurationError, match=r"at .*test_gradient_norms"):
        compute(module)


@pytest.mark.parametrize("kind", ["foreach", "fused", "loop"])
def test_what_stays_with_each_parameter(kind: str) -> None:
    with watched() as module:
        nn.utils.clip_grad_value_(module.parameters(), 0.5)
        norms = {name: p.grad.norm() for name, p in module.named_parameters() if p.grad is not None}
        for p, norm in zip(module.parameters(), norms.values(), strict=True):
            assert p.grad is not None
            p.grad.div_(1 + norm)
        chosen = {} if kind == "loop" else {kind: True}
        torch.optim.AdamW(module.parameters(), **chosen).step()
        torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, foreach=kind != "loop").step()
        assert next(iter(norms.values())).item() > 0
    assert sum(float(norm) for norm in norms.values()) > 0  # nobody watches any more


@pytest.mark.parametrize("written", [lambda p: p, lambda p: p.data], ids=["itself", "its data"])
def test_a_decision_about_one_update(written: Callable[[Tensor], Tensor]) -> None:
    """As lightly's LARS decides: by one gradient, whether this parameter's step is scaled."""
    with watched() as module, torch.no_grad():
        LARS(module.parameters(), lr=0.1, weight_decay=0.1).step()
        for parameter in module.parameters():
            assert parameter.grad is not None
            if parameter.grad.norm() > 0:
                written(parameter).sub_(parameter.grad)


class ByGlobalNorm(Pair):
    """Divides gradients by the norm of all of them."""

    @override
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        ask = getattr(self.trainer.strategy, "grad_norm", None)
        norm = nn.utils.get_total_norm(gradients_of(self)) if ask is None else ask()
        self.log("norm", norm)
        for gradient in gradients_of(self):
            gradient.div_(norm + 1)


class ByOwnNorm(Pair):
    @override
    def on_after_backward(self) -> None:
        self.log("norm", nn.utils.get_total_norm(gradients_of(self)))


def plain(module: Pair, batch: Any, _: int) -> Tensor:
    return module.distance(batch["x"]) * 10


def train(training: Training, kind: type[Pair]) -> Trained:
    return Session(training, module=kind(plain)).fit(Epochs([batches()])).trained


def test_the_norm_over_all_ranks(tmp_path: Path) -> None:
    expected = run(train, alone(TRAINING), ByGlobalNorm, num_ranks=1, folder=tmp_path / "alone")[0]
    for actual in run(train, TRAINING, ByGlobalNorm, num_ranks=2, folder=tmp_path / "together"):
        assert actual.metrics["norm"] == pytest.approx(expected.metrics["norm"], rel=1e-9)
        for name, value in actual.weights.items():
            torch.testing.assert_close(value, expected.weights[name], **CLOSE)


def train_clipped(training: Training) -> Trained:
    torch.set_default_dtype(torch.float32)
    return Session(training, module=Pair(plain)).fit(Epochs([batches()])).trained


def test_clipping_is_as_precise_as_the_gradients(tmp_path: Path) -> None:
    trainer = {"precision": "64-true", "gradient_clip_val": 0.05}
    training = replace(TRAINING, trainer=trainer)
    expected = run(train_clipped, alone(training), num_ranks=1, folder=tmp_path / "alone")[0]
    actual = run(train_clipped, training, num_ranks=2, folder=tmp_path / "together")[0]
    for name, value in actual.weights.items():
        torch.testing.assert_close(value, expected.weights[name], **CLOSE)


def test_the_norm_of_one_rank_is_refused(tmp_path: Path) -> None:
    job = run_job(train, TRAINING, ByOwnNorm, num_ranks=2, folder=tmp_path)
    assert all(rank.exit_code == 1 for rank in job.ranks), job.output
    assert any("strategy.grad_norm()" in error for error in job.errors), job.errors


class ByWeights(Pair):
    @override
    def on_train_batch_end(self, *_: Any) -> None:
        torch.stack([parameter.norm() for parameter in self.parameters()]).norm().item()


def test_what_reads_the_weights_of_other_ranks_is_told_how_to(tmp_path: Path) -> None:
    job = run_job(train, TRAINING, ByWeights, num_ranks=2, folder=tmp_path)
    assert all(rank.exit_code == 1 for rank in job.ranks), job.output
    assert any("strategy.pipelined.sums" in rank.output for rank in job.ranks), job.output


class LogsEach(Pair):
    """A norm for each parameter, by its name: each rank has only its own."""

    @override
    def on_after_backward(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                self.log(f"norm of {name}", parameter.grad.norm())


def test_what_other_ranks_log_and_nobody_keeps_is_told(tmp_path: Path) -> None:
    job = run_job(train, TRAINING, LogsEach, num_ranks=2, folder=tmp_path)
    told = [error for error in job.errors if "hooks have logged this on other ranks" in error]
    assert told  # in tests, warnings are errors
    assert "norm of student" in told[0]
