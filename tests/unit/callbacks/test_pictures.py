"""Pictures reach the loggers that take some, without being asked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboardX.proto.event_pb2 import Event
from typing_extensions import override

from lightning_tspipe.callbacks import KNNEvaluator, PipelineTimeline
from tests.unit.callbacks.test_timeline import MEASURED, FakePipeline
from tests.unit.cli.profiles import step_profile


class Board(Logger):
    """Shaped like WandbLogger."""

    name, version = "board", "0"  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.pictures: dict[str, tuple[Any, int | None]] = {}

    @override
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    @override
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None: ...

    def log_image(self, key: str, images: list[Any], step: int | None = None, **_: Any) -> None:
        assert key not in self.pictures
        (self.pictures[key],) = [(image, step) for image in images]


def images_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    """The pictures in TensorBoard's file: records of length, checksum, event, checksum."""
    (path,) = folder.glob("events.out.tfevents.*")
    data, found, start = path.read_bytes(), {}, 0
    while start < len(data):
        size = int.from_bytes(data[start : start + 8], "little")
        event = Event.FromString(data[start + 12 : start + 12 + size])
        for value in event.summary.value:
            if value.HasField("image"):
                found[value.tag] = value.image.encoded_image_string, event.step
        start += 12 + size + 4
    return found


def evaluator() -> KNNEvaluator:
    labelled = [(torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 2) for _ in range(2)]
    return KNNEvaluator(labelled, labelled, k=2)


def train(lab: SimpleNamespace, *loggers: Logger, **options: Any) -> None:
    pipeline = FakePipeline(MEASURED)
    pipeline.plan = step_profile().plan(2)
    trainer = lab.trainer(callbacks=[PipelineTimeline(2)], logger=list(loggers), **options)
    trainer.strategy.pipelined = pipeline
    trainer.fit(lab.module(), lab.loader(4))


def test_timeline_and_plan_reach_every_logger_that_takes_pictures(
    lab: SimpleNamespace, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    board = Board()
    train(
        lab,
        CSVLogger(tmp_path, name="", version="csv"),
        TensorBoardLogger(tmp_path, name="", version="tensorboard"),
        board,
    )
    assert list(board.pictures) == ["timeline/plan", "timeline/measured"]
    for picture, step in board.pictures.values():
        assert picture.dtype == np.uint8
        assert picture.shape[2] == 3
        assert min(picture.shape[:2]) > 100
        assert len(np.unique(picture)) > 10
        assert step == 4  # where the epoch ended in which the window did
    found = images_of(tmp_path / "tensorboard")
    assert sorted(found) == ["timeline/measured", "timeline/plan"]
    assert all(data.startswith(b"\x89PNG") and step == 4 for data, step in found.values())


def test_the_curve_of_accuracies(lab: SimpleNamespace, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    board, callback = Board(), evaluator()
    trainer = lab.trainer(callbacks=[callback], logger=board, max_epochs=3)
    trainer.fit(lab.module(), lab.loader(2))
    assert [(key, step) for key, (_, step) in board.pictures.items()] == [("val_knn_curve", 6)]
    # Each fit has a curve of its own.
    board.pictures.clear()
    lab.trainer(callbacks=[callback], logger=board, max_epochs=1).fit(lab.module(), lab.loader(2))
    assert list(board.pictures) == ["val_knn_curve"]


def test_a_run_that_fails_keeps_what_it_has(lab: SimpleNamespace) -> None:
    pytest.importorskip("matplotlib")
    board, module = Board(), lab.module()

    def fail(*_: Any) -> None:
        if module.global_step >= 3:
            raise ValueError("broken")

    module.after_student = fail
    trainer = lab.trainer(callbacks=[evaluator()], logger=board, max_epochs=3)
    with pytest.raises(ValueError, match="broken"):
        trainer.fit(module, lab.loader(2))
    assert list(board.pictures) == ["val_knn_curve"]


def test_a_logger_that_fails_does_not_end_the_training(lab: SimpleNamespace) -> None:
    pytest.importorskip("matplotlib")

    class Other(Board):
        def log_image(self, picture: Any) -> None:  # type: ignore[override]
            """Not W&B's arguments."""

    board = Board()
    with pytest.warns(UserWarning, match="Other took no picture") as said:
        train(lab, Other(), board)
    texts = [text for each in said if "no picture" in (text := str(each.message))]
    assert [text.split("'")[1] for text in texts] == ["timeline/plan", "timeline/measured"]
    assert all("TypeError" in text for text in texts)
    assert list(board.pictures) == ["timeline/plan", "timeline/measured"]


def test_nothing_is_drawn_for_loggers_without_pictures(
    lab: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_tspipe.callbacks.features.draw_curves", None)
    trainer = lab.trainer(callbacks=[evaluator()], logger=CSVLogger(tmp_path), max_epochs=1)
    trainer.fit(lab.module(), lab.loader(2))
