"""What is trained, and what one process of each method does."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile
from torchvision.models import resnet18
from typing_extensions import override

from benchmarks.crews.gate import Gate, GatedLoader
from benchmarks.crews.job import Job
from benchmarks.crews.messages import Bytes
from benchmarks.emulated.sleeping import SleepingStage
from lightning_tspipe import FanoutTraining, StudentFanout, TSPipeStrategy
from lightning_tspipe.simulation.cost import StageCost

IMAGE_SIZE = 32
NUM_CLASSES = (10, 2, 4)
NUM_BATCHES = 4
COUNTED_STEP = 2
"""The step in which memory is counted: untimed, and by then all of it is allocated."""
UNIT = 0.2
"""Seconds of the paper's unit; emulated."""

Networks = tuple[nn.Module, list[nn.Module]]
Batch = tuple[Tensor, ...]


def linear(num_heads: int) -> Networks:
    """A ResNet-18 and linear classifiers: the trunk is nearly everything."""
    trunk = resnet18()
    trunk.fc = nn.Identity()
    return trunk, [nn.Linear(512, NUM_CLASSES[index]) for index in range(num_heads)]


def stage(num_heads: int) -> Networks:
    """A ResNet-18 up to its third stage, and the fourth in each head."""
    heads: list[nn.Module] = []
    for index in range(num_heads):
        whole = resnet18(num_classes=NUM_CLASSES[index])
        heads.append(nn.Sequential(whole.layer4, whole.avgpool, nn.Flatten(), whole.fc))
    whole = resnet18()
    first = [whole.conv1, whole.bn1, whole.relu, whole.maxpool]
    return nn.Sequential(*first, whole.layer1, whole.layer2, whole.layer3), heads


def units(num_heads: int) -> Networks:
    """The paper's: a trunk of three units, heads of two; they sleep."""
    part = StageCost(UNIT, output_bytes=4096)
    head = StageCost(0.7 * UNIT, 1.3 * UNIT, 0.0, 1.3 * UNIT, output_bytes=4096)
    trunk = nn.Sequential(*(SleepingStage(part, 1) for _ in range(3)))
    return trunk, [SleepingStage(head, 1) for _ in range(num_heads)]


WORKLOADS: dict[str, Callable[[int], Networks]] = {
    "linear": linear, "stage": stage, "units": units,
}  # fmt: skip


class Tasks(FanoutTraining, LightningModule):
    """Heads on a trunk; a batch has images and one label for each task.

    Args:
        networks: Trunk and heads.
        first: The task of the first head.
        has_features: Whether batches have features already.
    """

    def __init__(self, networks: Networks, first: int = 0, *, has_features: bool = False) -> None:
        super().__init__()
        trunk, heads = networks
        self.teacher = nn.Identity() if has_features else trunk
        self.teacher.requires_grad_(requires_grad=False).eval()
        self.student = StudentFanout({f"task{first + i}": head for i, head in enumerate(heads)})

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, labels = batch
        output = self.student(self.teacher(inputs))
        if not labels.numel():
            return output.mean()  # type: ignore[no-any-return]
        return cross_entropy(output, labels[:, int(self.head.removeprefix("task"))])

    @override
    def head_optimizer(self, name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class Peak(Callback):
    """What tensors the process holds at the peak of one step, all allocations counted."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._profile: Any = None
        self._held = 0

    @override
    def on_train_batch_start(self, *arguments: Any) -> None:
        if arguments[-1] == COUNTED_STEP:
            self._held = _living_bytes()
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.__enter__()

    @override
    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        if self._profile is None:
            return
        self._profile.__exit__(None, None, None)
        events = self._profile.profiler.kineto_results.events()
        self._profile = None
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        peak = max(accumulate((size for _, size in changes), initial=0))
        self._gate.held = Bytes(self._held + peak, 0, 0, 0)


def _living_bytes() -> int:
    """Of all storages, each counted once."""
    gc.collect()
    # type() and not isinstance(): some objects pretend to be something else, at a price.
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    storages: dict[int, int] = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        # Messages are bytes in memory that ranks share: that is counted where it is used.
        if t.device.type == "cpu" and t.dtype != torch.uint8 and not isinstance(t, FakeTensor)
    }
    return sum(storages.values()) + _shared_bytes()


def _shared_bytes() -> int:
    """This process's share of what is used of memory that it shares."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if line[0].isdigit() or line[0] in "abcdef":  # a mapping begins
            counts = "memfd:lightning-tspipe" in line
        elif counts and line.startswith("Pss:"):
            total += 1024 * int(line.split()[1])
    return total


def train(job: Job, connection: Connection) -> None:
    """Run one process of ``job``, for as long as the coordinator hands out tokens."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gate = Gate(connection)
    gate.listen()
    peak = Peak(gate)
    options: dict[str, Any] = dict(job.options)
    make = WORKLOADS[job.workload]
    if job.method == "fanout":
        module = Tasks(make(job.num_ranks))
        strategy: Any = TSPipeStrategy(**options)
    else:
        trunk, heads = make(job.rank + 1)
        has_features = job.method == "heads"
        module = Tasks((trunk, heads[-1:]), job.rank, has_features=has_features)
        strategy = "auto"
        del trunk, heads  # what is not trained here would be counted
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=job.num_ranks if job.method == "fanout" else 1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[peak],
    )
    reads = job.method != "fanout" or job.rank == job.num_ranks - 1
    trainer.fit(module, GatedLoader(gate, _batches(job) if reads else []))


def _batches(job: Job) -> list[Batch]:
    """Random batches; for heads alone their features."""
    generator = torch.Generator().manual_seed(0)
    size = job.batch_size
    if job.workload == "units":
        return [(torch.zeros(size, 1), torch.empty(size, 0))] * NUM_BATCHES
    shape: tuple[int, ...] = (size, 3, IMAGE_SIZE, IMAGE_SIZE)
    if job.method == "heads":
        trunk, _ = WORKLOADS[job.workload](1)
        with torch.no_grad():
            shape = (size, *trunk.eval()(torch.zeros(1, 3, IMAGE_SIZE, IMAGE_SIZE)).shape[1:])
    return [
        (
            torch.randn(shape, generator=generator),
            torch.stack([torch.randint(n, (size,), generator=generator) for n in NUM_CLASSES], 1),
        )
        for _ in range(NUM_BATCHES)
    ]
