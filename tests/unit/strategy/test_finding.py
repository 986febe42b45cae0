"""The newest whole checkpoint among files and folders of shards."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_tspipe.errors import CheckpointError
from lightning_tspipe.strategy.checkpoints import folders
from lightning_tspipe.strategy.checkpoints.finding import checkpoints_in, newest_whole


def content(step: int, batches: int = 0, **more: Any) -> dict[str, Any]:
    progress = {"total": {"completed": batches or step}}
    return {
        "global_step": step,
        "loops": {"fit_loop": {"epoch_loop.batch_progress": progress}},
        "optimizer_states": [],
        "state_dict": {"weight": torch.full((1000,), float(step))},
        **more,
    }


def write(path: Path, step: int, batches: int = 0, **more: Any) -> Path:
    torch.save(content(step, batches, **more), path)
    return path


def write_shards(path: Path, step: int) -> Path:
    """A folder as the strategy writes it, of one rank."""
    whole = content(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is one process
        save({"model": whole.pop("state_dict")}, checkpoint_id=path)
    torch.save({**whole, folders.IS_SUMMED: True}, path / folders.META_FILE)
    names = [each.name for each in path.iterdir()]
    table = {name: folders.sums_of(path / name) for name in names}
    (path / folders.TABLE_FILE).write_text(folders.to_json(table))
    return path


def chosen(folder: Path, **options: Any) -> tuple[str, dict[str, str]]:
    """The name of what is chosen, and what is skipped, by name."""
    options = {"weights_only": None, "verify": True, **options}
    choice = newest_whole(checkpoints_in(folder, ".ckpt"), **options)
    name = "" if choice.found is None else choice.found.path.name
    return name, {path.name: why for path, why in choice.skipped.items()}


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    place = data.index(torch.full((100,), 3.0).numpy().tobytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_newer_is_what_has_more_steps_then_more_batches_then_what_was_written_later(
    tmp_path: Path,
) -> None:
    write(tmp_path / "a.ckpt", 20, 40)
    write(tmp_path / "b.ckpt", 20, 41)
    later = write(tmp_path / "behind-validation.ckpt", 20, 41)
    os.utime(later, ns=(10**19, 10**18 * 9))
    write(tmp_path / "z.ckpt", 3)
    assert chosen(tmp_path) == ("behind-validation.ckpt", {})


def test_what_no_training_can_go_on_from_is_skipped(tmp_path: Path) -> None:
    write(tmp_path / "whole.ckpt", 1)
    cut_off(write(tmp_path / "cut.ckpt", 2))
    flip(write(tmp_path / "flipped.ckpt", 3))
    light = content(4)
    del light["optimizer_states"]
    torch.save(light, tmp_path / "light.ckpt")
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.ckpt")
    (tmp_path / "empty.ckpt").touch()
    (tmp_path / "gone.ckpt").symlink_to("nowhere")
    (tmp_path / "half.ckpt.part").write_bytes(b"half a file")
    (tmp_path / "other.txt").touch()
    name, skipped = chosen(tmp_path)
    assert name == "whole.ckpt"
    reasons = {
        "cut.ckpt": "is not a complete checkpoint",
        "flipped.ckpt": "is damaged: the record",
        "light.ckpt": "it holds weights only",
        "weights.ckpt": "it is no checkpoint of a Trainer",
        "empty.ckpt": "is not a complete checkpoint",
        "gone.ckpt": "it is a link to something that is gone",
    }
    assert skipped.keys() == reasons.keys()
    for path, why in reasons.items():
        assert why in skipped[path]
        assert "ckpt_path" not in skipped[path]


def test_damage_that_only_reading_all_of_it_shows(tmp_path: Path) -> None:
    write(tmp_path / "whole.ckpt", 1)
    flip(write(tmp_path / "flipped.ckpt", 3))
    assert chosen(tmp_path, verify=False)[0] == "flipped.ckpt"
    assert chosen(tmp_path)[0] == "whole.ckpt"


@pytest.mark.parametrize("damage", ["", "file", "cut", "contents", "meta", "flipped"])
def test_folders_of_shards(damage: str, tmp_path: Path) -> None:
    write(tmp_path / "older.ckpt", 2)
    path = write_shards(tmp_path / "newer.ckpt", 3)
    (tmp_path / ".next.ckpt.part").mkdir()
    shard = next(path.glob("*.distcp"))
    if damage == "file":
        shard.unlink()
    elif damage == "cut":
        cut_off(shard)
    elif damage == "flipped":
        flip(shard)
    elif damage:
        (path / {"contents": folders.CONTENTS_FILE, "meta": folders.META_FILE}[damage]).unlink()
    name, skipped = chosen(tmp_path)
    assert name == ("older.ckpt" if damage else "newer.ckpt")
    assert list(skipped) == (["newer.ckpt"] if damage else [])


def test_a_folder_without_checksums_whose_shards_are_cut_off(tmp_path: Path) -> None:
    """As other strategies write it."""
    write(tmp_path / "older.ckpt", 2)
    path = write_shards(tmp_path / "newer.ckpt", 3)
    (path / folders.TABLE_FILE).unlink()
    torch.save(content(3), path / folders.META_FILE)
    assert chosen(tmp_path) == ("newer.ckpt", {})
    cut_off(next(path.glob("*.distcp")))
    name, skipped = chosen(tmp_path)
    assert name == "older.ckpt"
    assert "was cut off" in skipped["newer.ckpt"]


def test_a_replacement_that_was_cut_short(tmp_path: Path) -> None:
    """Between the two renames, the older folder lies aside."""
    write(tmp_path / "older.ckpt", 2)
    write_shards(tmp_path / "newer.ckpt", 3).rename(folders.aside(tmp_path / "newer.ckpt"))
    assert chosen(tmp_path) == ("newer.ckpt", {})


def test_a_link_is_what_it_links_to(tmp_path: Path) -> None:
    write(tmp_path / "step=3.ckpt", 3)
    (tmp_path / "last.ckpt").symlink_to("step=3.ckpt")
    assert chosen(tmp_path) == ("step=3.ckpt", {})


class Own:
    """An object of the user's."""


def test_objects_of_the_users_are_not_passed_over(tmp_path: Path) -> None:
    """Else a run would begin anew each time, and never say why."""
    write(tmp_path / "older.ckpt", 2)
    write(tmp_path / "newer.ckpt", 3, hyper_parameters={"own": Own()})
    with pytest.raises(CheckpointError, match=r"pass weights_only=False along with ckpt_path"):
        chosen(tmp_path)
    assert chosen(tmp_path, weights_only=False) == ("newer.ckpt", {})


def test_folders_further_down(tmp_path: Path) -> None:
    (tmp_path / "epoch=1").mkdir()
    path = write(tmp_path / "epoch=1" / "step=3.ckpt", 3)
    assert checkpoints_in(tmp_path, ".ckpt") == []
    assert checkpoints_in(tmp_path, ".ckpt", depth=1) == [path]
    assert checkpoints_in(tmp_path / "nowhere", ".ckpt") == []
