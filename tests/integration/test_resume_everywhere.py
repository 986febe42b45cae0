"""Whatever is trained, and however: from every checkpoint, a run goes on as the whole one went."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.everywhere import everywhere
from tests.integration.jobs import run
from tests.integration.modes import MODES, Named

QUICK = {"2bw, validation within"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in MODES]
)
def test_from_every_checkpoint(name: str, tmp_path: Path) -> None:
    ranks = run(
        everywhere, Named(name), num_ranks=MODES[name].num_ranks, folder=tmp_path, seconds=300
    )
    for rank, (files, found) in enumerate(ranks):
        assert len(files) > 4
        assert found == [], f"rank {rank}:\n" + "\n".join(found)
