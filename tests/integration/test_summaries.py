"""What is shown of a module and of the strategy: whole, and by stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from typing_extensions import override

from tests.integration.comparing import both
from tests.integration.jobs import run
from tests.integration.trainings import Session, Training

CLASSIFIER = Training(
    "Classifier-group", "instance", {"num_microbatches": 1}, sizes=((5, 5, 3, 4),)
)


class Kept(ModelSummary):
    """Keeps what it would show."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.shown: list[Any] = []

    @override
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        found = self._summary(trainer, pl_module)
        kept = found._get_summary_data(), found.total_parameters, found.model_size
        self.shown.append(kept)


def give_example(module: Any) -> None:
    module.example_input_array = torch.zeros(2, 3, 5, 5)
    type(module).forward = lambda self, x: self.net(x)


def summaries(training: Training) -> list[Any]:
    """Of two fits."""
    kept = Kept(max_depth=2)
    it = Session(training, kept, change=give_example).fit()
    it.trainer.fit_loop.max_epochs = 2
    it.fit()
    return kept.shown


@pytest.mark.slow
def test_summaries_are_those_of_one_device(tmp_path: Path) -> None:
    expected, ranks = both(summaries, CLASSIFIER, tmp_path)
    assert len(expected) == 2
    assert expected[0][1] > 0
    assert ranks == [expected, expected]


def printed(training: Training) -> list[str]:
    """Before and after a fit, and after an evaluation."""
    it = Session(training)
    strategy = it.trainer.strategy
    shown = [str(strategy)]
    it.fit()
    it.trainer.print(strategy)
    return [*shown, str(strategy), repr(strategy)]


@pytest.mark.slow
def test_a_strategy_prints_what_is_where(tmp_path: Path) -> None:
    training = Training("Byol-group-1-by hand", "instance", {"num_microbatches": 1})
    ranks = run(printed, training, folder=tmp_path)
    before, after, short = ranks[0]
    assert short == "TSPipeStrategy(schedule='tspipe')"
    assert before == f"{short}: stages are placed with the first batch"
    title, *tables = after.split("\n\n")
    assert title == f"{short} on 2 ranks"
    networks, stages, places = ([line.split() for line in t.splitlines()] for t in tables)
    assert networks[0][:2] == ["network", "kind"]
    assert [row[:2] for row in stages[1:]] == [
        ["student", "0"], ["student", "1"], ["teacher", "0"], ["teacher", "1"],
    ]  # fmt: skip
    count = {tuple(row[:2]): int(row[3].replace(",", "")) for row in stages[1:]}
    whole = {row[0]: int(row[-3].replace(",", "")) for row in networks[1:]}
    for name, number in whole.items():
        assert count[name, "0"] + count[name, "1"] == number
    assert [row[0] for row in places[1:]] == ["0", "1"]
    held = [int(row[1].replace(",", "")) for row in places[1:]]
    assert sum(held) == sum(whole.values())
    assert all(row[-1] in {"MB", "GB"} for row in places[1:])
    outputs = [(tmp_path / f"output-{rank}.txt").read_text() for rank in (0, 1)]
    assert [places[0][0] in output and title in output for output in outputs] == [True, False]
