"""The report of a pipeline of two processes, also where one of them fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

from lightning_tspipe import KNNEvaluator, PipelineThroughputMonitor, PipelineTimeline, RunReport
from tests.browser import browser
from tests.exactness.modules import images, labels
from tests.integration.jobs import run, run_job
from tests.integration.trainings import Session, Training

BYOL = Training("Byol-group-2-by hand", "instance", {"num_microbatches": 2})
SIZES = ((4,) * 8, (4,) * 8)


class Fails(Callback):
    """Fails on one rank, in its fourth step."""

    @override
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 3:
            raise ValueError("the second rank is broken")


def report(*further: Callback) -> None:
    bank = [(images(6, seed), labels(6, seed)) for seed in range(60, 63)]
    Session(
        replace(BYOL, sizes=SIZES),
        RunReport(),
        KNNEvaluator(bank, bank, features="student", k=3),
        PipelineThroughputMonitor(window=3),
        PipelineTimeline(start_step=1),
        *further,
        logger=CSVLogger(".", name="", version="log"),
    ).fit()


def test_all_ranks_are_in_the_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(report, num_ranks=2, folder=tmp_path)
    file = tmp_path / "log" / "report.html"
    page = file.read_text(encoding="utf-8")
    assert ">finished<" in page
    assert "16 steps, 2 whole epochs" in page
    # The plan of each rank, with the peak that was measured on it.
    for rank in range(2):
        (row,) = [line for line in page.splitlines() if f'"row">{rank}</th>' in line]
        assert row.count(" MB</td>") + row.count(" GB</td>") == 3
    for text in ("val_knn_top1", "samples per second", "lightning-tspipe 0"):
        assert text in page
    with browser(tmp_path) as chromium:
        shown = chromium.open(file)
        ranks = shown.js("[...document.querySelectorAll('.ranks li')].map(each => each.innerText)")
        assert [text.split("\n")[0] for text in ranks] == ["rank 0", "rank 1"] * 2
        titles = shown.js("[...document.querySelectorAll('h3')].map(each => each.innerText)")
        assert [title.split(":")[0] for title in titles] == ["measured", "simulated from the plan"]
        assert shown.js("document.querySelectorAll('svg').length") == 4
        assert not shown.problems


@pytest.mark.slow
def test_the_report_of_a_run_in_which_another_rank_failed(tmp_path: Path) -> None:
    job = run_job(report, Fails(), num_ranks=2, folder=tmp_path)
    assert "the second rank is broken" in job.errors[1]
    page = (tmp_path / "log" / "report.html").read_text(encoding="utf-8")
    assert "failed: " in page
    assert "could not receive from rank 1" in page  # the cause comes when the callbacks have ended
    assert "3 steps" in page
    assert '"row">1</th>' in page  # the plan
