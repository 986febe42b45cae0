"""A folder of kept targets: written, read by id, and refused where it doesn't fit."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_tspipe import (
    CheckpointError,
    ConfigurationError,
    DistillationLoss,
    KeptTargets,
    Targets,
    WithTargets,
)
from lightning_tspipe.language.fingerprints import fingerprint_of_teacher, fingerprint_of_tokenizer
from lightning_tspipe.language.targets import TargetShards, begin, finish

WORDS, LENGTH, NUMBER, WIDTH = 11, 6, 9, 4
LOSS = DistillationLoss(2.0)
DATA = torch.arange(NUMBER * LENGTH).remainder(WORDS).view(NUMBER, LENGTH)


def teacher() -> tuple[Tensor, nn.Linear]:
    torch.manual_seed(0)
    return torch.randn(NUMBER, LENGTH, WIDTH), nn.Linear(WIDTH, WORDS)


def write(
    folder: Path,
    k: int | None = 3,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 500,
    **known: Any,
) -> Targets:
    """Keep the targets of all samples, by two processes; all of them, to compare with."""
    states, head = teacher()
    begin(folder)
    for rank in (0, 1):
        shards = TargetShards(folder, rank, dtype, shard_bytes)
        places = torch.arange(rank, NUMBER, 2)
        for some in places.flip(0).split(2):
            shards.add(some.tolist(), LOSS.targets(DATA[some], states[some], head, k))
        shards.close()
    finish(folder, 2, {"teacher": None, "tokenizer": None, **known})
    return LOSS.targets(DATA, states, head, k)


def pairs(dataset: Any, **options: Any) -> Iterator[Any]:
    yield from DataLoader(dataset, 4, **options)


@pytest.mark.parametrize("shard_bytes", [1, 500, 10**6])
def test_top_k_is_read_by_id(shard_bytes: int, tmp_path: Path) -> None:
    expected = write(tmp_path, shard_bytes=shard_bytes)
    kept = KeptTargets(tmp_path)
    assert (kept.kind, kept.k, kept.temperature) == ("top_k", 3, 2.0)
    assert (kept.vocabulary, kept.num_samples) == (WORDS, NUMBER)
    files = sorted(file.name for file in tmp_path.iterdir())
    assert len(files) == 1 + {1: 5, 500: 3, 10**6: 2}[shard_bytes]
    assert "index.json" in files
    hidden, labels = torch.randn(4, LENGTH, WIDTH), DATA[:4]
    for batch in pairs(Subset(WithTargets(TensorDataset(DATA), kept), [7, 0, 4, 3])):
        tokens, targets = batch
        assert torch.equal(targets["words"], expected.parts["words"][[7, 0, 4, 3]])
        found = LOSS.kept(hidden, nn.Linear(WIDTH, WORDS), targets, labels)
        assert found.loss.isfinite()
        assert torch.equal(tokens, DATA[[7, 0, 4, 3]])


def test_hidden_states_are_those_of_the_teacher(tmp_path: Path) -> None:
    write(tmp_path, k=None)
    states, head = teacher()
    kept = KeptTargets(tmp_path)
    student, own = nn.Linear(WIDTH, WORDS), torch.randn(NUMBER, LENGTH, WIDTH)
    (batch,) = DataLoader(WithTargets(TensorDataset(DATA, DATA), kept), NUMBER)
    tokens, labels, guide = batch
    assert torch.equal(guide, states)
    before = torch.random.get_rng_state()
    again = kept.head()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not any(parameter.requires_grad for parameter in again.parameters())
    found = LOSS(own, student, guide, again, labels)
    assert torch.equal(torch.stack(found), torch.stack(LOSS(own, student, states, head, labels)))
    assert torch.equal(tokens, DATA)


def test_a_smaller_type_is_read_in_that_of_the_teacher(tmp_path: Path) -> None:
    expected = write(tmp_path, k=None, dtype=torch.float16)
    (file, *_) = sorted(tmp_path.glob("targets-*"))
    assert load_file(file)["hidden"].dtype == torch.float16
    found = KeptTargets(tmp_path).read(1, DATA[1])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected.parts["hidden"][1], rtol=1e-3, atol=1e-3)


def test_a_dictionary_gets_a_key(tmp_path: Path) -> None:
    write(tmp_path)
    samples = [{"ids": row.tolist(), "labels": row} for row in DATA]
    dataset = WithTargets(samples, KeptTargets(tmp_path), tokens="ids")
    assert len(dataset) == NUMBER
    assert dataset[2].keys() == {"ids", "labels", "targets"}
    with pytest.raises(ConfigurationError, match="a tuple, list or dictionary"):
        _ = WithTargets(DATA, KeptTargets(tmp_path))[0]


@pytest.mark.parametrize("method", [None, "fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_read(method: str | None, tmp_path: Path) -> None:
    write(tmp_path)
    dataset = WithTargets(TensorDataset(DATA), KeptTargets(tmp_path))
    expected = dataset[5][1]  # files are open before the workers start
    options = {} if method is None else {"num_workers": 1, "multiprocessing_context": method}
    *_, (_, found) = pairs(Subset(dataset, [3, 5]), **options)
    for name, value in expected.items():
        assert torch.equal(found[name][1], value)
    assert pickle.loads(pickle.dumps(dataset))[5][1].keys() == expected.keys()  # noqa: S301


def test_few_files_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_tspipe.language.kept._OPEN_FILES", 2)
    expected = write(tmp_path, shard_bytes=1)
    kept = KeptTargets(tmp_path)
    for place in (0, 8, 4, 1, 0):
        assert torch.equal(kept.read(place, DATA[place])["words"], expected.parts["words"][place])
        assert len(kept._files) <= 2


def cut(folder: Path) -> None:
    file = min(folder.glob("targets-*"))
    file.write_bytes(file.read_bytes()[:-1])


def version(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**index, "version": 2}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(cut, "targets-00000-00000.safetensors is cut off: copy", id="cut off"),
        pytest.param(lambda f: min(f.glob("targets-*")).unlink(), "is missing: copy", id="file"),
        pytest.param(lambda f: (f / "index.json").unlink(), "Run trainer.predict", id="index"),
        pytest.param(lambda f: (f / "index.json").write_text("{"), "is damaged", id="damaged"),
        pytest.param(lambda f: (f / "index.json").write_text("[]"), "in format None", id="other"),
        pytest.param(version, "in format 2, and this version", id="version"),
    ],
)
def test_a_folder_that_is_not_whole(
    change: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path)
    change(tmp_path)
    with pytest.raises((ConfigurationError, CheckpointError), match=message):
        KeptTargets(tmp_path)


def test_no_folder_and_a_damaged_shard(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is no folder"):
        KeptTargets(tmp_path / "nowhere")
    write(tmp_path)
    kept = KeptTargets(tmp_path)
    for file in tmp_path.glob("targets-*"):
        file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(CheckpointError, match="can't be read"):
        kept.read(0, DATA[0])


def test_other_samples(tmp_path: Path) -> None:
    write(tmp_path)
    kept = KeptTargets(tmp_path)
    with pytest.raises(ConfigurationError, match="no targets of sample 9; it has 9 samples, from"):
        kept.read(NUMBER, DATA[0])
    with pytest.raises(ConfigurationError, match="sample 2 has other tokens"):
        kept.read(2, DATA[3])
    with pytest.raises(ConfigurationError, match=r"\(5,\) of them now, 6 then"):
        kept.read(2, DATA[2, 1:])
    with pytest.raises(ConfigurationError, match="need no teacher's head"):
        kept.head()


def folder_of_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    torch.manual_seed(0)
    save_file({"a": torch.randn(300, 70), "b": torch.randn(5), "c": torch.ones(())},
              folder / "model.safetensors")  # fmt: skip
    return folder


def changed(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, name: value(tensors[name])}, folder / "model.safetensors")

    return change


def last(weight: Tensor) -> Tensor:
    weight[-1, -1] += 1e-3
    return weight


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(changed("a", lambda x: x * 1.01), id="values"),
        pytest.param(changed("a", last), id="the last value"),
        pytest.param(changed("b", lambda x: x.half()), id="type"),
        pytest.param(changed("c", lambda x: x + 1), id="a scalar"),
        pytest.param(changed("a", lambda x: x.view(150, 140)), id="shape"),
        pytest.param(lambda f: (f / "config.json").write_text('{"a": 1}'), id="configuration"),
    ],
)
def test_another_teacher_is_refused(change: Callable[[Path], None], tmp_path: Path) -> None:
    model = folder_of_model(tmp_path / "model")
    known = {"name": "model", "fingerprint": fingerprint_of_teacher(model)}
    write(tmp_path / "kept", teacher=known)
    KeptTargets(tmp_path / "kept", teacher=model)
    change(model)
    with pytest.raises(ConfigurationError, match="of the teacher 'model', whose files are others"):
        KeptTargets(tmp_path / "kept", teacher=model)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    model = folder_of_model(tmp_path / "model")
    known = {"name": "model", "fingerprint": fingerprint_of_tokenizer(model)}
    write(tmp_path / "kept", tokenizer=known)
    (model / "vocab.json").write_text("of no account beside a tokenizer.json")
    KeptTargets(tmp_path / "kept", tokenizer=model)
    (model / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(ConfigurationError, match="of the tokenizer 'model', whose files"):
        KeptTargets(tmp_path / "kept", tokenizer=model)
    with pytest.raises(ConfigurationError, match="does not say of which teacher"):
        KeptTargets(tmp_path / "kept", teacher=model)
    with pytest.raises(ConfigurationError, match="is not on this machine"):
        KeptTargets(tmp_path / "kept", teacher=tmp_path / "gone")
    (model / "vocab.json").unlink()
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigurationError, match="has no tokenizer"):
        KeptTargets(tmp_path / "kept", tokenizer=model)


def test_a_pass_begins_anew_and_leaves_what_is_whole(tmp_path: Path) -> None:
    begin(tmp_path)
    shards = TargetShards(tmp_path, 5, None, 1)
    states, head = teacher()
    shards.add(range(NUMBER), LOSS.targets(DATA, states, head, None))
    (tmp_path / ".targets-0.safetensors.0.part").touch()
    (tmp_path / "mine.txt").touch()
    write(tmp_path)
    names = {file.name for file in tmp_path.iterdir()}
    assert "mine.txt" in names
    assert not any(name.endswith(".part") or "00005" in name or "head" in name for name in names)
    with pytest.raises(ConfigurationError, match="has targets already"):
        begin(tmp_path)


def test_what_can_not_be_kept(tmp_path: Path) -> None:
    states, head = teacher()
    shards = TargetShards(tmp_path, 0, torch.float16, 10**6)
    with pytest.raises(ConfigurationError, match="9 samples have 0 ids"):
        shards.add((), LOSS.targets(DATA, states, head, 3))
    with pytest.raises(ConfigurationError, match=r"not finite in torch.float16: keep them with"):
        shards.add(range(NUMBER), LOSS.targets(DATA, states * 1e6, head))
    shards.add(range(NUMBER), LOSS.targets(DATA, states, head, 3))
    with pytest.raises(ConfigurationError, match="keep those of one kind"):
        shards.add(range(NUMBER), LOSS.targets(DATA, states, head, 4))
    with pytest.raises(ConfigurationError, match=r"lacks .*part-00000.json, part-00001.json"):
        finish(tmp_path, 2, {})
    TargetShards(tmp_path, 0, None, 1).close()
    with pytest.raises(ConfigurationError, match="predict_step has returned none"):
        finish(tmp_path, 1, {})
