"""Asynchronous 1F1B under a Trainer: exact, resumed, and refused where it can't be."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn

from lightning_tspipe import TSPipeStrategy
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.weights.policies import policy_of
from lightning_tspipe.runtime.weights.versions import Read
from lightning_tspipe.simulation.timeline import Timeline
from lightning_tspipe.strategy.setup.refusals import check_epochs, refuse_training
from tests.device import on_host
from tests.exactness.asynchronous import emulate
from tests.exactness.test_asynchronous import OPTIMIZERS, Case, Module, loss_of, make
from tests.integration.jobs import run, run_job
from tests.integration.trainings import (
    CLOSE,
    Epochs,
    Recorder,
    Unsized,
    metrics_of,
    quiet_trainer,
    strict,
    weights_of,
)
from tests.unit.networks.cutting import cut

SLOW = pytest.mark.slow


class Lit(Module, LightningModule):
    """The exactness tests' classifier, with a learning rate that falls at every update."""

    optimizer = "adamw"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.student(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        made = OPTIMIZERS[self.optimizer](self.student.parameters())
        return {"optimizer": made, "lr_scheduler": {"scheduler": falling(made), "interval": "step"}}


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


@dataclass(frozen=True)
class Job:
    """One training under a Trainer."""

    case: Case
    trainer: dict[str, Any] = field(default_factory=dict)
    unsized: bool = False
    drains: bool = True
    stop_after: int = 0
    resume: str = ""
    warns: str = ""


class Trace(Callback):
    """Keeps what the ranks read."""

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.timeline: Timeline | None = None

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        engine = trainer.strategy.engine
        if engine is not None and engine.weights.trace is None:
            engine.weights.trace = self.reads
            trainer.strategy.pipelined.record(3)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self.timeline = trainer.strategy.pipelined.timeline()


class Kept:
    """A loader that keeps its place."""

    def __init__(self, epochs: list[list[Any]]) -> None:
        self._epochs = epochs
        self._epoch = self._place = 0

    def __len__(self) -> int:
        return len(self._epochs[0])

    def __iter__(self) -> Iterator[Any]:
        epoch, begin = self._epoch, self._place
        for place in range(begin, len(self)):
            is_last = place + 1 == len(self)
            self._epoch, self._place = (epoch + 1, 0) if is_last else (epoch, place + 1)
            yield self._epochs[epoch][place]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "place": self._place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch, self._place = state["epoch"], state["place"]


def partition(module: Module, num_stages: int) -> list[int]:
    """Atoms of each stage."""
    atoms = cut(module.student, torch.zeros(2, 3, 5, 5)).atoms
    starts = [
        next(i for i, a in enumerate(atoms) for n in a.parameter_names if n.startswith(f"{stage}."))
        for stage in range(num_stages)
    ]
    return [b - a for a, b in zip(starts, [*starts[1:], len(atoms)], strict=True)]


Fitted = tuple[list[Tensor], dict[str, Tensor], dict[str, float], list[Read], Timeline | None]


def fit(job: Job, num_ranks: int = 0) -> Fitted:
    strict()
    if job.warns:
        warnings.filterwarnings("always", message=job.warns)
    plain, epochs = make(job.case)
    torch.manual_seed(0)
    module = Lit(job.case.num_stages)
    module.optimizer = job.case.optimizer
    module.load_state_dict(plain.state_dict())
    if job.case.again:
        # Repeated forwards draw again what the first ones drew.
        for student in (plain.student, module.student):
            student[0].append(nn.Dropout(0.3))
    recorder, trace = Recorder(), Trace()
    callbacks: list[Any] = [recorder, trace]
    if job.stop_after:
        callbacks.append(ModelCheckpoint(".", "{step}", every_n_train_steps=job.stop_after,
                                         save_top_k=-1))  # fmt: skip
    num_ranks = num_ranks or job.case.num_stages
    cuts = partition(plain, job.case.num_stages)
    strategy = TSPipeStrategy(
        schedule="1f1b", weights=job.case.policy, drain_epochs=job.drains,
        activation_checkpointing=job.case.again,
        partition=[*cuts[: num_ranks - 1], sum(cuts[num_ranks - 1 :])],
    )  # fmt: skip
    trainer = quiet_trainer(
        devices=num_ranks, strategy=strategy, enable_checkpointing=bool(job.stop_after),
        max_epochs=len(job.case.epochs), callbacks=callbacks,
        accumulate_grad_batches=job.case.accumulate, **job.trainer,
    )  # fmt: skip
    loader: Any = Unsized(epochs) if job.unsized else Epochs(epochs)
    if not job.drains:
        loader = Kept(epochs)
    trainer.fit(module, loader, Epochs(epochs[:1]), ckpt_path=job.resume or None)
    state, metrics = weights_of(module), metrics_of(trainer)
    return on_host(recorder.losses), state, metrics, trace.reads, trace.timeline


def expected(case: Case, clip: float | None = None) -> tuple[list[Tensor], dict[str, Tensor]]:
    module, epochs = make(case)
    optimizer = OPTIMIZERS["adamw"](module.student.parameters())
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
    # And so the timeline says.
    timeline = ranks[0][4]
    for rank in (0, 1):
        spans = [span for span in timeline.of_rank(rank) if span.version is not None]
        reads = {(r.batch, r.forward): (r.version, r.predicted) for r in ranks[rank][3]}
        assert len(spans) == 6
        assert all(reads[s.batch, s.op == "F"] == (s.version, s.predicted) for s in spans)


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


@pytest.mark.parametrize(
    ("case", "stop"),
    [
        (Case("pipeoptim", 2, (6, 6), "adamw"), 4),
        pytest.param(Case("pipedream", 3, (7, 7), "adamw"), 5, marks=SLOW),
        pytest.param(Case("2bw", 3, (9, 9), "adamw", accumulate=3), 1, marks=SLOW),
        pytest.param(Case("spectrain", 3, (5, 5), "momentum", again=True), 4, marks=SLOW),
    ],
    ids=str,
)
def test_a_run_goes_on_with_the_batches_in_flight(case: Case, stop: int, tmp_path: Path) -> None:
    """As the run that was never saved, to the last bit."""
    whole = run(fit, Job(case), num_ranks=case.num_stages, folder=tmp_path)
    job = Job(case, stop_after=stop)
    saved = run(fit, job, num_ranks=case.num_stages, folder=tmp_path)
    path = str(tmp_path / f"step={stop}.ckpt")
    again = run(fit, replace(job, resume=path), num_ranks=case.num_stages, folder=tmp_path)
    torch.testing.assert_close(saved[0][:2], whole[0][:2], rtol=0, atol=0)
    torch.testing.assert_close(again[0][1], whole[0][1], rtol=0, atol=0)
    left = len(again[0][0])
    assert left == sum(case.epochs) - stop * case.accumulate
    torch.testing.assert_close(again[0][0], whole[0][0][-left:], rtol=0, atol=0)
    # No forward runs twice; the first step is not traced.
    in_epoch = case.epochs[0] - stop * case.accumulate
    counts = [sum(r.forward for r in rank[3]) for rank in again]
    assert counts == [left - min(rank + 1, in_epoch) for rank in range(case.num_stages)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("pipeoptim", 2, (4, 4), "adamw"),
        Case("2bw", 3, (6, 6), "adamw", accumulate=3),
        Case("pipedream", 3, (3, 3, 3), "adamw"),
    ],
    ids=str,
)
def test_without_a_drain_epochs_are_one(case: Case, tmp_path: Path) -> None:
    """Also where epochs are as short as the pipeline, and from checkpoints around an end."""
    job = Job(case, {"val_check_interval": 1.0}, drains=False)
    whole = run(fit, job, num_ranks=case.num_stages, folder=tmp_path)
    assert_equal(replace(case, epochs=(sum(case.epochs),)), whole)
    saving = replace(job, stop_after=1)
    run(fit, saving, num_ranks=case.num_stages, folder=tmp_path)
    first = case.epochs[0] // case.accumulate
    for stop in {max(1, first - 1), first, first + 1}:
        path = str(tmp_path / f"step={stop}.ckpt")
        again = run(fit, replace(saving, resume=path), num_ranks=case.num_stages, folder=tmp_path)
        torch.testing.assert_close(again[0][1], whole[0][1], rtol=0, atol=0)
        left = whole[0][0][stop * case.accumulate :]
        torch.testing.assert_close(again[0][0], left, rtol=0, atol=0)


@pytest.mark.slow
def test_other_stages_go_on_with_an_empty_pipeline(tmp_path: Path) -> None:
    three, two = Case("pipedream", 3, (6,), "adamw"), Case("pipedream", 2, (6,), "adamw")
    run(fit, Job(three, stop_after=2), num_ranks=3, folder=tmp_path)
    path = str(tmp_path / "step=2.ckpt")
    job = Job(two, stop_after=2, resume=path, warns="the checkpoint's plan was made")
    (losses, told), (_, others) = run(fit_whole, job, num_ranks=2, folder=tmp_path)
    assert len(losses) == 4
    assert "a layer's stage decides which version of its weights it reads" in told
    assert others == ""


def fit_whole(job: Job) -> tuple[list[Tensor], str]:
    """On other stages than those of the case, which has three; and what users are told of that."""
    three = replace(job, case=replace(job.case, num_stages=3))
    with warnings.catch_warnings(record=True) as caught:
        losses = fit(three, num_ranks=job.case.num_stages)[0]
    return losses, "".join(str(one.message) for one in caught)


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


class ClosureLit(Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.student.parameters())


class Words(nn.Module):
    """Counts how bright an image's places are."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(8, 6, mode="sum", sparse=True)

    def forward(self, images: Tensor) -> Tensor:
        return self.table(images.flatten(1).abs().long().clamp(max=7))


class SparseLit(Lit):
    def __init__(self, num_stages: int) -> None:
        super().__init__(num_stages)
        self.student = nn.Sequential(nn.Sequential(Words()), nn.Sequential(nn.Linear(6, 3)))


def fit_badly(make_module: Any, options: dict[str, Any], trainer: dict[str, Any]) -> None:
    strict()
    _, epochs = make(Case("pipeoptim", 2, (6,)))
    module = make_module(2)
    strategy = TSPipeStrategy(**{"schedule": "1f1b", "partition": partition(module, 2), **options})
    made = quiet_trainer(**{"devices": 2, "strategy": strategy, "max_epochs": 1, **trainer})
    made.fit(module, Epochs(epochs), Epochs(epochs))


@pytest.mark.parametrize(
    ("module", "options", "trainer", "message"),
    [
        pytest.param(Meddler, {}, {}, "was changed between two updates", id="changed"),
        pytest.param(NotANumber, {}, {}, "is not finite", id="nan", marks=SLOW),
        pytest.param(StrangeLit, {}, {}, "predict_update(parameter", id="unknown", marks=SLOW),
        pytest.param(ClosureLit, {}, {}, "LBFGS runs the step several", id="closures", marks=SLOW),
        pytest.param(SparseLit, {}, {}, "'student.0.0.table' makes", id="sparse", marks=SLOW),
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
        ({"schedule": "tspipe", "drain_epochs": False}, "no batch is in flight"),
        ({"schedule": "1f1b", "num_microbatches": 4}, "a batch is one unit"),
        ({"schedule": "1f1b", "split_backward": True}, "Leave it out"),
        ({"schedule": "1f1b", "compile": True}, "Leave one of them out"),
    ],
)
def test_options_that_can_not_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TSPipeStrategy(**options)


class Sparse(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.EmbeddingBag(3, 2, mode="sum", sparse=True))


class ByHand(Lit):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("policy", "module", "trainer", "message"),
    [
        ("pipeoptim", ByHand(2), {}, "Use automatic optimization"),
        ("pipeoptim", Lit(2), {"scaler": object()}, "bf16-mixed"),
        ("pipeoptim", Sparse(), {}, "'student.0' makes sparse gradients"),
        ("pipeoptim", Lit(2), {"make": torch.optim.Adagrad}, r"predict_update\(parameter"),
        ("pipeoptim", Lit(2), {"make": torch.optim.LBFGS}, "LBFGS"),
        ("spectrain", Lit(2), {"make": torch.optim.Adam}, "weights='pipeoptim', which knows"),
        ("2bw", Lit(2), {"accumulate": 1}, "accumulate_grad_batches=2 or more"),
    ],
    ids=["by hand", "scaled", "sparse", "unknown", "closures", "momentum", "2bw"],
)
def test_trainings_that_can_not_be_are_refused(
    policy: str, module: Any, trainer: dict[str, Any], message: str
) -> None:
    given = {"scaler": None, "make": torch.optim.AdamW, "accumulate": 2, **trainer}
    optimizers = [given["make"](module.parameters(), lr=0.1)]
    fake = SimpleNamespace(
        precision_plugin=SimpleNamespace(scaler=given["scaler"]),
        strategy=SimpleNamespace(optimizers=optimizers),
        accumulate_grad_batches=given["accumulate"],
    )
    with pytest.raises(ConfigurationError, match=message):
        refuse_training(policy_of(policy), fake, module, ["student"], 2)


@pytest.mark.parametrize(
    ("length", "accumulate", "reload", "message"),
    [
        (float("inf"), 1, 0, "give the loader a length"),
        (7, 2, 0, "epochs of 7 batches"),
        (8, 2, 1, "reload_dataloaders_every_n_epochs"),
        (2, 1, 0, "epochs of 2 batches and 3 ranks"),
    ],
)
def test_epochs_that_can_not_follow_at_once_are_refused(
    length: float, accumulate: int, reload: int, message: str
) -> None:
    fake = SimpleNamespace(
        fit_loop=SimpleNamespace(max_batches=length), accumulate_grad_batches=accumulate,
        reload_dataloaders_every_n_epochs=reload,
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match=message):
        check_epochs(fake, 3)


@pytest.mark.parametrize("weights", ["pipeoptim", "pipedream", "2bw", "spectrain"])
def test_each_policy_has_a_name(weights: str) -> None:
    options = StrategyRegistry.get(f"tspipe_{weights}").options
    assert (options.schedule, options.weights) == ("1f1b", weights)
