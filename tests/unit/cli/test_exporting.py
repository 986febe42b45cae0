"""``tspipe export``."""

from __future__ import annotations

import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_tspipe.cli.main import main
from lightning_tspipe.errors import ConfigurationError


def resnet() -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=7)


class Module(nn.Module):
    """As in lightly: the backbone is made of the children of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Module()
        self.student.net = resnet()
        self.student.backbone = nn.Sequential(*list(resnet().children())[:-1])
        self.student.head = nn.Linear(512, 4, bias=False)
        self.tied = nn.Linear(512, 4, bias=False)
        self.tied.weight = self.student.head.weight


def saved(folder: Path, kind: str, **extra: Any) -> Path:
    state, path = Module().state_dict(), folder / "last.ckpt"
    if kind == "file":
        torch.save({"state_dict": state, "epoch": 3, **extra}, path)
        return path
    path.mkdir()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save({"model": state}, storage_writer=FileSystemWriter(path), no_dist=True)
    torch.save({"epoch": 3}, path / "meta.pt")
    return path


def export(*arguments: object) -> int:
    return main(["export", *map(str, arguments)])


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_part_loads_into_the_plain_model(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(saved(tmp_path, kind), "--part", "student.net") == 0
    expected = resnet().state_dict()
    files = torch.load(tmp_path / "student.net.pt"), load_file(tmp_path / "student.net.safetensors")
    for found in files:
        torchvision.models.resnet18(num_classes=7).load_state_dict(found)
        torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)
    assert "122 tensors" in capsys.readouterr().out
    assert not list(tmp_path.glob(".*.part"))


def test_the_names_of_a_model_with_the_same_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "weights" / "backbone.pth"
    like = ("--like", "torchvision.models.resnet18")
    path = saved(tmp_path, "file")
    assert export(path, "--part", "student.backbone", "--output", output, *like) == 0
    assert [file.name for file in output.parent.iterdir()] == ["backbone.pth"]
    model = torchvision.models.resnet18()
    missing, unexpected = model.load_state_dict(torch.load(output), strict=False)
    assert missing == ["fc.weight", "fc.bias"]
    assert unexpected == []
    name = "layer4.1.conv2.weight"
    torch.testing.assert_close(model.state_dict()[name], resnet().state_dict()[name])
    assert "not in the checkpoint: fc.weight, fc.bias" in capsys.readouterr().out


def test_shards_have_no_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path, "folder")
    like = ("--like", "torchvision.models.resnet18")
    assert export(path, "--part", "student.backbone", *like) == 2
    assert "does not keep the module's order" in capsys.readouterr().err


def test_everything_with_tied_weights(tmp_path: Path) -> None:
    assert export(saved(tmp_path, "file"), "--output", tmp_path / "all.safetensors") == 0
    found = load_file(tmp_path / "all.safetensors")
    assert found.keys() == Module().state_dict().keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--part", "student.trunk"), "it has student.backbone"),
        (("--part", "teacher"), "it has student, tied"),
        (("--part", "tied", "--like", "torchvision.models.resnet18"), "'conv1.weight'"),
        (
            ("--part", "student", "--like", "torchvision.models.resnet18"),
            "the --like model has 122",
        ),
        (("--like", "torchvision.models.resnet19"), "resnet19"),
    ],
)
def test_refused(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(saved(tmp_path, "file"), *arguments) == 2
    assert message in capsys.readouterr().err


def test_files_that_are_no_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(tmp_path / "none.ckpt") == 2
    assert "there is no checkpoint" in capsys.readouterr().err
    torch.save({"weights": 1}, tmp_path / "other.ckpt")
    assert export(tmp_path / "other.ckpt") == 2
    assert "it has no state_dict" in capsys.readouterr().err
    whole = saved(tmp_path, "file")
    (tmp_path / "half.ckpt").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    assert export(tmp_path / "half.ckpt") == 2
    assert "not a complete checkpoint" in capsys.readouterr().err


def test_files_whose_reading_runs_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path, "file", hyper_parameters=Namespace(error=ConfigurationError("x")))
    assert export(path, "--part", "tied") == 2
    assert "--trust" in capsys.readouterr().err
    assert export(path, "--part", "tied", "--trust") == 0


def test_a_head_with_its_trunk_from_two_checkpoints(tmp_path: Path) -> None:
    best = {f"student.head.{key}": v + 1 for key, v in nn.Linear(512, 4).state_dict().items()}
    torch.save({"state_dict": best}, head := tmp_path / "head.ckpt")
    last, output = saved(tmp_path, "file"), tmp_path / "both.pt"
    parts = ["--part", "student.net", "--part", "student.head"]
    assert export(head, last, *parts, "--output", output) == 0
    found = torch.load(output)
    assert torch.equal(found["head.weight"], best["student.head.weight"])
    assert torch.equal(found["net.conv1.weight"], resnet().conv1.weight)
    assert len(found) == 2 + len(resnet().state_dict())
    assert export(head, last, "--part", "student.other") == 2
