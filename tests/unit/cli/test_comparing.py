"""``tspipe plan --compare``: DDP and FSDP2 beside the pipelines."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_tspipe.cli import modules
from lightning_tspipe.cli.main import main
from lightning_tspipe.planning.cluster import Link
from lightning_tspipe.planning.overlap import Collectives
from tests.unit.cli.profiles import step_profile
from tests.unit.cli.test_cli import MODULE


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(step_profile().to_json())
    return path


def compare(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    options = ("--devices", 4, "--schedule", "tspipe", "--compare", *arguments)
    assert main(["plan", *map(str, options)]) == status
    output, errors = capsys.readouterr()
    return output or errors


def row(output: str, name: str) -> str:
    """The line of a way in the comparison."""
    lines = output.partition("the same devices with data parallelism:")[2].splitlines()
    return next(line for line in lines if line.lstrip("* ").startswith(f"{name} "))


def test_ddp_where_it_fits_and_the_link_is_fast(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = compare(capsys, profile, "--link", "100GB/s", "--latency", "5us")
    assert row(output, "DDP").startswith("*")
    assert row(output, "DDP").endswith("yes")
    assert "DDP fits and is " in output
    assert 'use Trainer(strategy="ddp"), and batch_size=4 for each device' in output
    assert "BatchNorm normalises over 4, and a loss that compares samples sees 4; in this" in output
    assert "the loss all 16" in output


def test_a_pipeline_where_gradients_are_large_for_the_link(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = compare(capsys, profile, "--link", "50MB/s", "--latency", "5us")
    assert row(output, "tspipe").startswith("*")
    assert "DDP fits, but takes " in output
    assert output.partition("times as fast as FSDP2: use ")[2].startswith('strategy="tspipe"')


def test_what_divides_the_state_where_no_device_holds_it(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = ("--link", "100GB/s", "--latency", "5us")
    output = compare(capsys, profile, *fast, "--memory", "12MB")
    assert row(output, "DDP").endswith("too much")
    assert row(output, "FSDP2").startswith("*")
    assert "no device holds the whole of it (DDP: 32.1 MB of 12.0 MB); FSDP2 fits and is" in output
    assert "use ModelParallelStrategy(), with fully_shard" in output
    output = compare(capsys, profile, *fast, "--memory", "9MB")
    assert 'tspipe fits, and FSDP2 does not: use strategy="tspipe"' in output
    output = compare(capsys, profile, *fast, "--memory", "5MB", status=2)
    assert "neither a pipeline nor DDP nor FSDP2 fits: take more devices" in output


def test_only_data_parallelism_fits(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--devices", 16, "--memory", "99MB", "--batch", 32)
    output = compare(capsys, profile, *options)
    assert "DDP fits, and no pipeline does: use" in output
    assert "Calls of 2 samples" not in output


def test_samples_that_cannot_be_divided(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = compare(capsys, profile, "--batch", 2, "--microbatches", 1)
    assert "DDP: the samples of an update, 2, cannot be divided evenly among 4 devices" in output
    assert "DDP cannot divide the batch" in output
    output = compare(capsys, profile, "--batch", 2, "--window", 4, "--schedule", "1f1b")
    assert "yes" in row(output, "DDP")


def test_relay_compares_by_itself(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = compare(capsys, profile, "--schedule", "relay", status=2)
    assert "remove --compare" in output


def test_what_is_measured_here_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "module.py"
    path.write_text(MODULE)
    slow = Link(1.0, 1e9)
    links = Collectives(2, slow, slow, slow, overlap=0.25)
    monkeypatch.setattr(modules, "measure_collectives", lambda _: links)
    arguments = ("plan", path, "--devices", 2, "--schedule", "gpipe", "--compare")
    assert main(list(map(str, arguments))) == 0
    output, progress = capsys.readouterr()
    assert "1 GB/s, 1e+06 µs per message, 25% of it hidden behind computing" in progress
    # Four layers of a few bytes are one bucket: there and back, a second each.
    assert " 2 s " in row(output, "DDP")
    assert row(output, "gpipe").startswith("*")
    # A link that is given is that of all.
    assert main([*map(str, arguments), "--link", "1GB/s", "--latency", "1us"]) == 0
    output, progress = capsys.readouterr()
    assert "hidden" not in progress
    assert " 2 s " not in row(output, "DDP")


@pytest.mark.slow
@pytest.mark.distributed
def test_collectives_are_measured_between_two_processes() -> None:
    found = modules.measure_collectives("cpu")
    assert found is not None
    assert found.num_devices == 2
    assert 0 <= found.overlap <= 1
    for link in (found.all_reduce, found.all_gather, found.reduce_scatter):
        assert 0 < link.latency < 1
        assert 0 < link.bandwidth < 1e12
