"""Damaged single files, and blocks of files, are found, or the damage changes nothing."""

from __future__ import annotations

import random
import shutil
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tspipe.errors import CheckpointError
from lightning_tspipe.strategy.checkpoints.files import explain_damage, verify_file, write_whole
from tests.unit.strategy.test_damage import flip, refusal, same


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "step=1.ckpt"
    write_whole({"state_dict": {"x": torch.randn(30), "y": torch.ones(2)}, "epoch": 3}, path)
    return path


def load_file(path: Path, *, mapped: bool, verify: bool = True) -> Any:
    with explain_damage(path):
        if verify:
            verify_file(path)
        found = torch.load(path, mmap=mapped)
        return {**found, "state_dict": {k: v.clone() for k, v in found["state_dict"].items()}}


def test_every_flipped_byte_of_a_file_is_found_or_harmless(file: Path) -> None:
    expected, size = load_file(file, mapped=False), file.stat().st_size
    seeded = random.Random("every byte")  # noqa: S311
    told = [
        refusal(
            partial(load_file, file, mapped=bool(place % 2)), expected, file, place,
            seeded.randrange(8),
        )
        for place in range(size)
    ]  # fmt: skip
    found = [text for text in told if text is not None]
    assert all("step=1.ckpt' is " in text and "\n" not in text for text in found)
    assert len(found) > size / 3  # the rest is padding, and dates


def test_a_flipped_bit_of_a_file_is_read_where_nothing_is_compared(file: Path) -> None:
    expected = load_file(file, mapped=False)
    with zipfile.ZipFile(file) as archive:
        (record,) = [one for one in archive.infolist() if one.filename.endswith("data/0")]
    place = file.read_bytes().index(expected["state_dict"]["x"].numpy().tobytes())
    flip(file, place, 6)
    told = r"the record '[^']*data/0' differs .*verify_checkpoint=False\) would read it"
    with pytest.raises(CheckpointError, match=told):
        load_file(file, mapped=False)
    assert not same(load_file(file, mapped=False, verify=False), expected)
    assert record.file_size == 120


def test_a_record_that_torch_would_take_for_a_folder(file: Path) -> None:
    """Its tensor would keep what happens to be in memory."""
    content = file.read_bytes()
    place = content.rindex(b"PK\x01\x02", 0, content.rindex(b"data/0"))
    flip(file, place + 38, 4)
    with pytest.raises(CheckpointError, match="the record 'archive/data/0' differs"):
        verify_file(file)


@pytest.mark.parametrize("part", [0.01, 0.3, 0.9, 0.99])
def test_a_cut_off_file_is_named(part: float, file: Path) -> None:
    content = file.read_bytes()
    shutil.copy(file, file.with_name("step=0.ckpt"))
    file.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(CheckpointError, match=r"its folder also has 'step=0.ckpt'") as caught:
        load_file(file, mapped=False)
    assert "step=1.ckpt' is not a complete checkpoint" in str(caught.value)


def test_a_file_without_checksums_is_loaded(file: Path) -> None:
    expected = load_file(file, mapped=False)
    options = torch.serialization.set_crc32_options
    options(False)
    try:
        torch.save(expected, file)
    finally:
        options(True)
    assert not verify_file(file)
    assert same(load_file(file, mapped=False), expected)


def test_files_of_other_formats_are_not_compared(tmp_path: Path) -> None:
    torch.save({"x": 1}, old := tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert verify_file(old)
    assert verify_file(tmp_path)
    assert verify_file(tmp_path / "none")
