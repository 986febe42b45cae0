from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_tspipe.callbacks import AutoResume, auto_resume
from lightning_tspipe.errors import CheckpointError, ConfigurationError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*ckpt_path=None.* was called without a model"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no"),
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path., callbacks"),
]


def fit(
    lab: SimpleNamespace, steps: int, *callbacks: Any, path: Any = None, **options: Any
) -> tuple[int, list[float]]:
    """The steps before the fit, and its losses."""
    module = lab.module()
    first: list[int] = []
    module.on_train_start = lambda: first.append(module.trainer.global_step)
    options = {"max_epochs": -1, "max_steps": steps, "enable_checkpointing": True, **options}
    trainer = lab.trainer(callbacks=[*callbacks], **options)
    trainer.fit(module, lab.loader(4), ckpt_path=path)
    return (first or [steps])[0], module.losses


def saving(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, **{"every_n_train_steps": 1, "save_top_k": -1, **options})


def test_the_first_start_begins_and_the_next_one_goes_on(
    lab: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = fit(lab, 6, saving(tmp_path / "whole"))[1]
    with caplog.at_level(logging.INFO):
        begun = fit(lab, 3, AutoResume(), saving(tmp_path / "saved"))
        resumed = fit(lab, 6, AutoResume(), saving(tmp_path / "saved"))
    assert begun == (0, whole[:3])
    assert resumed == (3, whole[3:])
    assert f"no checkpoint in {tmp_path / 'saved'}: the training begins" in caplog.text
    assert f"goes on from '{tmp_path / 'saved' / 'epoch=0-step=3.ckpt'}', step 3" in caplog.text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"every_n_train_steps": 2, "save_top_k": 1}, 4),
        ({"every_n_train_steps": 0, "every_n_epochs": 1, "save_last": True}, 4),
        ({"every_n_train_steps": 5, "save_last": "link"}, 5),
        ({"every_n_train_steps": 3, "save_top_k": 0, "save_last": True}, 3),
        ({"filename": "{epoch}/{step}"}, 5),
    ],
)
def test_any_checkpoint_of_a_model_checkpoint(
    options: dict[str, Any], expected: int, lab: SimpleNamespace, tmp_path: Path
) -> None:
    fit(lab, 5, saving(tmp_path / "saved", **options))
    # Saved at the end of a training by steps, too.
    assert fit(lab, 7, AutoResume(), saving(tmp_path / "saved", **options))[0] in {expected, 5}


def test_what_is_not_whole_is_skipped_with_a_warning(lab: SimpleNamespace, tmp_path: Path) -> None:
    whole = fit(lab, 6, saving(tmp_path))[1]
    for step in (5, 6):
        newest = next(tmp_path.glob(f"*step={step}.ckpt"))
        os.truncate(newest, newest.stat().st_size // 2)
    with pytest.warns(UserWarning, match=r"skips what no training can go on from:\n.*step=\d"):
        assert fit(lab, 6, AutoResume(), saving(tmp_path)) == (4, whole[4:])
    for path in tmp_path.glob("*.ckpt"):
        os.truncate(path, 100)
    with pytest.raises(CheckpointError, match=r"(?s)none of \d checkpoints is whole:\n.*Move them"):
        fit(lab, 6, AutoResume(), saving(tmp_path))


def test_a_path_that_is_given_wins(
    lab: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(lab, 4, saving(tmp_path))
    path = next(tmp_path.glob("*step=2.ckpt"))
    with caplog.at_level(logging.INFO):
        assert fit(lab, 6, AutoResume(), saving(tmp_path), path=path)[0] == 2
    assert f"ckpt_path={str(path)!r} was given, and is taken at each start" in caplog.text


def test_a_path_that_lightning_finds_is_one_among_others(
    lab: SimpleNamespace, tmp_path: Path
) -> None:
    """It takes the one that was written last."""
    fit(lab, 4, saving(tmp_path / "saved"))
    failed = OnExceptionCheckpoint(tmp_path)
    older = next((tmp_path / "saved").glob("*step=2.ckpt"))
    Path(failed.ckpt_path).write_bytes(older.read_bytes())
    assert fit(lab, 6, failed, saving(tmp_path / "saved"))[0] == 2
    Path(failed.ckpt_path).write_bytes(older.read_bytes())
    assert fit(lab, 6, AutoResume(), failed, saving(tmp_path / "saved"))[0] == 6
    for path in (tmp_path / "saved").glob("*.ckpt"):
        path.unlink()
    Path(failed.ckpt_path).write_bytes(b"")
    newer = fit(lab, 3, saving(tmp_path / "other"))
    assert newer[0] == 0
    Path(failed.ckpt_path).write_bytes(next((tmp_path / "other").glob("*=3.ckpt")).read_bytes())
    assert fit(lab, 6, AutoResume(), failed, saving(tmp_path / "saved"))[0] == 3


def test_a_second_fit_goes_on_from_memory(lab: SimpleNamespace, tmp_path: Path) -> None:
    fit(lab, 4, saving(tmp_path))
    module, resume = lab.module(), AutoResume()
    trainer = lab.trainer(
        callbacks=[resume, saving(tmp_path)], max_steps=6, max_epochs=-1, enable_checkpointing=True
    )
    trainer.fit(module, lab.loader(4))
    assert len(module.losses) == 2
    for path in tmp_path.glob("*.ckpt"):
        path.unlink()
    trainer.fit_loop.epoch_loop.max_steps = 7
    trainer.fit(module, lab.loader(4))
    assert len(module.losses) == 3


def test_a_folder_of_other_checkpoints(lab: SimpleNamespace, tmp_path: Path) -> None:
    fit(lab, 3, saving(tmp_path))
    options = {"enable_checkpointing": False}
    assert fit(lab, 5, AutoResume(tmp_path), **options)[0] == 3


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda _: [], "each start of this job would save into a new folder"),
        (lambda path: [saving(path, save_weights_only=True)], "only weights are saved"),
        (lambda _: [saving("s3://bucket/run")], "not into 's3://bucket/run'"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*s3")
def test_jobs_that_could_not_go_on_are_refused(
    made: Any, message: str, lab: SimpleNamespace, tmp_path: Path
) -> None:
    if "s3" in message:
        pytest.importorskip("s3fs")
    with pytest.raises(ConfigurationError, match=message):
        fit(lab, 3, AutoResume(), *made(tmp_path), logger=CSVLogger(tmp_path / "logs"))


def test_a_folder_that_an_evaluation_has_named_is_not_the_next_start_s(
    lab: SimpleNamespace, tmp_path: Path
) -> None:
    logger, module = CSVLogger(tmp_path / "logs"), lab.module()
    module.validation_step = lambda batch: None
    trainer = lab.trainer(callbacks=[AutoResume()], logger=logger, enable_checkpointing=True)
    trainer.validate(module, lab.loader(1), verbose=False)
    with pytest.raises(ConfigurationError, match="would save into a new folder"):
        trainer.fit(module, lab.loader(4))


def test_nothing_is_saved(lab: SimpleNamespace) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing is saved.*Add ModelCheckpoint\(dirpath"):
        fit(lab, 3, AutoResume(), enable_checkpointing=False)


def test_nodes_that_see_other_checkpoints(
    lab: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's folder has none; this node's has one."""
    fit(lab, 3, saving(tmp_path))
    monkeypatch.setattr(auto_resume, "_NEWS_SECONDS", 0.0)
    trainer = SimpleNamespace(
        num_nodes=2,
        local_rank=0,
        strategy=SimpleNamespace(reduce_boolean_decision=lambda decision: decision),
    )
    expected = sorted(tmp_path.glob("*.ckpt"))
    auto_resume._compare_nodes(trainer, expected, lambda: expected)
    with pytest.raises(ConfigurationError, match=r"only it has: .*step=3.ckpt.*that they share"):
        auto_resume._compare_nodes(trainer, expected[:-1], lambda: expected)
    trainer.strategy.reduce_boolean_decision = lambda decision: False
    with pytest.raises(ConfigurationError, match="other nodes see other checkpoints"):
        auto_resume._compare_nodes(trainer, expected, lambda: expected)


def test_a_short_run_for_debugging_leaves_it_alone(lab: SimpleNamespace, tmp_path: Path) -> None:
    fit(lab, 3, saving(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert fit(lab, 1, AutoResume(), saving(tmp_path), fast_dev_run=True)[0] == 0
