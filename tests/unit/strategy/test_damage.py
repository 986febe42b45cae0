"""Damaged and foreign checkpoints are found, or the damage changes nothing."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from lightning_tspipe.errors import CheckpointError
from lightning_tspipe.strategy.checkpoints.folders import (
    BLOCK,
    CONTENTS_FILE,
    META_FILE,
    TABLE_FILE,
    FolderSource,
    from_json,
    is_sharded,
    to_json,
)
from lightning_tspipe.strategy.checkpoints.saving import own_optimizer_state
from lightning_tspipe.strategy.checkpoints.writing import ShardWriter

SHARD = "__0_0.distcp"
FILES = (SHARD, CONTENTS_FILE, META_FILE, TABLE_FILE)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(300, 900), nn.Linear(900, 7))  # more than a block
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(300)).sum().backward()
    optimizer.step()
    return module, optimizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module, optimizer = trained()
    path = tmp_path_factory.mktemp("whole") / "a.ckpt"
    states = {
        "model": module.state_dict(),
        "optimizer_0": own_optimizer_state(module, optimizer, lambda _: True),
    }
    writer = ShardWriter(timedelta(seconds=5), is_connected=False)
    writer.write(states, {"global_step": 2, "kept": torch.arange(3)}, path, waits=True)
    return path


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "a.ckpt"))


def read_all(path: Path, *, verify: bool = True, trusts: bool = False) -> dict[str, Any]:
    """What a training reads."""
    assert is_sharded(path)
    source = FolderSource(path, verify=verify, trusts=trusts)
    found: dict[str, Any] = dict(source.tensors(list(source.shapes)))
    for name, state in source.optimizer_state(0, [], list(source.shapes)).items():
        found |= {f"{name} {what}": value for what, value in state.items()}
    keys = trained()[1].state_dict()["param_groups"]
    found["groups"] = source.optimizer_groups(0, keys)
    return found | source.rest()


def same(one: Any, other: Any) -> bool:
    try:
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True


def flip(file: Path, place: int, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 1 << bit]))


def refusal(read: Any, expected: Any, file: Path, place: int, bit: int) -> str | None:
    """What is said of a flipped bit; None if it changes nothing."""
    flip(file, place, bit)
    try:
        assert same(read(), expected), f"bit {bit} of byte {place:,}"
    except CheckpointError as error:
        return str(error)
    finally:
        flip(file, place, bit)
    return None


def places(file: Path, number: int) -> Iterator[tuple[int, int]]:
    seeded = random.Random(f"flips {file.name}")  # noqa: S311
    for _ in range(number):
        yield seeded.randrange(file.stat().st_size), seeded.randrange(8)


def test_what_was_written_is_read(path: Path) -> None:
    module, optimizer = trained()
    found = read_all(path)
    assert all(torch.equal(found[name], value) for name, value in module.state_dict().items())
    assert found["groups"] == optimizer.state_dict()["param_groups"]
    assert torch.equal(found["0.weight exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert found["global_step"] == 2
    assert same(read_all(path, verify=False), found)


@pytest.mark.parametrize("name", FILES)
def test_flipped_bits_are_found_or_harmless(name: str, path: Path) -> None:
    expected = read_all(path)
    told = [
        refusal(partial(read_all, path), expected, path / name, place, bit)
        for place, bit in places(path / name, 40)
    ]
    found = [text for text in told if text is not None]
    assert all(name in text for text in found)
    assert len(found) == 40 if name != TABLE_FILE else len(found) >= 30
    assert same(read_all(path), expected)


def test_a_flipped_bit_of_a_weight_is_read_where_nothing_is_compared(path: Path) -> None:
    expected, place = read_all(path), (path / SHARD).stat().st_size // 2
    flip(path / SHARD, place, 6)
    first = place // BLOCK * BLOCK
    with pytest.raises(CheckpointError, match=f"bytes {first:,} to .* differ from .* so 'model.0."):
        read_all(path)
    found = read_all(path, verify=False)
    assert not same(found, expected)
    assert found.keys() == expected.keys()


def test_only_what_is_read_is_compared(path: Path) -> None:
    flip(path / SHARD, 0, 6)
    source, damaged = FolderSource(path), set()
    for name in source.shapes:
        try:
            source.tensors([name])
        except CheckpointError:
            damaged.add(name)
    assert damaged
    assert damaged < source.shapes.keys()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("left", [0, 1, 100, 0.5, -1])
def test_cut_off_and_missing_files_are_named(left: float, name: str, path: Path) -> None:
    file = path / name
    size = file.stat().st_size
    keep = size // 2 if left == 0.5 else int(left) % size
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(
        CheckpointError, match=f"a.ckpt' is damaged.*{name}.*Give another ckpt_path"
    ):
        read_all(path)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{name}.*is missing"):
        read_all(path)


@pytest.mark.parametrize("name", [SHARD, CONTENTS_FILE, META_FILE])
def test_a_cut_off_file_is_named_without_checksums_too(name: str, path: Path) -> None:
    file = path / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    (path.parent / "b.ckpt").mkdir()
    with pytest.raises(CheckpointError, match=r"its folder also has 'b.ckpt'") as caught:
        read_all(path, verify=False)
    assert name in str(caught.value)
    assert caught.value.__cause__ is None
    assert "\n" not in str(caught.value)


def test_a_folder_of_before_has_no_checksums(path: Path) -> None:
    expected = read_all(path)
    (path / TABLE_FILE).unlink()
    meta = torch.load(path / META_FILE)
    assert meta.pop("lightning_tspipe_checksums")
    torch.save(meta, path / META_FILE)
    assert not FolderSource(path).has_checksums
    assert same(read_all(path), expected)


# Reading runs nothing


class Running:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._trace),)


def with_contents(path: Path, contents: Any) -> None:
    (path / TABLE_FILE).unlink(missing_ok=True)
    (path / CONTENTS_FILE).write_bytes(pickle.dumps(contents))


@pytest.mark.parametrize("trusts", [False, True])
@pytest.mark.parametrize("where", ["alone", "within"])
def test_contents_run_nothing(where: str, trusts: bool, path: Path, tmp_path: Path) -> None:
    running: Any = Running(tmp_path / "trace")
    contents: Any = running
    if where == "within":
        contents = pickle.loads((path / CONTENTS_FILE).read_bytes())  # noqa: S301 - our own
        contents.storage_meta.modules = [running]
    with_contents(path, contents)
    with pytest.raises(
        CheckpointError, match=r"would load posix.mkdir, .* No code from it was run"
    ):
        read_all(path, trusts=trusts)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("ctorch\nsave\n(I1\nV{trace}\ntR.", "would load torch.save"),
        ("P1\n.", "refers to objects outside"),
    ],
)
def test_contents_reach_nothing_but_data(
    content: str, told: str, path: Path, tmp_path: Path
) -> None:
    """Of torch itself only dtypes are known, and nothing that is not in the file."""
    (path / TABLE_FILE).unlink()
    (path / CONTENTS_FILE).write_text(content.format(trace=tmp_path / "trace"))
    with pytest.raises(CheckpointError, match=told):
        read_all(path)
    assert not (tmp_path / "trace").exists()


def test_the_rest_runs_nothing(path: Path, tmp_path: Path) -> None:
    (path / TABLE_FILE).unlink()
    torch.save({"x": Running(tmp_path / "trace")}, path / META_FILE)
    with pytest.raises(CheckpointError, match=r"meta.pt holds more than .* \(posix.mkdir\)"):
        read_all(path)
    assert not (tmp_path / "trace").exists()
    read_all(path, trusts=True)
    assert (tmp_path / "trace").exists()


def replaced(path: Path, key: str, value: Any) -> None:
    """Put something in the place of a value."""
    contents = pickle.loads((path / CONTENTS_FILE).read_bytes())  # noqa: S301 - our own
    (index,) = [index for index in contents.storage_data if index.fqn == key]
    torch.save(value, content := io.BytesIO())
    info = contents.storage_data[index]
    info.offset, info.length = (path / SHARD).stat().st_size, len(content.getvalue())
    with (path / SHARD).open("ab") as file:
        file.write(content.getvalue())
    with_contents(path, contents)


@pytest.mark.parametrize("key", ["optimizer_0.param_groups.0.lr", "model.0.weight"])
def test_values_in_shards_run_nothing(key: str, path: Path, tmp_path: Path) -> None:
    """torch's own reader would run those that are not tensors."""
    replaced(path, key, Running(tmp_path / "trace"))
    with pytest.raises(CheckpointError, match=f"'{key}' in {SHARD} holds more than tensors"):
        read_all(path)
    assert not (tmp_path / "trace").exists()


def test_weights_run_nothing_even_if_trusted(path: Path, tmp_path: Path) -> None:
    replaced(path, "model.0.weight", Running(tmp_path / "trace"))
    with pytest.raises(CheckpointError, match=r"'model.0.weight' in .* holds more"):
        read_all(path, trusts=True)
    assert not (tmp_path / "trace").exists()


def _elsewhere(contents: Any) -> None:
    for info in contents.storage_data.values():
        info.relative_path = "../../secret.distcp"


def _in_the_rest(contents: Any) -> None:
    for info in contents.storage_data.values():
        info.relative_path = META_FILE


def _encoded(contents: Any) -> None:
    for info in contents.storage_data.values():
        info.transform_descriptors = ["zstd"]


def _unnamed(contents: Any) -> None:
    contents.planner_data = None


def _of_others(contents: Any) -> None:
    contents.planner_data = {key: ("net", key) for key in contents.state_dict_metadata}


def _negative(contents: Any) -> None:
    for info in contents.storage_data.values():
        info.offset = -5


def _in_part(contents: Any) -> None:
    for entry in contents.state_dict_metadata.values():
        vars(entry).get("chunks", []).clear()


def _too_large(contents: Any) -> None:
    contents.state_dict_metadata["model.0.weight"].size = torch.Size([2, 2])


def _lost(contents: Any) -> None:
    contents.storage_data.clear()


def _nothing(contents: Any) -> None:
    contents.state_dict_metadata = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_elsewhere, "would be read from '../../secret.distcp'"),
        (_in_the_rest, "would be read from 'meta.pt'"),
        (_encoded, "is encoded by"),
        (_unnamed, "without the names"),
        (_of_others, "it has no 'model', but net"),
        (_negative, "from before the beginning of"),
        (_in_part, "does not match its parts"),
        (_too_large, "does not match its parts"),
        (_lost, "it is inconsistent"),
        (_nothing, "it is inconsistent"),
    ],
)
def test_foreign_folders_are_refused(change: Any, message: str, path: Path) -> None:
    contents = pickle.loads((path / CONTENTS_FILE).read_bytes())  # noqa: S301 - our own
    change(contents)
    with_contents(path, contents)
    with pytest.raises(CheckpointError, match=r"a.ckpt' is not a sharded checkpoint in") as caught:
        read_all(path)
    assert message in str(caught.value)


@pytest.mark.parametrize("content", [[1, 2], {"a": Metadata({})}, "text", torch.Size([2])])
def test_other_contents_are_refused(content: Any, path: Path) -> None:
    with_contents(path, content)
    with pytest.raises(CheckpointError, match=r"holds a \w+, not torch's Metadata"):
        read_all(path)


def test_the_rest_must_be_a_checkpoint(path: Path) -> None:
    (path / TABLE_FILE).unlink()
    torch.save([1, 2], path / META_FILE)
    with pytest.raises(CheckpointError, match=r"meta.pt: it holds a list"):
        read_all(path)


def test_a_later_table_is_not_taken_for_damage_of_files(path: Path) -> None:
    table = json.loads((path / TABLE_FILE).read_text())
    (path / TABLE_FILE).write_text(json.dumps({**table, "version": 2}))
    with pytest.raises(CheckpointError, match="it has version 2, not 1"):
        read_all(path)


def test_only_files_of_the_table_are_read(path: Path) -> None:
    """One that has no checksums would be read without being compared."""
    table = from_json((path / TABLE_FILE).read_bytes())
    del table[SHARD]
    (path / TABLE_FILE).write_text(to_json(table))
    with pytest.raises(CheckpointError, match=f"'{SHARD}' is not among those that were written"):
        read_all(path)


def test_a_rest_that_is_no_pickle_is_named(path: Path) -> None:
    """Where there are no checksums, torch's own error would be all."""
    (path / TABLE_FILE).unlink()
    (path / META_FILE).write_bytes(b"no pickle at all")
    with pytest.raises(CheckpointError, match=r"meta.pt can't be read"):
        read_all(path)
