"""In a steady step, no host asks its device for a number and waits for it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.choosing import some_of
from tests.integration.everywhere import Mode
from tests.integration.host_reads import reads_of
from tests.integration.jobs import run
from tests.integration.modes import MODES, PLAIN, asynchronous, paired, predicting

pytestmark = pytest.mark.distributed

QUICK = {"tspipe", "by hand", "pipeoptim", "spectrain", "fan-out", "freeze", "relay"}
# Of tensors that are on the host whatever the device is: two replicas agree on whether gradients
# came; what CPU ranks send each other as objects; ids, places and bytes of a cache, see
# tests/unit/caching/test_no_waiting.py.
OF_HOSTS = {
    "runtime/transport/replicas.py", "runtime/transport/shared_memory.py", "caching/keys.py",
    "caching/store.py",
}  # fmt: skip

# Of one step in 128, what the networks get is compared, and gradients are watched.
OF_COMPARED_STEPS = {"replay/purity.py", "strategy/training/gradient_watch.py"}

MORE: dict[str, Mode] = {
    "clipping": paired(trainer={"gradient_clip_val": 0.1}, num_ranks=3),
    "clipping, replicas": paired(
        trainer={"gradient_clip_val": 0.1}, num_ranks=4, num_stages=2, case="Byol-group-2-by hand"
    ),
    "clipping, 1f1b": asynchronous("pipedream", (3, 4), trainer={"gradient_clip_val": 0.1}),
    "predicting": paired(callbacks=predicting),
}  # fmt: skip


def _file(place: str) -> str:
    return place.partition(":")[0]


def mode_of(name: str) -> Mode:
    return MORE[name] if name in MORE else MODES[name]


# A step that becomes another one in each window is not steady: it is watched anew, by a mode of
# torch's functions that has to end before the one that counts.
STEADY = [name for name in [*PLAIN, *MORE] if "at times" not in name]
ALWAYS = [name for name in STEADY if name in QUICK or name in MORE or "teacher ahead" in name]
REST = [name for name in PLAIN if name in STEADY and name not in ALWAYS]


@pytest.mark.parametrize("name", some_of(STEADY, slow=REST[::5], always=ALWAYS))
def test_nothing_is_read(name: str, tmp_path: Path) -> None:
    ranks = run(
        reads_of, partial(mode_of, name), num_ranks=mode_of(name).num_ranks, folder=tmp_path
    )
    for rank, (found, num_batches) in enumerate(ranks):
        assert num_batches >= 3
        rare = {
            p for p, n in found.items() if _file(p) in OF_COMPARED_STEPS and 3 * n < num_batches
        }
        read = {p for p in found if _file(p) not in OF_HOSTS and p not in rare}
        assert not read, f"rank {rank}, in {num_batches} steps: {found}"
