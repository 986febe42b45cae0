"""torchrun starts a training again after each kill, and it goes on exactly where it was saved."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.restarting import (
    ALONE,
    BATCHES,
    EPOCHS,
    Kill,
    drawn_kills,
    lines,
    train_at_once,
    write_kills,
)
from tests.integration.jobs import run
from tests.integration.scripts import Processes, output_of, processes_in, started
from tests.integration.test_launchers import two_machines

SCRIPT = """
import sys
from tests.faults.restarting import main

main(*map(int, sys.argv[1:]))
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
CLOSE = 1e-9


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], float]:
    """The losses of a run that was never killed, by epoch and batch."""
    folder = tmp_path_factory.mktemp("whole")
    run(train_at_once, folder=folder)
    return {(epoch, batch): loss for _, epoch, batch, loss in lines(folder)}


def finish(folder: Path, processes: Processes, seconds: float) -> str:
    """Wait until all have ended well; what they have printed."""
    deadline = time.monotonic() + seconds
    try:
        codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        codes = [-1]
    assert set(codes) == {0}, output_of(folder)
    while processes_in(folder):
        assert time.monotonic() < deadline, f"left: {processes_in(folder)}"
        time.sleep(0.1)
    return output_of(folder)


def assert_as_if_never_killed(folder: Path, expected: dict[tuple[int, int], float]) -> None:
    """Each batch was trained, and whenever it was, its loss is that of the whole run."""
    assert len(expected) == EPOCHS * BATCHES
    found = lines(folder)
    assert {(epoch, batch) for _, epoch, batch, _ in found} == expected.keys()
    for _, epoch, batch, loss in found:
        assert loss == pytest.approx(expected[epoch, batch], rel=CLOSE, abs=CLOSE)


def steps_gone_on_from(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"goes on from .*, step (\d+)", text)]


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "number",
    [pytest.param(3, marks=pytest.mark.slow), pytest.param(10, marks=pytest.mark.exhaustive)],
)
def test_kills_at_random(
    number: int, expected: dict[tuple[int, int], float], tmp_path: Path
) -> None:
    """In one job: in batches, between them, while checkpoints are made and written."""
    kills = drawn_kills(0, number)
    write_kills(tmp_path, kills)
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "10"]
    with started(tmp_path, SCRIPT, [*command, "script.py"]) as processes:
        text = finish(tmp_path, processes, 270)
    assert len(list(tmp_path.glob("killed-*"))) == len(kills), text
    assert_as_if_never_killed(tmp_path, expected)
    steps = steps_gone_on_from(text)
    assert steps == sorted(steps)
    # At most the two steps between two saves are lost, and one save that a kill came into.
    lost = [kill.batch - step for kill, step in zip(kills[-len(steps) :], steps, strict=True)]
    assert max(lost) <= 4, (kills, steps)


def torchrun_on(
    machine: tuple[list[str], str, str], *options: str, variables: tuple[str, ...] = ()
) -> list[str]:
    prefix, _, link = machine
    own = ["env", f"GLOO_SOCKET_IFNAME={link}", *variables, *TORCHRUN, "--nproc-per-node", "1"]
    return [*prefix, *own, "--max-restarts", "3", *options, "script.py"]


def elastic(machines: list[Any], num_nodes: str, *arguments: str) -> list[list[str]]:
    """The commands of two machines that meet at the first one, whose name is that of both."""
    endpoint = f"{machines[0][1]}:29433"
    # Without it torch tells a node that comes later nothing of where rank 0 is.
    variables = ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",) if ":" in num_nodes else ()
    return [
        [
            *torchrun_on(
                machine, "--nnodes", num_nodes, "--local-addr", machine[1], "--rdzv-id", "job",
                "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint,
                "--rdzv-conf", f"is_host={int(node == 0)},last_call_timeout=4,join_timeout=60",
                variables=variables,
            ),
            *arguments,
        ]
        for node, machine in enumerate(machines)
    ]  # fmt: skip


def static(machines: list[Any]) -> list[list[str]]:
    """The same with ranks that are given."""
    return [
        torchrun_on(
            machine, "--nnodes", "2", "--node-rank", str(node),
            "--master-addr", machines[0][1], "--master-port", "29434",
        )
        for node, machine in enumerate(machines)
    ]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "rendezvous", ["c10d", pytest.param("static", marks=pytest.mark.exhaustive)]
)
def test_two_nodes(rendezvous: str, expected: dict[tuple[int, int], float], tmp_path: Path) -> None:
    """Rank 1, which is all of the second node, is killed, then rank 0."""
    write_kills(tmp_path, [Kill(5, 1, "before"), Kill(12, 0, "after")])
    with two_machines() as machines:
        commands = elastic(machines, "2") if rendezvous == "c10d" else static(machines)
        with started(tmp_path, SCRIPT, *commands) as processes:
            text = finish(tmp_path, processes, 250)
    assert_as_if_never_killed(tmp_path, expected)
    assert steps_gone_on_from(text) == [4, 10], text  # it saves behind the kill
    assert {ranks for ranks, *_ in lines(tmp_path)} == {2}


@pytest.mark.exhaustive
@pytest.mark.timeout(280)
def test_a_node_is_lost_and_another_one_comes(
    expected: dict[tuple[int, int], float], tmp_path: Path
) -> None:
    """``--nnodes 1:2``: two ranks, then one, then two; the plan is made anew each time."""
    write_kills(tmp_path, [Kill(5, 1, "node")])
    with two_machines() as machines:
        first, second = elastic(machines, "1:2", "10")
        third = ["sh", "-c", f'until [ -e {ALONE} ]; do sleep 0.1; done; exec "$@"', "sh", *second]
        with started(tmp_path, SCRIPT, first, second, third) as processes:
            text = finish(tmp_path, [processes[0], processes[2]], 250)
    assert_as_if_never_killed(tmp_path, expected)
    worlds = [ranks for ranks, *_ in lines(tmp_path)]
    assert [ranks for ranks, _ in itertools.groupby(worlds)] == [2, 1, 2], text
