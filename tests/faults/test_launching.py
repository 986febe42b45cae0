"""What is remembered of workers that failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_tspipe.strategy.launching import _launcher_class, _Workers


class Workers:
    """Stands for Lightning's launcher."""

    fails = True
    procs: tuple[Any, ...] = ()

    def launch(self, function: Any, *_args: Any, **_kwargs: Any) -> str:
        if self.fails:
            raise RuntimeError("a worker failed")
        return "done"


def test_another_fit_starts_as_if_none_had_failed() -> None:
    launcher: Any = _launcher_class("Launcher", _Workers, Workers)()
    launcher._start_method = "fork"
    launcher._strategy = SimpleNamespace(
        have_workers_failed=False, cluster_environment=SimpleNamespace(main_port=29500)
    )
    with pytest.raises(RuntimeError, match="a worker failed"):
        launcher.launch(print)
    assert launcher._strategy.have_workers_failed
    launcher.fails = False
    assert launcher.launch(print) == "done"
    assert not launcher._strategy.have_workers_failed
