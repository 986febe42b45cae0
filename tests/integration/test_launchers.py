"""However the processes start: the same training, and nobody else is listened to."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.choosing import some_of
from tests.integration.jobs import run
from tests.integration.scripts import (
    SECONDS,
    Processes,
    output_of,
    processes_in,
    started,
    wait_for,
)
from tests.integration.trainings import CLOSE, Training, train

TRAINING = Training("Classifier-group", "instance", {"num_microbatches": 1})

SCRIPT = """
import sys
import torch
from dataclasses import replace
from pathlib import Path
from lightning.pytorch import Callback, LightningModule
from tests.exactness.modules import Classifier, make_epochs
from tests.exactness.setting import OPTIMIZERS
from tests.integration.test_launchers import TRAINING
from tests.integration.trainings import Epochs, trainer_of


class Module(Classifier, LightningModule):
    def configure_optimizers(self):
        return OPTIMIZERS["sgd"](self.parameters())


def coming():
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return str(torch.rand(3, generator=generator, dtype=torch.float64).tolist())


class Pause(Callback):
    def setup(self, trainer, *_, **__):
        Path(f"drawn-{trainer.global_rank}").write_text(coming())

    def on_train_batch_start(self, trainer, *_):
        Path(f"here-{trainer.global_rank}-{type(trainer.strategy.transport).__name__}").touch()
        if "pause" in sys.argv and trainer.global_step == 1:
            Path(f"paused-{trainer.global_rank}").touch()
            while not Path("go on").exists():
                pass


def main(start_method, num_nodes, num_devices):
    torch.set_default_dtype(torch.float64)
    options = {**TRAINING.options, "start_method": start_method}
    training = replace(TRAINING, options=options, num_ranks=num_devices)
    training = replace(training, trainer={"num_nodes": num_nodes})
    torch.manual_seed(0)
    module = Module("group")
    loader = Epochs(make_epochs(module, training.sizes))
    trainer = trainer_of(training, module, Pause())
    Path("drawn-before").write_text(coming())
    trainer.fit(module, loader)
    if trainer.global_rank == 0:
        torch.save(module.state_dict(), "weights.pt")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights after training on one device."""
    single = replace(TRAINING, strategy="auto", num_ranks=1, options={})
    folder = tmp_path_factory.mktemp("alone")
    weights: dict[str, torch.Tensor] = run(train, single, num_ranks=1, folder=folder)[0].weights
    return weights


def finish(folder: Path, processes: Processes, seconds: float = SECONDS) -> dict[str, torch.Tensor]:
    """Wait for the end, which must be a good one; the weights that rank 0 saved."""
    deadline = time.monotonic() + seconds
    try:
        codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        codes = [-1]
    assert set(codes) == {0}, output_of(folder)
    while processes_in(folder):
        assert time.monotonic() < deadline, f"left: {processes_in(folder)}"
        time.sleep(0.1)
    weights: dict[str, torch.Tensor] = torch.load(folder / "weights.pt")
    return weights


def assert_drawn_alike(folder: Path) -> None:
    """Wherever a rank starts, it draws what the process draws that has called fit."""
    assert len({path.read_text() for path in folder.glob("drawn-*")}) == 1


def transports(folder: Path) -> list[str]:
    return sorted(path.name.removeprefix("here-") for path in folder.glob("here-*"))


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SELDOM = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([sys.executable, "script.py", "popen"], id="script", marks=SELDOM),
        pytest.param([sys.executable, "script.py", "fork"], id="fork"),
        pytest.param(
            [sys.executable, "script.py", "spawn"], id="spawn", marks=pytest.mark.slow
        ),
        pytest.param(
            [sys.executable, "script.py", "forkserver"], id="forkserver", marks=SELDOM
        ),
        pytest.param(
            [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "script.py", "popen"],
            id="torchrun", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_all_launchers_train_the_same(
    command: list[str], expected: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Where workers are functions, the weights are those of the module in the parent, after fit."""
    with started(tmp_path, SCRIPT, [*command, "1", "2"]) as processes:
        weights = finish(tmp_path, processes)
        assert_drawn_alike(tmp_path)
    torch.testing.assert_close(weights, expected, **CLOSE)
    assert transports(tmp_path) == ["0-SharedMemoryTransport", "1-SharedMemoryTransport"]


def test_slurm(expected: dict[str, torch.Tensor], tmp_path: Path) -> None:
    results = run(train, TRAINING, folder=tmp_path, launcher="slurm")
    torch.testing.assert_close(results[0].weights, expected, **CLOSE)


LOOSE = """
import sys
import torch
from lightning.pytorch import LightningModule
from torch import nn
from tests.exactness.modules import Classifier, make_epochs
from tests.integration.trainings import Epochs, Training, trainer_of


class Module(Classifier, LightningModule):
    # Of the scale, which no stage has, each replica's loss rank has a copy.
    def __init__(self):
        super().__init__("group")
        self.scale = nn.Parameter(torch.tensor(0.5))

    def training_step(self, batch, batch_idx):
        return self.scale * super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    options = {"num_microbatches": 1, "num_stages": 2, "start_method": sys.argv[1]}
    module = Module()
    training = Training("Classifier-group", "instance", options, num_ranks=4)
    trainer = trainer_of(training, module)
    trainer.fit(module, Epochs(make_epochs(module, training.sizes)))
    if trainer.global_rank == 0:
        torch.save(module.state_dict(), "weights.pt")
"""


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_replicas_whose_launcher_shares_memory_train_the_same(tmp_path: Path) -> None:
    """Torch lets workers of a fork server, and spawned ones, share the parameters of their parent:
    two loss ranks would update the same scale."""
    found = {}
    for method in ("popen", "forkserver"):
        folder = tmp_path / method
        with started(folder, LOOSE, [sys.executable, "script.py", method]) as processes:
            found[method] = finish(folder, processes, 140.0)  # four ranks, each of which imports
    assert found["popen"]["scale"] != 0.5
    torch.testing.assert_close(found["forkserver"], found["popen"], **CLOSE)


# Addresses


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    some_of(["fork", "spawn", "popen", "forkserver"], slow=["popen"], always=["fork"]),
)
def test_one_machine_listens_on_the_loopback_interface_only(method: str, tmp_path: Path) -> None:
    command = [sys.executable, "script.py", method, "1", "2", "pause"]
    with started(tmp_path, SCRIPT, command) as processes:
        wait_for([tmp_path / f"paused-{rank}" for rank in range(2)], processes[0])
        found = [address for pid in processes_in(tmp_path) for address in listening(pid)]
        (tmp_path / "go on").touch()
        finish(tmp_path, processes)
        assert_drawn_alike(tmp_path)
    assert len(found) >= 2  # gloo on both ranks; the store is a file
    assert {address for address, _ in found} == {"127.0.0.1"}


def listening(pid: int) -> list[tuple[str, int]]:
    """Addresses and ports on which a process listens."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(str(link.readlink()))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                address, _, port = fields[1].partition(":")
                raw = bytes.fromhex(address)
                # Words of 32 bits, each in the byte order of the machine.
                words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
                family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
                found.append((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


@contextmanager
def two_machines() -> Iterator[list[tuple[list[str], str, str]]]:
    """Two network namespaces: for each a command prefix, its address and its interface."""
    ip = shutil.which("ip")
    if os.geteuid() != 0 or ip is None:
        pytest.skip("network namespaces need root and the command ip")
    token = secrets.token_hex(3)
    names = [f"tsp-{token}-{node}" for node in range(2)]
    links = [f"tsp{token}{node}" for node in range(2)]

    def call(*words: str) -> None:
        subprocess.run([ip, *words], check=True, capture_output=True)  # noqa: S603 - no user input

    try:
        try:
            for name in names:
                call("netns", "add", name)
            call("link", "add", links[0], "netns", names[0], "type", "veth",
                 "peer", "name", links[1], "netns", names[1])  # fmt: skip
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.decode()}")
        for node in range(2):
            call("-n", names[node], "address", "add", f"10.77.0.{node + 1}/24", "dev", links[node])
            for link in ("lo", links[node]):
                call("-n", names[node], "link", "set", link, "up")
        yield [
            ([ip, "netns", "exec", names[node]], f"10.77.0.{node + 1}", links[node])
            for node in range(2)
        ]
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                call("netns", "delete", name)


@pytest.mark.slow
def test_two_machines(expected: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """torchrun on each; the data rank and the loss rank have addresses of their own."""
    with two_machines() as machines:
        commands = [
            [*prefix, "env", f"GLOO_SOCKET_IFNAME={link}", *TORCHRUN, "--nnodes", "2",
             "--node-rank", str(node), "--nproc-per-node", "1", "--master-addr", machines[0][1],
             "--master-port", "29431", "script.py", "popen", "2", "1"]
            for node, (prefix, _, link) in enumerate(machines)
        ]  # fmt: skip
        with started(tmp_path, SCRIPT, *commands) as processes:
            weights = finish(tmp_path, processes)
            assert_drawn_alike(tmp_path)
    torch.testing.assert_close(weights, expected, **CLOSE)
    assert transports(tmp_path) == ["0-GlooTransport", "1-GlooTransport"]
