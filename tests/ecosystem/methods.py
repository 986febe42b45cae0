"""lightly's methods as they are trained in tests, and how: functions that run on every rank."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_tspipe import DelayedTeacherUpdate, TSPipeStrategy
from lightning_tspipe.cli.checking import draw_alike
from tests.ecosystem.lightly_modules.backbone import IMAGE_SIZE
from tests.integration.replicas import OptimizerAtEnd
from tests.integration.trainings import Epochs, Recorder, quiet_trainer, strict

FOLDER = "tests.ecosystem.lightly_modules"
NUM_CLASSES = 6
BENCHMARK = {"batch_size_per_device": 4, "num_classes": NUM_CLASSES}
MOMENTUM = ["backbone_momentum", "projection_head_momentum"]
HEADS = ["backbone", "projection_head", "prediction_head"]
STUDENT = ["student_backbone", "student_projection_head"]
TWO_VIEWS = (IMAGE_SIZE,) * 2
CROPS = (IMAGE_SIZE, IMAGE_SIZE, 8, 8)


@dataclass(frozen=True)
class Method:
    """A module, and what a user tells the strategy about it.

    Attributes:
        file: Where it is.
        name: Of the class.
        student: Its trained networks, in the order of forward.
        teacher: Its averaged networks.
        views: Sides of the images of each view.
        options: Arguments of the class.
    """

    file: str
    name: str
    student: list[str]
    teacher: list[str]
    views: tuple[int, ...] = TWO_VIEWS
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_benchmark(self) -> bool:
        return bool(self.options)

    def make(self, world: str) -> Any:
        """A module of a Lightning world: the same file, with the other import."""
        torch.manual_seed(0)
        if world == "pytorch_lightning":
            return getattr(importlib.import_module(f"{FOLDER}.{self.file}"), self.name)(
                **self.options
            )
        spec = importlib.util.find_spec(f"{FOLDER}.{self.file}")
        assert spec is not None
        assert spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        with mock.patch.dict(sys.modules, {"pytorch_lightning": importlib.import_module(world)}):
            spec.loader.exec_module(found)
        return getattr(found, self.name)(**self.options)


METHODS = {
    "byol": Method("byol", "BYOL", HEADS, MOMENTUM),
    "moco": Method("moco", "MoCo", HEADS[:2], MOMENTUM),
    "tico": Method("tico", "TiCo", HEADS[:2], MOMENTUM),
    "mmcr": Method("mmcr", "MMCR", HEADS[:2], MOMENTUM, (IMAGE_SIZE,) * 3),
    "dino": Method(
        "dino", "DINO", ["student_backbone", "student_head"], ["teacher_backbone", "teacher_head"],
        CROPS,
    ),
    "benchmark byol": Method(
        "benchmark_byol", "BYOL", HEADS, ["teacher_backbone", "teacher_projection_head"],
        options=BENCHMARK,
    ),
    "benchmark mocov2": Method(
        "benchmark_mocov2", "MoCoV2", ["query_backbone", "query_projection_head"], HEADS[:2],
        options=BENCHMARK,
    ),
    "benchmark tico": Method("benchmark_tico", "TiCo", STUDENT, HEADS[:2], options=BENCHMARK),
    "benchmark dino": Method("benchmark_dino", "DINO", STUDENT, HEADS[:2], CROPS, BENCHMARK),
    "benchmark dino vit": Method(
        "benchmark_dino_vit", "DINO", STUDENT, HEADS[:2], (IMAGE_SIZE,) * 4, BENCHMARK
    ),
    "capi without its head": Method(
        "capi", "CAPI", ["student_backbone", "predictor", "student_head"], ["teacher_backbone"]
    ),
    "msn": Method(
        "msn", "MSN", ["anchor_backbone", "anchor_projection_head"], HEADS[:2],
        (IMAGE_SIZE,) * 4,
    ),
    "ibot": Method("ibot", "IBOT", ["student_backbone"], ["teacher_backbone"]),
    "smog": Method("smog", "SMoG", HEADS, MOMENTUM),
}  # fmt: skip
REFUSED = {
    "smog that clusters first": Method("smog", "ClustersFirst", HEADS, MOMENTUM),
    "capi": Method(
        "capi", "CAPI", ["student_backbone", "predictor", "student_head"],
        ["teacher_backbone", "teacher_head"],
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """How the methods are trained.

    Attributes:
        methods: Names in ``METHODS``, one after the other in the same processes.
        num_ranks: Devices.
        num_stages: Of each pipeline; 0: without this project's strategy.
        world: Which Lightning.
        sizes: Batch sizes of each epoch, of all replicas together.
        trainer: Further arguments of the Trainer.
        change: Changes the modules after they are built; module-level.
    """

    methods: tuple[str, ...]
    num_ranks: int = 1
    num_stages: int = 0
    world: str = "pytorch_lightning"
    sizes: tuple[tuple[int, ...], ...] = ((4, 4, 3), (4, 4, 3))
    trainer: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Any], None] | None = None

    @property
    def num_replicas(self) -> int:
        return self.num_ranks // max(self.num_stages, 1)


@dataclass
class Result:
    """What a rank knows at the end.

    Attributes:
        losses: Of each batch.
        state: Parameters and buffers that are there.
        optimizer: Its state and groups.
        metrics: What was logged last.
    """

    losses: list[Tensor]
    state: dict[str, Tensor]
    optimizer: dict[str, Any]
    metrics: dict[str, float]


def _views(sides: tuple[int, ...], size: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 3, side, side, generator=generator) for side in sides]


def _targets(size: int, seed: int) -> Tensor:
    return torch.randint(NUM_CLASSES, (size,), generator=torch.Generator().manual_seed(seed))


def batches(method: Method, sizes: tuple[tuple[int, ...], ...]) -> list[list[Any]]:
    """Views, labels and names, as lightly's datasets give them."""
    seeds = iter(range(10**6))
    epochs = []
    for epoch in sizes:
        made = []
        for size in epoch:
            seed = next(seeds)
            names = [f"{seed}-{i}.jpg" for i in range(size)]
            made.append((_views(method.views, size, seed), _targets(size, seed), names))
        epochs.append(made)
    return epochs


def share(batch: Any, run: Run) -> Any:
    """This replica's samples of a batch."""
    number = run.num_replicas
    index = int(os.environ.get("LOCAL_RANK", "0")) // max(run.num_stages, 1)

    def part(leaf: Any) -> Any:
        return leaf[index * len(leaf) // number : (index + 1) * len(leaf) // number]

    return pytree.tree_map_only(Tensor, part, batch)


def strategy_of(method: Method, run: Run) -> Any:
    """The Trainer's ``strategy``."""
    if run.num_stages:
        return TSPipeStrategy(
            student=method.student, teacher=method.teacher, num_stages=run.num_stages,
            num_microbatches=1,
        )  # fmt: skip
    return "auto" if run.num_ranks == 1 else "ddp_find_unused_parameters_true"


def trainer_of(method: Method, run: Run, *callbacks: Any) -> Any:
    return quiet_trainer(
        run.world, devices=run.num_ranks, strategy=strategy_of(method, run),
        max_epochs=len(run.sizes),
        callbacks=[DelayedTeacherUpdate(teacher=method.teacher), *callbacks], **run.trainer,
    )  # fmt: skip


@contextmanager
def as_users_see_it() -> Iterator[None]:
    """Warnings are errors, but for those that lightly's own modules give on one device too."""
    with warnings.catch_warnings():
        strict()
        warnings.filterwarnings("ignore", message=".*torch.nn.utils.weight_norm. is deprecated")
        warnings.filterwarnings("ignore", message="Attribute .* is an instance of `nn.Module`")
        warnings.filterwarnings("ignore", message=".*sync_dist=True")
        warnings.filterwarnings("ignore", message="find_unused_parameters=True")
        yield


def train(run: Run) -> dict[str, Result]:
    """Fit each of the methods, and tell what this rank has then."""
    results = {}
    for name in run.methods:
        method = (METHODS | REFUSED)[name]
        with as_users_see_it():
            module = method.make(run.world).double()  # lightly's memory bank is float32
            if run.change is not None:
                run.change(module)
            if run.num_ranks == 1 and not run.num_stages:
                draw_alike(module)  # masks
            recorder, optimizer = Recorder(), OptimizerAtEnd()
            trainer = trainer_of(method, run, recorder, optimizer)
            shares = [[share(batch, run) for batch in e] for e in batches(method, run.sizes)]
            validation = None
            if method.is_benchmark:
                images, labels = _views((IMAGE_SIZE,) * 2, 4, 77), _targets(8, 78)
                validation = Epochs([[(view, labels[i::2], [""]) for i, view in enumerate(images)]])
            trainer.fit(module, Epochs(shares), validation)
        state = {k: v.detach().clone() for k, v in module.state_dict().items() if not v.is_meta}
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
        results[name] = Result(recorder.losses, state, optimizer.state, metrics)
    return results
