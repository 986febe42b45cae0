"""``tspipe plot``."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_tspipe.cli.main import main
from lightning_tspipe.cli.plotting import read_curves

CSV = """\
elapsed,epoch,step,train_loss,val_knn_top1
10.0,0,10,2.0,
,0,14,,0.25
20.0,1,20,1.5,
,1,24,,0.5
"""


def plot(*arguments: object) -> int:
    return main(["plot", *map(str, arguments)])


def written(folder: Path, text: str = CSV) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(text)
    return folder


def test_values_have_a_time(tmp_path: Path) -> None:
    curves = read_curves(written(tmp_path / "run") / "metrics.csv")
    assert curves.keys() == {"train_loss", "val_knn_top1"}
    assert curves["train_loss"].seconds == (10.0, 20.0)
    assert curves["val_knn_top1"].steps == (14.0, 24.0)
    assert curves["val_knn_top1"].seconds == (14.0, 20.0)  # in proportion; at most what is known
    assert curves["val_knn_top1"].values == (0.25, 0.5)


def test_draws_runs_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    runs = written(tmp_path / "vanilla"), written(tmp_path / "tspipe") / "metrics.csv"
    image = tmp_path / "curves.svg"
    assert plot(*runs, "--image", image) == 0
    assert capsys.readouterr().out.strip() == str(image)
    text = image.read_text()
    for word in ("vanilla", "tspipe", "train_loss", "val_knn_top1", "steps", "minutes of training"):
        assert f">{word}<" in text


def test_what_a_logger_wrote_without_a_clock(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    logger = CSVLogger(tmp_path, name="", version="run")
    logger.log_metrics({"speed": 3.0}, step=1)
    logger.log_metrics({"speed": 4.0}, step=2)
    logger.save()
    image = tmp_path / "curves.svg"
    assert plot(tmp_path / "run", "--metrics", "speed", "--image", image) == 0
    assert "minutes of training" not in image.read_text()


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (CSV, ("--metrics", "accuracy"), "no run has accuracy; choose --metrics among train_loss"),
        ("step,speed\n1,2.0\n", (), "no run has a loss or an accuracy"),
        ("a,b\n1,2\n", (), "no column 'step'"),
    ],
)
def test_refused(
    text: str,
    options: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert plot(written(tmp_path / "run", text), *options) == 2
    assert message in capsys.readouterr().err


def test_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot(tmp_path / "none.csv") == 2
    assert "there is no file" in capsys.readouterr().err
