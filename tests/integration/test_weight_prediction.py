"""The callback WeightPrediction under a Trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_tspipe import WeightPrediction
from lightning_tspipe.errors import ConfigurationError
from tests.integration.jobs import run
from tests.integration.test_resume import EPOCHS, Run, check, stop_and_go
from tests.integration.trainings import Session, Training, train

TRAINING = Training(
    "Byol-group-2-by hand", "instance", {"num_microbatches": 1}, sizes=((4, 4, 4, 4, 4, 4),)
)


def predicting() -> list[Any]:
    return [WeightPrediction()]


def test_distances_are_logged(tmp_path: Path) -> None:
    training = replace(TRAINING, callbacks=predicting)
    loss, data = run(train, training, num_ranks=2, folder=tmp_path)
    distance = loss.metrics["teacher_distance"]
    predicted = loss.metrics["teacher_distance_predicted"]
    assert distance > 0
    assert 0 < predicted < distance  # an average of weights that momentum moves on
    assert data.metrics == loss.metrics  # though the loss rank alone has counted them


def test_a_resumed_run_predicts_at_once(tmp_path: Path) -> None:
    training = replace(TRAINING, callbacks=predicting, trainer=EPOCHS)
    ranks = run(stop_and_go, Run(training, "fixed"), ["batch-2"], num_ranks=2, folder=tmp_path)
    whole, resumed = ranks[0]
    check(whole, resumed["batch-2"])


@pytest.mark.parametrize(
    ("strategy", "accumulate", "message"),
    [("auto", 1, "no teacher is late"), ("tspipe", 2, "the teacher changes in some steps only")],
)
def test_where_it_means_nothing_it_is_refused(
    strategy: str, accumulate: int, message: str, tmp_path: Path
) -> None:
    training = replace(TRAINING, strategy=strategy, num_ranks=1, callbacks=predicting)
    it = Session(
        training, accumulate_grad_batches=accumulate, default_root_dir=tmp_path, max_epochs=1
    )
    with pytest.raises(ConfigurationError, match=message):
        it.fit()
