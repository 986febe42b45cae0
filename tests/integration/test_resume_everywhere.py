"""Whatever is trained, and however: from every checkpoint, a run goes on as the whole one went."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.everywhere import everywhere
from tests.integration.jobs import run
from tests.integration.modes import MODES, ODD, PLAIN, Named

ALWAYS = (
    "windows, teacher ahead", "to and fro, teacher late", "windows, at times thrice", "interleaved",
    "replicas, divided state", "tspipe, validation within", "fan-out, validation",
    "pipeoptim, validation within", "relay",
)  # fmt: skip
"""A part of each kind, in CI; all others take half an hour (`make resumes`)."""
PLAINLY = {"tspipe", "by hand", "replicas", "2bw", "fan-out", "freeze, mesh, cache"}
AT_ENDS = {"tspipe", "averaging", "fan-out, heads watched", "freeze, to a mesh", "probe"}
TESTED = [
    *ALWAYS,
    *sorted(PLAINLY),
    *(made for name in sorted(AT_ENDS) if (made := f"{name}, validation") not in ALWAYS),
    *(made for name in PLAIN if (made := f"{name}, validation within") not in ALWAYS),
    *(name for name in ODD if name not in ALWAYS),
]
TWICE = {
    "tspipe, validation within": "4-batch",
    "replicas, validation within": "2-batch",
    "no drain, three": "3-batch",
    "fan-out, validation within": "5-batch",
    "freeze, cache, validation within": "3-batch",
    "steps, freeze": "3-epoch",
}
"""Where a run is stopped that goes on, is stopped again everywhere, and goes on again."""


def mark(name: str) -> pytest.MarkDecorator:
    return pytest.mark.slow if name in ALWAYS else pytest.mark.exhaustive


@pytest.mark.each
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [pytest.param(name, marks=mark(name)) for name in TESTED])
def test_from_every_checkpoint(name: str, tmp_path: Path) -> None:
    mode = MODES[name]
    twice = TWICE.get(name, "")
    ranks = run(
        everywhere, Named(name), twice, num_ranks=mode.num_ranks, folder=tmp_path, seconds=600
    )
    for rank, (files, found) in enumerate(ranks):
        assert len(files) > 4
        assert found == [], f"rank {rank}:\n" + "\n".join(found)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "stops"),
    [
        ("freeze, to a mesh, validation within", ["5-batch"]),
        ("freeze, to a mesh, cache, validation within", ["5-batch"]),
        ("freeze, to a mesh, validation", ["3-batch", "6-batch"]),
    ],
)
def test_from_before_a_validation_on_another_mesh(
    name: str, stops: list[str], tmp_path: Path
) -> None:
    """The loaders of a validation are made anew with the mesh, and not as training loaders.

    Ranks with losses waited for its batches for ever, and a cache saw several training loaders.
    """
    mode, only = Named(name), [f"first/{stop}.ckpt" for stop in stops]
    ranks = run(everywhere, mode, "", only, num_ranks=mode().num_ranks, folder=tmp_path, seconds=99)
    for rank, (files, found) in enumerate(ranks):
        assert set(only) <= set(files)
        assert found == [], f"rank {rank}:\n" + "\n".join(found)
