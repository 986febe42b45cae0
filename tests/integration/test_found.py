"""Networks without names are found by the first step, and trained as one device trains them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from lightning_tspipe import TSPipeStrategy
from tests.integration.comparing import alone
from tests.integration.jobs import run, run_job
from tests.integration.trainings import (
    CLOSE,
    Epochs,
    Session,
    Trained,
    Training,
    train,
    weights_of,
)


def fitted(training: Training) -> tuple[Any, Any, str]:
    """Losses, weights and the table of what is pipelined."""
    strategy: Any = "auto"
    if training.strategy != "auto":
        strategy = TSPipeStrategy(schedule="gpipe", num_microbatches=1, costs="flops")
    session = Session(training, strategy=strategy)
    session.fit()
    return session.recorder.losses, weights_of(session.module), getattr(strategy, "table", "")


FOUND = {
    "Moco-batch": (("backbone", "head"), ("backbone_momentum", "head_momentum")),
    "Tap-batch-False": (
        ("backbone", "head", "predictor", "classifier"), ("backbone_momentum", "head_momentum"),
    ),
    "Tap-batch-True": (("backbone", "head", "predictor"), ("backbone_momentum", "head_momentum")),
    "Mutual": (("left", "right"), ()),
    "MeanTeachers": (("left", "right"), ("late_left", "late_right")),
    "TwoHeads": (("backbone", "head", "other"), ("backbone_momentum", "head_momentum")),
    "Towers": (("left", "right", "head"), ("late_left", "late_right", "late_head")),
    "FedByAverage": (("backbone", "head"), ("late",)),
    "FedByFrozen": (("net",), ("frozen",)),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_networks_without_names(case: str, tmp_path: Path) -> None:
    training = Training(case)
    alone = replace(training, strategy="auto", num_ranks=1)
    (expected,) = run(fitted, alone, num_ranks=1, folder=tmp_path / "alone")
    actual, *_ = run(fitted, training, num_ranks=2, folder=tmp_path / "together")
    assert len(set(map(float, expected[0]))) > 1
    for one, other in zip(expected[:2], actual[:2], strict=True):
        torch.testing.assert_close(other, one, **CLOSE)
    rows = [line.split() for line in actual[2].splitlines()[1:]]
    kinds = {row[0]: row[1] for row in rows if row[0] != "the"}
    student, teacher = FOUND[case]
    assert kinds == dict.fromkeys(student, "trained") | dict.fromkeys(teacher, "forward-only")


def test_the_strategys_name_is_enough(tmp_path: Path) -> None:
    training = Training("FedByFrozen", strategy="tspipe")
    alone = replace(training, strategy="auto", num_ranks=1)
    (expected,) = run(train, alone, num_ranks=1, folder=tmp_path / "alone")
    actual, _ = run(train, training, num_ranks=2, folder=tmp_path / "together")
    assert len(set(map(float, expected.losses))) == 8
    torch.testing.assert_close(actual.losses, expected.losses, **CLOSE)
    torch.testing.assert_close(actual.weights, expected.weights, **CLOSE)


def test_names_say_otherwise(tmp_path: Path) -> None:
    """What is trained and has no name is with the loss."""
    options = {"student": ["left"], "schedule": "gpipe", "num_microbatches": 1}
    training = Training("Mutual", "instance", options)
    alone = replace(training, strategy="auto", num_ranks=1)
    (expected,) = run(train, alone, num_ranks=1, folder=tmp_path / "alone")
    (actual, table), _ = run(train_and_tell, training, num_ranks=2, folder=tmp_path / "together")
    torch.testing.assert_close(actual.losses, expected.losses, **CLOSE)
    torch.testing.assert_close(actual.weights, expected.weights, **CLOSE)
    head, left, rest = (line.split() for line in table.splitlines())
    assert head == ["network", "kind", "called", "as", "parameters", "ranks"]
    number = sum(value.numel() for key, value in expected.weights.items() if "left.0" in key)
    assert left[:3] == ["left", "trained", "left"]
    assert int(left[3]) > number > 0
    assert set(left[4:]) == {"0", "1"}
    assert rest[:5] == ["the", "rest", "beside", "the", "loss"]


def train_and_tell(training: Training) -> tuple[Trained, str]:
    session = Session(training).fit()
    return session.trained, session.trainer.strategy.table


class WithLoss(nn.Module):
    """Returns its loss too, as transformers' models do, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.last = nn.Linear(8, 4)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.last(self.body(x))
        if self.training:
            self.count += 1
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class DistilsWithLoss(LightningModule):
    """A student's own loss, and the distance to a teacher."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.small, self.large = WithLoss(), WithLoss()
        self.large.eval().requires_grad_(requires_grad=False)

    def training_step(self, batch: Any, _: int) -> Tensor:
        found, wanted = self.small(*batch), self.large(*batch)
        return found["loss"] + mse_loss(found["logits"], wanted["logits"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.small.parameters(), lr=0.1)


def distil(
    training: Training, kind: type[LightningModule] = DistilsWithLoss, **options: Any
) -> tuple[Trained, str]:
    strategy: Any = training.strategy
    if strategy != "auto":
        strategy = TSPipeStrategy(**{"costs": "flops", **options})
    made = torch.Generator().manual_seed(1)
    epochs = [
        [
            (torch.randn(n, 6, generator=made), torch.randint(4, (n,), generator=made))
            for n in (4, 4, 3)
        ]
    ]
    fitted = Session(training, module=kind(), strategy=strategy).fit(Epochs(epochs))
    return fitted.trained, getattr(strategy, "table", "")


def test_what_can_not_be_divided_gets_whole_batches(tmp_path: Path) -> None:
    """A mean over the batch, and a count of calls: without being asked for."""
    training = Training(sizes=((4, 4, 3),))
    alone = replace(training, strategy="auto", num_ranks=1)
    ((expected, _),) = run(distil, alone, num_ranks=1, folder=tmp_path / "alone")
    job = run_job(distil, training, num_ranks=2, folder=tmp_path / "together")
    actual, table = job.ranks[0].value
    torch.testing.assert_close(actual.losses, expected.losses, **CLOSE)
    torch.testing.assert_close(actual.weights, expected.weights, **CLOSE)
    assert "small" in table
    assert "trained" in table
    assert "each call gets the whole batch: " in job.ranks[0].output


class Adapted(LightningModule):
    """A trained module before the student, and a parameter of the module's own beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(6, 6)
        self.student, self.teacher = (
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
            for _ in range(2)
        )
        self.teacher.requires_grad_(requires_grad=False)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, _ = batch
        return mse_loss(self.student(self.stem(x)) / self.temperature, self.teacher(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("is_named", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_comes_before_a_network_named_student(is_named: bool, tmp_path: Path) -> None:
    """Names do not say that what feeds a network lies beside the loss."""
    names = {"student": "student", "teacher": "teacher"} if is_named else {}
    training = Training(sizes=((4, 4, 3),))
    alone = replace(training, strategy="auto", num_ranks=1)
    ((expected, _),) = run(distil, alone, Adapted, num_ranks=1, folder=tmp_path / "alone")
    job = partial(distil, **names)
    actual, table = run(job, training, Adapted, num_ranks=2, folder=tmp_path / "together")[0]
    torch.testing.assert_close(actual.losses, expected.losses, **CLOSE)
    torch.testing.assert_close(actual.weights, expected.weights, **CLOSE)
    kinds = {tuple(line.split()[:2]) for line in table.splitlines()}
    assert kinds >= {("stem", "trained"), ("student", "trained"), ("teacher", "forward-only")}


class Recurrent(LightningModule):
    """Its last states have the layers for their first dimension, and nobody reads them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = nn.LSTM(2, 8, num_layers=2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        made, _states = self.rnn(x.view(-1, 3, 2))
        return cross_entropy(self.head(made[:, -1]), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_outputs_that_nobody_reads_need_no_samples(tmp_path: Path) -> None:
    training = Training(sizes=((4, 4, 3),))
    alone = replace(training, strategy="auto", num_ranks=1)
    ((expected, _),) = run(distil, alone, Recurrent, num_ranks=1, folder=tmp_path / "alone")
    actual, table = run(distil, training, Recurrent, num_ranks=2, folder=tmp_path / "together")[0]
    torch.testing.assert_close(actual.losses, expected.losses, **CLOSE)
    torch.testing.assert_close(actual.weights, expected.weights, **CLOSE)
    kinds = {tuple(line.split()[:2]) for line in table.splitlines()}
    assert kinds >= {("rnn", "trained"), ("head", "trained")}


class LastState(LightningModule):
    """Reads a state whose first dimension is the layers: who returns it is not found."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.rnn, self.head = nn.Linear(6, 6), nn.LSTM(2, 8), nn.Linear(8, 4)

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        _made, (last, _cell) = self.rnn(self.stem(x).view(3, -1, 2))
        return cross_entropy(self.head(last[-1]), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_what_was_found_is_told_where_it_can_not_be_cut(tmp_path: Path) -> None:
    job = run_job(partial(distil, kind=LastState), Training(sizes=((4,),)), folder=tmp_path)
    for error in job.errors:
        assert error.startswith("PartitionError: the network can be cut into 1 piece at most")
        assert "Found by the step were stem; rnn, head lie beside the loss" in error
        assert "TSPipeStrategy(student=['stem', 'rnn', 'head'])" in error


@dataclass
class Packed:
    made: Tensor
    on_the_way: Tensor


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Packed:
        hidden = self.first(x)
        return Packed(self.last(hidden), hidden)


class ByExamples(LightningModule):
    """Its networks return dataclasses, and are called on examples of its own, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.old = Packing(), Packing().requires_grad_(requires_grad=False)
        self.examples = nn.Buffer(torch.randn(5, 6))

    def training_step(self, batch: Any, _: int) -> Tensor:
        (x,) = batch
        made, late = self.net(x), self.old(x)
        alike = self.net(self.examples).made - self.old(self.examples).made
        distance = mse_loss(made.on_the_way, late.on_the_way)
        return mse_loss(made.made, late.made) + distance + alike.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_by_examples(training: Training) -> Trained:
    made = torch.Generator().manual_seed(1)
    batches = [(torch.randn(number, 6, generator=made),) for number in (4, 4, 3)]
    strategy: Any = training.strategy
    if strategy != "auto":
        strategy = TSPipeStrategy(num_microbatches=2, costs="flops")
    return Session(training, module=ByExamples(), strategy=strategy).fit(Epochs([batches])).trained


def test_dataclasses_and_calls_on_what_is_not_of_the_batch(tmp_path: Path) -> None:
    single = alone(Training())
    expected = run(train_by_examples, single, num_ranks=1, folder=tmp_path / "alone")[0]
    actual = run(train_by_examples, Training(), num_ranks=2, folder=tmp_path / "together")[0]
    torch.testing.assert_close(actual.losses, expected.losses, **CLOSE)
    torch.testing.assert_close(actual.weights, expected.weights, **CLOSE)
