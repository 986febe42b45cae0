"""What is remembered of workers that failed, and what they leave."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_tspipe.strategy.launching import _launcher_class, _Workers


class Workers:
    """Stands for Lightning's launcher."""

    fails = True
    procs: tuple[Any, ...] = ()

    def launch(self, function: Any, *_args: Any, **_kwargs: Any) -> str:
        self.temporary = Path(tempfile.gettempdir())
        (self.temporary / "traceback").touch()
        if self.fails:
            raise RuntimeError("a worker failed")
        return "done"


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made: Any = _launcher_class("Launcher", _Workers, Workers)()
    made._start_method = "fork"
    made._strategy = SimpleNamespace(
        have_workers_failed=False, cluster_environment=SimpleNamespace(main_port=29500)
    )
    return made


def test_another_fit_starts_as_if_none_had_failed(launcher: Any) -> None:
    with pytest.raises(RuntimeError, match="a worker failed"):
        launcher.launch(print)
    assert launcher._strategy.have_workers_failed
    launcher.fails = False
    assert launcher.launch(print) == "done"
    assert not launcher._strategy.have_workers_failed


def test_temporary_files_of_a_launch_are_removed_with_it(launcher: Any, tmp_path: Path) -> None:
    """Of a worker that fails, torch leaves the traceback, and Lightning the weights."""
    with pytest.raises(RuntimeError, match="a worker failed"):
        launcher.launch(print)
    assert tmp_path in launcher.temporary.parents
    assert not launcher.temporary.exists()
    assert tempfile.gettempdir() == str(tmp_path)
    (ours,) = tmp_path.iterdir()
    assert [path.name for path in ours.iterdir()] == [".lock"]
