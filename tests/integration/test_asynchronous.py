"""Asynchronous 1F1B under a Trainer: exact, resumed, and refused where it can't be."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor

from lightning_tspipe import TSPipeStrategy
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.networks.atoms import atomize
from lightning_tspipe.runtime.stage_weights import Read
from tests.exactness.asynchronous import emulate
from tests.exactness.test_asynchronous import Case, Module, loss_of, make
from tests.integration.jobs import run, run_job
from tests.integration.trainings import CLOSE, Epochs, Recorder, Unsized, strict

SLOW = pytest.mark.slow


class Lit(Module, LightningModule):
    """The exactness tests' classifier, with a learning rate that falls at every update."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.student(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        made = optimizer_of(self.student.parameters())
        return {"optimizer": made, "lr_scheduler": {"scheduler": falling(made), "interval": "step"}}


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


@dataclass(frozen=True)
class Job:
    """One training under a Trainer."""

    case: Case
    trainer: dict[str, Any] = field(default_factory=dict)
    unsized: bool = False
    stop_after: int = 0
    resume: str = ""


class Trace(Callback):
    """Keeps what the ranks read."""

    def __init__(self) -> None:
        self.reads: list[Read] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        engine = trainer.strategy.engine
        if engine is not None and engine.weights.trace is None:
            engine.weights.trace = self.reads


def partition(module: Module, num_stages: int) -> list[int]:
    """Atoms of each stage."""
    atoms = atomize(module.student, "student", None).atoms
    starts = [
        next(i for i, a in enumerate(atoms) for n in a.parameter_names if n.startswith(f"{stage}."))
        for stage in range(num_stages)
    ]
    return [b - a for a, b in zip(starts, [*starts[1:], len(atoms)], strict=True)]


def fit(job: Job) -> tuple[list[Tensor], dict[str, Tensor], dict[str, float], list[Read]]:
    strict()
    plain, epochs = make(job.case)
    torch.manual_seed(0)
    module = Lit(job.case.num_stages)
    module.load_state_dict(plain.state_dict())
    recorder, trace = Recorder(), Trace()
    callbacks: list[Any] = [recorder, trace]
    if job.stop_after:
        callbacks.append(ModelCheckpoint(".", "{step}", every_n_train_steps=job.stop_after,
                                         save_top_k=-1))  # fmt: skip
    strategy = TSPipeStrategy(
        schedule="1f1b", weights=job.case.policy, partition=partition(plain, job.case.num_stages)
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False,
             "enable_checkpointing": bool(job.stop_after), "num_sanity_val_steps": 0}  # fmt: skip
    trainer = Trainer(
        **{**quiet, "accelerator": "cpu", "devices": job.case.num_stages, "strategy": strategy,
           "max_epochs": len(job.case.epochs), "callbacks": callbacks,
           "accumulate_grad_batches": job.case.accumulate, **job.trainer},
    )  # fmt: skip
    loader = Unsized(epochs) if job.unsized else Epochs(epochs)
    trainer.fit(module, loader, Epochs(epochs[:1]), ckpt_path=job.resume or None)
    state = {k: v.detach().clone() for k, v in module.state_dict().items() if not v.is_meta}
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
    return recorder.losses, state, metrics, trace.reads


def expected(case: Case, clip: float | None = None) -> tuple[list[Tensor], dict[str, Tensor]]:
    module, epochs = make(case)
    optimizer = optimizer_of(module.student.parameters())
    found = emulate(
        list(module.student), loss_of, epochs, optimizer, case.policy,
        accumulate=case.accumulate, scheduler=falling(optimizer), clip=clip,
    )  # fmt: skip
    return [loss / case.accumulate for loss in found.losses], module.state_dict()


def assert_equal(case: Case, ranks: list[Any], clip: float | None = None) -> None:
    losses, state = expected(case, clip)
    torch.testing.assert_close(ranks[0][0], losses, **CLOSE)
    torch.testing.assert_close(ranks[0][1], state, **CLOSE)


def test_a_trainer_trains_as_the_emulation(tmp_path: Path) -> None:
    case = Case("pipeoptim", 2, (5, 5), "adamw")
    ranks = run(fit, Job(case), num_ranks=2, folder=tmp_path)
    assert_equal(case, ranks)
    assert "val_loss" in ranks[0][2]
    # Rank 1, one before the loss: forwards one update ahead, but for the first of an epoch.
    forwards = [(r.batch, r.version, r.predicted) for r in ranks[1][3] if r.forward]
    steady = [(batch, batch - 1, 1) for batch in range(2, 5)]
    second = [(batch, batch - 1, 1) for batch in range(6, 10)]
    assert forwards == [*steady, (5, 5, 0), *second]


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        Job(Case("pipedream", 3, (7, 7), "adamw"), unsized=True),
        Job(Case("2bw", 2, (7, 7), "adamw", accumulate=2)),
        Job(Case("pipeoptim", 3, (7, 7), "adamw", accumulate=2), {"val_check_interval": 3}),
        Job(Case("pipeoptim", 1, (4, 4), "adamw")),
        Job(Case("pipeoptim", 3, (2, 2), "adamw")),
        Job(Case("pipeoptim", 2, (5, 5), "adamw"), {"gradient_clip_val": 0.05}),
    ],
    ids=lambda job: str(job.case),
)
def test_more_trainers_train_as_the_emulation(job: Job, tmp_path: Path) -> None:
    ranks = run(fit, job, num_ranks=job.case.num_stages, folder=tmp_path)
    assert_equal(job.case, ranks, job.trainer.get("gradient_clip_val"))


def test_a_run_goes_on_exactly_within_an_epoch(tmp_path: Path) -> None:
    case = Case("pipeoptim", 2, (6, 6), "adamw")
    whole = run(fit, Job(case, stop_after=4), num_ranks=2, folder=tmp_path)
    saved = str(tmp_path / "step=4.ckpt")
    again = run(fit, Job(case, stop_after=4, resume=saved), num_ranks=2, folder=tmp_path)
    torch.testing.assert_close(again[0][0], whole[0][0][4:], rtol=0, atol=0)
    torch.testing.assert_close(again[0][1], whole[0][1], rtol=0, atol=0)


class Meddler(Lit):
    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.student.parameters():
            if not parameter.is_meta:
                parameter.data = parameter.data.clamp(-1, 1)


class NotANumber(Lit):
    def on_train_batch_end(self, *_: Any) -> None:
        optimizer = self.optimizers().optimizer
        for state in optimizer.state.values():
            state["exp_avg"].fill_(float("nan"))


class Strange(torch.optim.SGD):
    """Not known to anybody."""


class StrangeLit(Lit):
    def configure_optimizers(self) -> Any:
        return Strange(self.student.parameters(), lr=0.1)


def fit_badly(make_module: Any, options: dict[str, Any], trainer: dict[str, Any]) -> None:
    strict()
    _, epochs = make(Case("pipeoptim", 2, (6,)))
    module = make_module(2)
    strategy = TSPipeStrategy(**{"schedule": "1f1b", "partition": partition(module, 2), **options})
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False,
             "enable_checkpointing": False}  # fmt: skip
    Trainer(
        **{**quiet, "accelerator": "cpu", "devices": 2, "strategy": strategy, "max_epochs": 1,
           **trainer}
    ).fit(module, Epochs(epochs), Epochs(epochs))  # fmt: skip


@pytest.mark.parametrize(
    ("module", "options", "trainer", "message"),
    [
        pytest.param(Meddler, {}, {}, "was changed between two updates", id="changed"),
        pytest.param(NotANumber, {}, {}, "is not finite", id="nan", marks=SLOW),
        pytest.param(StrangeLit, {}, {}, "predict_update(parameter", id="unknown", marks=SLOW),
        pytest.param(
            Lit,
            {"weights": "spectrain"},
            {},
            "weights='pipeoptim', which knows",
            id="momentum",
            marks=SLOW,
        ),
        pytest.param(
            Lit, {"weights": "2bw"}, {}, "accumulate_grad_batches=2 or more", id="2bw", marks=SLOW
        ),
    ],
)
def test_bad_input_is_refused_on_every_rank(
    module: Any, options: dict[str, Any], trainer: dict[str, Any], message: str, tmp_path: Path
) -> None:
    job = run_job(fit_badly, module, options, trainer, num_ranks=2, folder=tmp_path, seconds=60)
    assert all(rank.exit_code == 1 for rank in job.ranks), job.output
    assert message in job.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "1f1b", "weights": "pipemare"}, "choose one of pipeoptim, pipedream"),
        ({"schedule": "gpipe", "weights": "2bw"}, "is for schedule='1f1b'"),
        ({"schedule": "1f1b", "num_microbatches": 4}, "a batch is one unit"),
        ({"schedule": "1f1b", "split_backward": True}, "Leave it out"),
        ({"schedule": "1f1b", "compile": True}, "Leave one of them out"),
    ],
)
def test_options_that_can_not_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TSPipeStrategy(**options)


@pytest.mark.parametrize("weights", ["pipeoptim", "pipedream", "2bw", "spectrain"])
def test_each_policy_has_a_name(weights: str) -> None:
    options = StrategyRegistry.get(f"tspipe_{weights}").options
    assert (options.schedule, options.weights) == ("1f1b", weights)
