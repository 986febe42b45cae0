"""What is measured once is known: to equal atoms, and to later runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_tspipe.planning.profile import AtomProfile
from lightning_tspipe.profiling import weighing
from lightning_tspipe.profiling.atoms import profile_atoms
from lightning_tspipe.profiling.costs import CACHE, Costs, cache_folder
from tests.unit.networks.cutting import cut

CPU = torch.device("cpu")


def network(num_layers: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), *(nn.Linear(8, 8) for _ in range(num_layers)))


def profiles(
    costs: Costs, sizes: Sequence[int] = (2, 8), module: nn.Module | None = None
) -> list[AtomProfile]:
    inputs = torch.randn(8, 4)
    program = cut(module or network(), inputs)
    return profile_atoms(program, (inputs,), sizes, trainable=True, costs=costs)


def test_equal_atoms_are_measured_once() -> None:
    first, *others = profiles(Costs())
    # No two measurements give the same.
    assert len({str(other.forward) + str(other.backward) for other in others}) == 1
    assert first.forward != others[0].forward
    assert all(set(profile.weight_backward) == {2, 8} for profile in (first, *others))


def test_another_size_is_measured_beside_what_is_known() -> None:
    costs = Costs()
    before, after = profiles(costs, [2]), profiles(costs, [2, 4])
    for was, now in zip(before, after, strict=True):
        assert now.forward == {**was.forward, 4: now.forward[4]}
    assert profiles(costs, [4])[0].forward == {4: after[0].forward[4]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "costs"))
    return tmp_path / "costs"


def of(module: nn.Module) -> Costs:
    return Costs.of(module.parameters(), CPU)


def test_a_later_run_knows_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = of(network())
    found = profiles(costs)
    costs.keep()
    (file,) = folder.iterdir()
    assert profiles(of(network())) == found
    other = of(network(4))
    profiles(other, module=network(4))
    other.keep()
    assert len(list(folder.iterdir())) == 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert profiles(of(network())) != found
    assert file.is_file()


def test_what_two_processes_measure_is_kept(folder: Path) -> None:
    one, other = of(network()), of(network())
    small, large = profiles(one, [2]), profiles(other, [8])
    other.keep()
    one.keep()
    for found, was, then in zip(profiles(of(network())), small, large, strict=True):
        assert found.backward == was.backward | then.backward
    assert [path.suffix for path in folder.iterdir()] == [".json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"a": 1}', '{"a": {"forward": {"2": -1}}}', "\xff"]
)
def test_a_damaged_file_is_made_again(
    folder: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    costs = of(network())
    profiles(costs)
    costs.keep()
    (file,) = folder.iterdir()
    file.write_bytes(text.encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        costs = of(network())
    assert f"{file} is damaged" in caplog.text
    found = profiles(costs)
    costs.keep()
    assert json.loads(file.read_text())
    assert profiles(of(network())) == found


def test_a_folder_that_cannot_be_written_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE, str(tmp_path / "file"))
    costs = of(network())
    profiles(costs)
    with caplog.at_level(logging.INFO):
        costs.keep()
    assert "the measured costs were not saved" in caplog.text


def test_where_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() is None  # as tests are run
    monkeypatch.delenv(CACHE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lightning_tspipe"
    monkeypatch.setenv(CACHE, "OFF")
    assert cache_folder() is None
    monkeypatch.setenv(CACHE, "~/here")
    assert cache_folder() == Path.home() / "here"


class Residual(nn.Module):
    """Whether an atom keeps what it is given depends on what the one before has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.second(torch.relu(self.first(x))))  # type: ignore[no-any-return]


def test_equal_atoms_are_weighed_as_each_of_them_is(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [Residual(), Residual(), nn.ReLU(), Residual(), Residual(), nn.ReLU(), nn.ReLU()]
    module = nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 8))

    def weighed() -> list[AtomProfile]:
        nothing: dict[int, float] = {}
        times = dict.fromkeys(("forward", "backward", "input_backward", "weight_backward"), nothing)
        return [replace(each, **times) for each in profiles(Costs(), [4], module)]

    found = weighed()
    monkeypatch.setattr(weighing, "kind_of", lambda *_: None)
    assert found == weighed()
