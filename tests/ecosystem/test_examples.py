"""Every example trains in its fast mode, over two stages; and it trains what one device trains."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.choosing import some_of
from tests.ecosystem.examples import (
    DISTILLATION,
    DRAWING,
    EXAMPLES,
    FINE_TUNING,
    NAMES,
    ROOT,
    SELF_SUPERVISED,
    column,
    command,
    in_forks,
)

# A minute on two idle cores.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]
TSPIPE = ["-m", "lightning_tspipe.cli"]
EXACT = ["--trainer.precision", "64-true"]
# BatchNorm sees micro-batches, where there are any.
WHOLE = [
    "--trainer.strategy=lightning_tspipe.TSPipeStrategy",
    "--trainer.strategy.num_microbatches=1",
]


def check(folder: Path, name: str) -> None:
    losses = column(folder, name, "loss")
    assert len(losses) >= 3
    assert all(map(math.isfinite, losses))
    assert len(column(folder, name, "samples_per_second")) > 0
    if name == "language_model":
        assert column(folder, name, "val_perplexity")[0] < 257  # better than chance
    elif name != "distilbert":
        metric = "val_knn_top1" if name in SELF_SUPERVISED else "val_accuracy"
        (accuracy,) = column(folder, name, metric)
        assert 0 <= accuracy <= 1


@pytest.mark.slow
def test_an_example_is_a_command(tmp_path: Path) -> None:
    command(tmp_path, str(EXAMPLES / "byol.py"), "--fast")
    check(tmp_path, "byol")
    (config,) = (tmp_path / "runs" / "byol").glob("version_*/config.yaml")
    assert "strategy: tspipe" in config.read_text()  # and one rank wrote it


# Those that are not here are commands among the slow tests.
@pytest.mark.each
@pytest.mark.parametrize(
    "name",
    some_of(
        ["dino", "dinov2", "distilbert", "kd", "language_model"],
        slow=["dinov2", "distilbert"],
        always=["kd", "language_model"],
    ),
)
def test_an_example_trains_in_its_fast_mode(name: str, tmp_path: Path) -> None:
    in_forks(tmp_path, name, "--fast")
    check(tmp_path, name)


@pytest.mark.parametrize(
    "name", ["finetune_text", pytest.param("finetune_vit", marks=pytest.mark.slow)]
)
def test_layers_freeze_and_what_they_return_is_cached(name: str, tmp_path: Path) -> None:
    in_forks(tmp_path, name, "--fast", num_ranks=1)
    assert all(map(math.isfinite, column(tmp_path, name, "loss")))
    assert len(column(tmp_path, name, "val_accuracy")) == 4
    # Layers freeze in epoch 1, whose samples are all but the last batch's.
    first, second, third = column(tmp_path, name, "cache_hit_rate")
    assert first == 0
    assert min(second, third) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", FINE_TUNING)
def test_the_fine_tuned_networks_can_be_planned(name: str, tmp_path: Path) -> None:
    output = command(tmp_path, *TSPIPE, "plan", str(EXAMPLES / f"{name}.py"), "--devices", "2")
    assert "\n1  " in output


@pytest.mark.slow
def test_a_language_model_learns_by_kept_targets(tmp_path: Path) -> None:
    text = tmp_path / "text.md"
    text.write_text((ROOT / "README.md").read_text()[:6000])
    given = "--config", str(EXAMPLES / "configs" / "language_model_fast.yaml")
    data = "--data.path", str(text), "--data.held_out", "10"
    writer = "--trainer.callbacks", "lightning_tspipe.TargetWriter"
    where = "--trainer.callbacks.folder", "kept", "--model.k", "16"
    in_forks(tmp_path, "language_model", "predict", *given, *data, *writer, *where)
    kept = "--model.kept", "true", "--data.targets", "kept"
    in_forks(tmp_path, "language_model", "--fast", *data, *kept)
    check(tmp_path, "language_model")
    assert not column(tmp_path, "language_model", "teacher_perplexity")


@pytest.mark.parametrize(
    "name",
    some_of([name for name in NAMES if name != "byol"], slow=[]),
)
def test_each_example_is_a_command(name: str, tmp_path: Path) -> None:
    command(tmp_path, str(EXAMPLES / f"{name}.py"), "--fast")
    check(tmp_path, name)


@pytest.mark.slow
def test_a_frozen_teacher_anchors_patches(tmp_path: Path) -> None:
    in_forks(tmp_path, "dinov2", "--fast", "--model.gram", "1.0")
    anchored = column(tmp_path, "dinov2", "loss")
    assert all(map(math.isfinite, anchored))
    in_forks(tmp_path, "dinov2", "--fast")
    assert anchored[-1] != column(tmp_path, "dinov2", "loss")[-1]


@pytest.mark.parametrize(
    "name",
    some_of(
        [name for name in NAMES if name not in DRAWING],
        slow=["feature_kd", "language_model"],
    ),
)
def test_an_example_trains_what_one_device_trains(name: str, tmp_path: Path) -> None:
    in_forks(tmp_path, name, "--fast", *EXACT, *WHOLE)
    over_two = column(tmp_path, name, "loss")
    alone = ["--trainer.strategy", "auto", "--trainer.devices", "1"]
    if name not in DISTILLATION:  # whose teacher never changes
        alone += ["--trainer.callbacks+=lightning_tspipe.DelayedTeacherUpdate"]
    in_forks(tmp_path, name, "--fast", *EXACT, *alone, num_ranks=1)
    assert over_two == pytest.approx(column(tmp_path, name, "loss"), rel=1e-9)


@pytest.mark.timeout(300)  # real networks are measured, on two cores
@pytest.mark.parametrize(
    "name",
    some_of(
        ["byol", "feature_kd", "distilbert", "kd", "language_model"],
        slow=["distilbert", "language_model"],
    ),
)
def test_an_example_is_planned(name: str, tmp_path: Path) -> None:
    file = str(EXAMPLES / f"{name}.py")
    output = command(tmp_path, *TSPIPE, "plan", file, "--devices", "4", seconds=280)
    assert "\n3  " in output  # the line of rank 3


@pytest.mark.timeout(300)  # real networks in float64, on two cores
@pytest.mark.parametrize(
    "name",
    some_of(
        ["dino", "dinov2", "distilbert", "mean_teacher", "language_model"],
        slow=["language_model"],
    ),
)
def test_an_example_is_checked(name: str, tmp_path: Path) -> None:
    file = str(EXAMPLES / f"{name}.py")
    output = command(tmp_path, *TSPIPE, "check", file, "--steps", "1", seconds=280)
    assert "the same" in output
    head, *rows = output[output.index("network ") :].splitlines()
    assert head.split() == ["network", "kind", "called", "as", "parameters", "ranks"]
    assert any("  trained  " in row for row in rows)
    assert any("  forward-only  " in row for row in rows)


@pytest.mark.exhaustive
def test_the_strategy_is_configured_and_a_checkpoint_is_validated(tmp_path: Path) -> None:
    strategy = [
        "--trainer.strategy=lightning_tspipe.TSPipeStrategy",
        "--trainer.strategy.schedule=gpipe",
        "--trainer.strategy.num_microbatches=2",
    ]
    file = str(EXAMPLES / "kd.py")
    command(tmp_path, file, "--fast", *strategy)
    (checkpoint,) = (tmp_path / "runs" / "kd").glob("version_*/checkpoints/*.ckpt")
    config = ["--config", str(EXAMPLES / "configs" / "kd_fast.yaml")]
    output = command(tmp_path, file, "validate", *config, "--ckpt_path", str(checkpoint))
    assert "val_accuracy" in output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_heads_on_a_trunk_are_those_of_one_device_and_are_exported(tmp_path: Path) -> None:
    in_forks(tmp_path, "fanout", "--fast", *EXACT)
    names = ("kind", "animal", "rotation")
    over_two = {name: column(tmp_path, "fanout", f"{name}/loss") for name in names}
    alone = ["--trainer.strategy", "auto", "--trainer.devices", "1"]
    in_forks(tmp_path, "fanout", "--fast", *EXACT, *alone, num_ranks=1)
    for name, losses in over_two.items():
        assert losses == pytest.approx(column(tmp_path, "fanout", f"{name}/loss"), rel=1e-9)
    head = tmp_path / "runs" / "fanout" / "heads" / "rotation.ckpt"
    output = command(tmp_path, *TSPIPE, "export", str(head), "--part", "student.heads.rotation")
    assert "4 tensors" in output


@pytest.mark.exhaustive
@pytest.mark.timeout(300)  # real networks, on two cores
def test_blocks_are_compressed_and_then_trained_on_labels(tmp_path: Path) -> None:
    short = [*EXACT, "--trainer.limit_train_batches", "2"]
    teacher = tmp_path / "teachers" / "vgg.pt"
    in_forks(tmp_path, "block_teacher", "--fast", "--model.file", str(teacher))
    short += ["--model.weights", str(teacher)]
    in_forks(tmp_path, "compression", "--fast", *short)
    over_two = column(tmp_path, "compression", "train_loss")
    (file,) = (tmp_path / "runs" / "compression").glob("version_0/checkpoints/*.ckpt")
    in_forks(tmp_path, "compression_finetune", "--fast", "--model.checkpoint", str(file))
    assert all(map(math.isfinite, column(tmp_path, "compression_finetune", "loss")))
    alone = ["--trainer.strategy", "auto", "--trainer.devices", "1"]
    in_forks(tmp_path, "compression", "--fast", *short, *alone, num_ranks=1)
    assert over_two == pytest.approx(column(tmp_path, "compression", "train_loss"), rel=1e-9)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_an_architecture_is_searched_and_then_trained(tmp_path: Path) -> None:
    in_forks(tmp_path, "architecture_search", "--fast", "--trainer.limit_train_batches", "2")
    assert column(tmp_path, "architecture_search", "train_loss/block_5")
    (file,) = (tmp_path / "runs" / "architecture_search").glob("version_*/architecture.json")
    in_forks(tmp_path, "found_architecture", "--fast", "--model.architecture", str(file))
    assert all(map(math.isfinite, column(tmp_path, "found_architecture", "loss")))
