"""A run that was stopped anywhere and goes on is the run that was never stopped."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from pytorch_lightning import Callback as OtherCallback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_tspipe import DelayedTeacherUpdate, MomentumEMA
from tests.choosing import some_of
from tests.exactness.modules import ema_by_hand, images
from tests.integration.by_hand import ByHand, body_and_tail, sample_by_sample
from tests.integration.jobs import run, run_job
from tests.integration.on_meta import meta_module
from tests.integration.replicas import place as place_of
from tests.integration.trainings import (
    CLOSE,
    Session,
    Training,
    delayed,
    lightning_module,
)

SAMPLES = 14  # four batches: 4, 4, 4, 2
EPOCHS = {"max_epochs": 2}


def sample(index: int) -> dict[str, Any]:
    """Two views, augmented by whatever torch draws at that moment."""
    views = [images(1, index + 100 * view)[0] + 0.1 * torch.randn(3, 5, 5) for view in range(2)]
    return {"views": views, "weight": float(index % 4), "name": str(index)}


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return sample(index)


class Stream(IterableDataset[Any]):
    """No length."""

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(SAMPLES).tolist()
        return map(sample, order)


class Stateful(DataLoader[Any]):
    """Keeps its place, and its own order in each epoch."""

    epoch = place = 0
    begin = 0

    def __iter__(self) -> Any:
        order = torch.randperm(
            SAMPLES, generator=torch.Generator().manual_seed(self.epoch)
        ).tolist()
        batches = [order[i : i + 4] for i in range(0, SAMPLES, 4)]
        begin, self.begin = self.begin, 0
        for place, batch in enumerate(batches[begin:], begin):
            self.place = place + 1
            if self.place == len(batches):  # nobody asks for more: Lightning counts, as with others
                self.epoch, self.place = self.epoch + 1, 0
            yield self.collate_fn([sample(index) for index in batch])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.begin = state["epoch"], state["place"]


class Fixed(Stateful):
    """Keeps its place; the same batches in each epoch."""

    def __iter__(self) -> Any:
        begin, self.begin = self.begin, 0
        for place in range(begin, 4):
            self.place = (place + 1) % 4
            views = [images(4, 10 * place), images(4, 10 * place + 5)]
            yield {"views": views, "weight": views[0].mean((1, 2, 3)), "name": [str(place)]}


class Plain(Dataset[Any]):
    """The same samples whenever they are read."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        views = [images(1, index + 100 * view)[0] for view in range(2)]
        return {"views": views, "weight": 1.0, "name": str(index)}


def loader_of(kind: str, replica: int = 0, num_replicas: int = 1) -> Any:
    generator = torch.Generator().manual_seed(5)
    share: DistributedSampler[Any] = DistributedSampler(
        Plain(), num_replicas, replica, shuffle=False
    )
    kinds: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "shuffled": (DataLoader, Augmented(), {"shuffle": True}),
        "generator": (DataLoader, Augmented(), {"shuffle": True, "generator": generator}),
        "workers": (DataLoader, Augmented(), {"shuffle": True, "num_workers": 1,
                                              "multiprocessing_context": "fork"}),  # as float64
        "stream": (DataLoader, Stream(), {}),
        "plain": (DataLoader, Plain(), {"batch_size": 4 // num_replicas, "sampler": share}),
        "stateful": (Stateful, Augmented(), {}),
        "fixed": (Fixed, Augmented(), {}),
    }  # fmt: skip
    if kind == "torchdata":
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        make = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
        kinds[kind] = (make, Augmented(), {"shuffle": True})
    made, data, options = kinds[kind]
    return made(data, **{"batch_size": 4, **options})


class SaveAll(Callback, OtherCallback):
    """A checkpoint after every batch and every validation."""

    def __init__(self) -> None:
        self.num_batches = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.num_batches += 1
        trainer.save_checkpoint(f"batch-{self.num_batches}.ckpt")

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(f"validation-{self.num_batches}.ckpt")

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(f"epoch-{self.num_batches}.ckpt")


class Seen(Callback, OtherCallback):
    """The samples of each batch, on the rank that reads them; draws random numbers of its own."""

    def __init__(self) -> None:
        self.names: list[list[str]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        torch.rand(3)
        if isinstance(batch, dict):
            self.names.append(batch["name"])


@dataclass(frozen=True)
class Run:
    """A training that is stopped.

    Attributes:
        training: What is trained.
        loader: Kind of loader.
        validates: Whether there is a validation.
        is_built_late: Whether the module is built in ``configure_model``.
    """

    training: Training
    loader: str = "shuffled"
    validates: bool = False
    is_built_late: bool = False


@dataclass
class Went:
    """What a run did."""

    losses: list[Tensor]
    weights: dict[str, Tensor]
    optimizer: dict[Any, Any]
    steps: int
    names: list[list[str]] = field(default_factory=list)


def go(
    it: Run, path: str | None = None, *, saves: bool = False, callbacks: Sequence[Any] = ()
) -> Went:
    """Fit, from a checkpoint or from the beginning."""
    torch.manual_seed(3)
    training = it.training
    make = meta_module if it.is_built_late else lightning_module
    module = make(training.case, training.world, training.optimizer)
    seen = Seen()
    arguments: dict[str, Any] = {}
    session = Session(
        training, seen, *[SaveAll()] * saves, *callbacks, module=module, change=training.change
    )
    if it.validates:
        module.validation_step = lambda batch: module.log("v", module.student(batch).mean())
        arguments["validation"] = DataLoader(images(6, 9), batch_size=3)
    loader, trainer = loader_of(it.loader, *place_of(training)), session.trainer
    session.fit(loader, ckpt_path=path, weights_only=None, **arguments)
    trainer.save_checkpoint("end.ckpt")
    done = session.trained
    is_file = trainer.is_global_zero and Path("end.ckpt").is_file()
    end = torch.load("end.ckpt", weights_only=True) if is_file else {}
    states = end.get("optimizer_states", [{}])[0].get("state", {})
    # Rank 0 has the whole module again, the others what the plan gave them.
    weights = done.weights if trainer.is_global_zero or it.is_built_late else {}
    return Went(done.losses, weights, states, done.global_step, seen.names)


def stop_and_go(it: Run, names: list[str]) -> tuple[Went, dict[str, Went]]:
    """The whole run, and what became of it from each of its checkpoints."""
    whole = go(it, saves=True)
    return whole, {name: go(it, f"{name}.ckpt") for name in names}


def cosine_ema() -> list[Any]:
    return [MomentumEMA((0.5, 1.0), student="student.0"), DelayedTeacherUpdate()]


def without_ema(module: Any) -> None:
    module.ema = "by the callback"


def check(whole: Went, resumed: Went) -> None:
    assert resumed.steps == whole.steps
    losses = whole.losses[len(whole.losses) - len(resumed.losses) :]
    torch.testing.assert_close(resumed.losses, losses, **CLOSE)
    torch.testing.assert_close(resumed.weights, whole.weights, **CLOSE)
    torch.testing.assert_close(resumed.optimizer, whole.optimizer, **CLOSE)
    if whole.names and resumed.names:
        assert resumed.names == whole.names[-len(resumed.names) :]


def reads_the_teacher(module: Any) -> None:
    def step(batch: Any) -> Tensor:
        ema_by_hand(module.teacher, module.student[0])
        one, other = batch["views"]
        late = module.teacher(other)
        made = module.student(one * late.softmax(0).mean(1)[:, None, None, None])
        loss: Tensor = (made.mean(1) - late.mean(1)).square().mean()
        return loss

    module.training_step = step


ONE = {"num_microbatches": 1}
BYOL = Training("Byol-batch-2-by hand", "instance", ONE, callbacks=delayed, trainer=EPOCHS)
RUNS = {
    "batchnorm": Run(BYOL),
    "momentum callback, adam": Run(
        replace(BYOL, optimizer="adamw", callbacks=cosine_ema, change=without_ema)
    ),
    "random step, two micro-batches": Run(
        replace(BYOL, case="RandomStep", options={"num_microbatches": 2})
    ),
    "a student that reads the teacher": Run(replace(BYOL, change=reads_the_teacher)),
    "accumulation": Run(replace(BYOL, trainer={**EPOCHS, "accumulate_grad_batches": 3})),
    "by hand": Run(replace(BYOL, change=ByHand(sample_by_sample, body_and_tail))),
    "validation": Run(replace(BYOL, trainer={**EPOCHS, "val_check_interval": 2}), validates=True),
    "stateful": Run(BYOL, "stateful"),
    "torchdata": Run(BYOL, "torchdata"),
    "stream": Run(BYOL, "stream"),
    "workers": Run(BYOL, "workers"),
    "generator": Run(BYOL, "generator"),
    "gpipe": Run(replace(BYOL, options={"num_microbatches": 1, "schedule": "gpipe"})),
}
STOPS = ["batch-1", "batch-2", "batch-3", "epoch-4", "batch-6"]
ALWAYS = {"a student that reads the teacher", "by hand"}


@pytest.mark.parametrize("name", some_of(RUNS, slow=[*RUNS][::4], always=ALWAYS))
def test_a_stopped_run_goes_on_exactly(name: str, tmp_path: Path) -> None:
    if name == "torchdata":
        pytest.importorskip("torchdata")
    it = RUNS[name]
    stops = [*STOPS, "validation-2"] if it.validates else STOPS
    ranks = run(stop_and_go, it, stops, folder=tmp_path)
    for whole, resumed in ranks:
        for stop, went in resumed.items():
            assert len(went.losses) == 8 - int(stop.split("-")[1])
            check(whole, went)
    read = ranks[-1][0].names  # no batch that was held is lost, none comes twice
    for epoch in (read[:4], read[4:]):
        names = [name for batch in epoch for name in batch]
        assert sorted(names) == sorted(map(str, range(SAMPLES)))


@pytest.mark.parametrize("num_ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_going_on_with_other_stages(num_ranks: int, tmp_path: Path) -> None:
    it = Run(replace(BYOL, case="Byol-group-2-by hand", optimizer="adamw"))
    whole = run(go_and_save, it, folder=tmp_path)[0]
    other = replace(it, training=replace(it.training, num_ranks=num_ranks))
    for stop in ("batch-2", "epoch-4"):
        path = str(tmp_path / f"{stop}.ckpt")
        folder = tmp_path / stop
        check(whole, run(go, other, path, num_ranks=num_ranks, folder=folder)[0])


@pytest.mark.parametrize("source", [1, 2])
@pytest.mark.parametrize("stop", ["batch-2", pytest.param("epoch-4", marks=pytest.mark.slow)])
def test_going_on_with_another_strategy(source: int, stop: str, tmp_path: Path) -> None:
    names = {"student": ["student"], "teacher": ["teacher"]}
    plain = replace(BYOL, strategy="auto", num_ranks=1, options={})
    piped = replace(BYOL, options={**ONE, **names})
    trainings = {1: Run(plain, "fixed"), 2: Run(piped, "fixed")}
    whole = run(go_and_save, trainings[source], num_ranks=source, folder=tmp_path)[0]
    target = 3 - source
    folder = tmp_path / "resumed"
    path = str(tmp_path / f"{stop}.ckpt")
    resumed = run(go, trainings[target], path, num_ranks=target, folder=folder)[0]
    assert len(resumed.losses) == 8 - int(stop.split("-")[1])
    check(whole, resumed)


@pytest.mark.slow
def test_replicas_go_on_with_their_own_batches(tmp_path: Path) -> None:
    options = {"num_stages": 2, "num_microbatches": 1}
    training = replace(BYOL, case="Byol-group-2-by hand", options=options, num_ranks=4)
    it = Run(replace(training, trainer={**EPOCHS, "accumulate_grad_batches": 2}))
    stops = ["batch-1", "epoch-2", "batch-3"]
    ranks = run(stop_and_go, it, stops, num_ranks=4, folder=tmp_path)
    for whole, resumed in ranks:
        for stop, went in resumed.items():
            assert len(went.losses) == 4 - int(stop.split("-")[1])
            check(whole, went)
    assert ranks[1][0].names != ranks[3][0].names


def test_batches_that_would_be_repeated_are_told(tmp_path: Path) -> None:
    plain = Run(replace(BYOL, strategy="auto", num_ranks=1, options={}))
    run(go_and_save, plain, num_ranks=1, folder=tmp_path)
    for stop in ("batch-2", "epoch-4"):
        job = run_job(go, RUNS["batchnorm"], str(tmp_path / f"{stop}.ckpt"), folder=tmp_path)
        told = "the rest of the epoch repeats its first batches" in job.errors[0]
        assert told == (stop == "batch-2")


def go_and_save(it: Run) -> Went:
    return go(it, saves=True)
