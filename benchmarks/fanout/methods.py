"""What is trained, and what one process of each method does."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
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
from benchmarks.emulated.sleeping import SleepingStage
from lightning_tspipe import FanoutTraining, StudentFanout, TSPipeStrategy
from lightning_tspipe.runtime.batches.host_memory import keep_freed_memory
from lightning_tspipe.runtime.transport.base import Specs
from lightning_tspipe.runtime.transport.channels import Channel
from lightning_tspipe.simulation.cost import StageCost

IMAGE_SIZE = 32
NUM_CLASSES = (10, 2, 4)
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


class Fresh(GatedLoader):
    """A loader whose batches are made anew, as those of a dataset are."""

    @override
    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            yield tuple(tensor.clone() for tensor in batch)


class Peak(Callback):
    """What the process holds at the peak of one step, and the labels that it sends in it.

    Args:
        gate: Gets to know it.
        source: What batches are copied from, which is not counted.
    """

    def __init__(self, gate: Gate, source: Sequence[Batch]) -> None:
        self._gate = gate
        self._source = {_place(tensor) for batch in source for tensor in batch}
        self._profile: Any = None
        self._held = 0
        self._before = _resident("VmRSS")

    @override
    def on_train_batch_start(self, *arguments: Any) -> None:
        if arguments[-1] == COUNTED_STEP:
            self._held = _living_bytes(self._source)
            self._count_labels(arguments[0])
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # a new high-water mark
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.__enter__()

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if self._profile is None:
            return
        resident = _resident("VmHWM") - self._before
        self._profile.__exit__(None, None, None)
        vars(getattr(trainer.strategy, "transport", self)).pop("send", None)
        events = self._profile.profiler.kineto_results.events()
        self._profile = None
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        peak = max(accumulate((size for _, size in changes), initial=0))
        self._gate.notes |= {"peak": self._held + peak, "resident": resident}
        self._gate.notes |= _placed(trainer)

    def _count_labels(self, trainer: Trainer) -> None:
        """Add up what leaves this process as labels."""
        notes = self._gate.notes
        notes["labels"] = 0
        transport: Any = getattr(trainer.strategy, "transport", None)
        if transport is None:
            return
        send = transport.send

        def counted(
            tensors: Sequence[Tensor], target: int, channel: Channel, *specs: Specs
        ) -> None:
            if channel == Channel.EARLY_FIELDS:
                notes["labels"] += sum(tensor.nbytes for tensor in tensors)
            send(tensors, target, channel, *specs)

        vars(transport)["send"] = counted


def _placed(trainer: Trainer) -> dict[str, int]:
    """Where a pipeline cuts the trunk in two, and what of it goes through in pieces."""
    engine: Any = getattr(trainer.strategy, "engine", None)
    if engine is None:
        return {}
    cuts, pieces = engine.placement.teacher_cuts, engine.placement.pieces
    return {"cut": cuts[1], "atoms_in_pieces": pieces.num_atoms, "pieces": pieces.number}


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _living_bytes(without: Collection[int]) -> int:
    """Of all storages, each counted once, and this process's part of what is shared."""
    gc.collect()
    shared, ranges = _shared()
    # type() and not isinstance(): some objects pretend to be something else, at a price.
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    storages: dict[int, int] = {
        _place(t): t.untyped_storage().nbytes()
        for t in tensors
        if t.device.type == "cpu" and not isinstance(t, FakeTensor)
    }
    return shared + sum(
        size
        for place, size in storages.items()
        if place not in without and not any(start <= place < stop for start, stop in ranges)
    )


def _shared() -> tuple[int, list[tuple[int, int]]]:
    """This process's share of what is used of memory that ranks share, and where it lies."""
    total, counts = 0, False
    ranges: list[tuple[int, int]] = []
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first, *_ = line.split(maxsplit=1)
        if not first.endswith(":"):  # a mapping begins
            counts = "memfd:lightning-tspipe" in line
            start, stop = (int(end, 16) for end in first.split("-"))
            ranges += [(start, stop)] if counts else []
        elif counts and first == "Pss:":
            total += 1024 * int(line.split()[1])
    return total, ranges


def _resident(name: str) -> int:
    """Bytes of memory that the system says the process has."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def train(job: Job, connection: Connection) -> None:
    """Run one process of ``job``, for as long as the coordinator hands out tokens."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_memory()  # as the pipeline does, so that no method is slowed down by page faults
    gate = Gate(connection)
    gate.listen()
    reads = job.method != "fanout" or job.rank == job.num_ranks - 1
    batches = _batches(job) if reads else []
    peak = Peak(gate, batches)
    loader = Fresh(gate, batches)
    if job.method == "trunk":
        _run_trunk(WORKLOADS[job.workload](1)[0], loader)
        return
    options: dict[str, Any] = dict(job.options)
    trainer = Trainer(
        accelerator="cpu",
        strategy=TSPipeStrategy(**options) if job.method == "fanout" else "auto",
        devices=job.num_ranks if job.method == "fanout" else 1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[peak],
    )
    trainer.fit(_module(job), loader)


def _run_trunk(trunk: nn.Module, loader: Fresh) -> None:
    """Forwards of the trunk and nothing else."""
    trunk.eval()
    with torch.no_grad():
        for inputs, _ in loader:
            trunk(inputs)


def _module(job: Job) -> Tasks:
    """All heads, or this process's own."""
    make = WORKLOADS[job.workload]
    if job.method == "fanout":
        return Tasks(make(job.num_ranks))
    trunk, heads = make(job.rank + 1)
    return Tasks((trunk, heads[-1:]), job.rank, has_features=job.method == "heads")


def _batches(job: Job) -> list[Batch]:
    """A random batch; for heads alone its features."""
    generator = torch.Generator().manual_seed(0)
    size = job.batch_size
    if job.workload == "units":
        return [(torch.zeros(size, 1), torch.empty(size, 0))]
    shape: tuple[int, ...] = (size, 3, IMAGE_SIZE, IMAGE_SIZE)
    if job.method == "heads":
        trunk, _ = WORKLOADS[job.workload](1)
        with torch.no_grad():
            shape = (size, *trunk.eval()(torch.zeros(1, 3, IMAGE_SIZE, IMAGE_SIZE)).shape[1:])
    labels = [torch.randint(n, (size,), generator=generator) for n in NUM_CLASSES]
    return [(torch.randn(shape, generator=generator), torch.stack(labels, 1))]
