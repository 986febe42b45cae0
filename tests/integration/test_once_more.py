"""On one device, a batch that failed comes once more in the run that goes on, or is not saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from pytorch_lightning import Callback as OtherCallback

from tests.integration.jobs import run, run_job
from tests.integration.test_resume import RUNS, Run, Went, check, go


class Fails(Callback, OtherCallback):
    """Raises in the middle of the third batch of the second epoch, and saves then."""

    def __init__(self, hook: str) -> None:
        self._hook = hook

    def __getattribute__(self, name: str) -> Any:
        hook = object.__getattribute__(self, "_hook") if name.startswith("on_") else ""
        return object.__getattribute__(self, "fail" if name == hook else name)

    def on_exception(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint("failed.ckpt")

    def fail(self, trainer: Any, *_: Any) -> None:
        loop = trainer.fit_loop
        if (loop.epoch_progress.current.completed, loop.epoch_loop.batch_idx) == (1, 2):
            raise ValueError("in the middle")


def fail_and_go(it: Run, hook: str) -> tuple[Went, Went | None]:
    """The whole run, and what became of it from what was saved when it failed."""
    whole = go(it)
    with pytest.raises(ValueError, match="in the middle"):
        go(it, callbacks=[Fails(hook)])
    return whole, go(it, "failed.ckpt") if Path("failed.ckpt").exists() else None


FAILING = {
    "momentum callback, adam": "on_before_backward",
    "random step, two micro-batches": "on_train_batch_start",
    "stateful": "on_train_batch_start",
    "generator": "on_train_batch_end",
}


@pytest.mark.parametrize("name", FAILING)
def test_one_device_that_fails_in_a_batch_trains_it_once_more(name: str, tmp_path: Path) -> None:
    training = replace(RUNS[name].training, num_ranks=1, callbacks=list)
    training = replace(training, case=training.case.replace("batch", "group"))
    it = replace(RUNS[name], training=training)
    ((whole, resumed),) = run(fail_and_go, it, FAILING[name], num_ranks=1, folder=tmp_path)
    assert len(resumed.losses) == (1 if name == "generator" else 2)
    check(whole, resumed)


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("accumulation", "on_before_backward"),  # gradients of earlier batches are there
        ("batchnorm", "on_before_backward"),  # the step has moved the teacher
        ("momentum callback, adam", "on_before_backward"),  # BatchNorm has counted
    ],
)
def test_what_can_not_be_trained_once_more_is_not_saved(
    name: str, hook: str, tmp_path: Path
) -> None:
    it = replace(RUNS[name], training=replace(RUNS[name].training, num_ranks=1, callbacks=list))
    job = run_job(fail_and_go, it, hook, num_ranks=1, folder=tmp_path)
    assert job.ranks[0].exit_code == 0, job.output
    assert job.ranks[0].value[1] is None, job.output
    assert "it came in the middle of a batch, part of which" in job.output
