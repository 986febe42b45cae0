"""What the jobs of the laboratory train: the script of every rank."""

from __future__ import annotations

import json
import os
import time
import warnings
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_tspipe import (
    AutoCache,
    BlockwiseRelay,
    FreezeAndRepack,
    HeadCheckpoint,
    MomentumEMA,
    ScheduledFreeze,
)
from lightning_tspipe.caching import WithIds
from tests.exactness import fanout
from tests.faults.lab.drawing import NUM_BATCHES, NUM_EPOCHS, Configuration, Fault, Launcher
from tests.integration import freezing, relayed

BATCH_SIZE = 4
SAVED = "saved"
RESULT, AT_END = "result.pt", "at-end-"
WIDTH = fanout.WIDTH


@dataclass(frozen=True)
class Task:
    """What the script of a job is told.

    Attributes:
        configuration: What is trained.
        launcher: Who starts the processes.
        fault: What goes wrong; None: nothing.
        timeout: Of the strategy, in seconds.
        pause: Seconds before each batch, for faults that come from outside or take their time.
        checkpoint: To go on from.
    """

    configuration: Configuration
    launcher: Launcher
    fault: Fault | None = None
    timeout: float = 60.0
    pause: float = 0.0
    checkpoint: str | None = None

    def write(self, path: Path) -> None:
        """Write it for :meth:`read`."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Task:
        """What was written."""
        told = json.loads(path.read_text(encoding="utf-8"))
        told["configuration"] = Configuration(**told["configuration"])
        told["fault"] = None if told["fault"] is None else Fault(**told["fault"])
        return cls(**told)


# Data


class Samples(Dataset[Any]):
    """Samples of one mode; with noise that torch draws when they are read, unless cached."""

    def __init__(self, mode: str, number: int, *, noisy: bool) -> None:
        generator = torch.Generator().manual_seed(number)
        shape = {"freeze": (4,), "relay": (3, 8, 8)}.get(mode, (WIDTH,))
        self._x = torch.randn(number, *shape, generator=generator)
        if mode == "fanout":
            columns = [torch.randint(n, (number,), generator=generator) for n in fanout.NUM_CLASSES]
            self._y = torch.stack(columns, 1)
        else:
            self._y = torch.randint(3, (number,), generator=generator)
        self._noisy = noisy

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self._x[index]
        return (x + 0.1 * torch.randn_like(x) if self._noisy else x), self._y[index]


def loaders(it: Configuration) -> list[Any]:
    """For training, and for validation if there is one."""
    samples: Any = Samples(it.mode, BATCH_SIZE * NUM_BATCHES, noisy=not it.caches)
    if it.caches:
        samples = WithIds(samples, inputs=0)
    worker: dict[str, Any] = {"num_workers": it.workers}
    if it.workers:
        worker["multiprocessing_context"] = "fork"
    found = [DataLoader(samples, BATCH_SIZE, shuffle=True, **worker)]
    if it.validation != "none":
        found.append(DataLoader(Samples(it.mode, 8, noisy=False), BATCH_SIZE))
    return found


# Modules


def _block(norm: str) -> nn.Module:
    made = nn.BatchNorm1d(WIDTH) if norm == "batch norm" else nn.LayerNorm(WIDTH)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), made, nn.Tanh())


class Pair(LightningModule):
    """A student and, maybe, a teacher that is its average."""

    def __init__(self, it: Configuration) -> None:
        super().__init__()
        self.optimizer = it.optimizer
        norm = "batch norm" if it.variant == "batch norm" else "layer norm"
        self.student = nn.Sequential(*(_block(norm) for _ in range(4)), nn.Linear(WIDTH, 3))
        self.teacher: nn.Module | None = None
        if has_teacher(it):
            self.teacher = nn.Sequential(*(_block(norm) for _ in range(4)), nn.Linear(WIDTH, 3))
            self.teacher.load_state_dict(self.student.state_dict())
            self.teacher.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.student(x)
        loss = F.cross_entropy(logits, y)
        if self.teacher is not None:
            loss = loss + F.mse_loss(logits, self.teacher(x.flip(-1)).detach())
        self.log("loss", loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.student(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        parameters = list(self.student.parameters())
        if self.optimizer == "adamw":
            made: Any = torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)
        else:
            made = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        return [made], [torch.optim.lr_scheduler.ExponentialLR(made, 0.8)]


class Heads(fanout.Tasks):
    """Batches may have ids; Adam makes nothing of rounding errors.

    A bias before BatchNorm has no gradient but those, 1e-17, and parts of a batch that are cached
    round otherwise; divided by 1e-8 they would be seen in the twelfth digit.
    """

    def head_optimizer(self, name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = super().head_optimizer(name, parameters)
        for group in made.param_groups:
            group["eps"] = 1e-3
        return made

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[:2], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch[:2], batch_idx)


class Freezing(freezing.Validated):
    """Batches may have ids."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch[:2], batch_idx)


class Blocks(relayed.Blocks):
    """At the top of a file, since it travels to workers."""


def has_teacher(it: Configuration) -> bool:
    return it.mode == "plain" and it.variant != "no teacher"


def module_of(it: Configuration) -> Any:
    """The module; the same values on every rank."""
    torch.manual_seed(0)
    if it.mode == "relay":
        return Blocks(4)
    if it.mode == "fanout":
        return Heads(int(it.variant[0]))
    if it.mode == "freeze":
        return Freezing(freezing.Case())
    return Pair(it)


# The Trainer


def strategy_of(task: Task) -> Any:
    """The strategy as its name gives it, and what a name can't say."""
    it = task.configuration
    known: Any = StrategyRegistry[it.strategy]
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=task.timeout), "num_stages": it.num_stages,
    }  # fmt: skip
    if task.launcher in {"spawn", "fork", "forkserver"}:
        options["start_method"] = task.launcher
    if it.sharded:
        options["save_distributed_checkpoint"] = True
    if it.mode in {"plain", "freeze"}:
        options["num_microbatches"] = 2 if it.variant == "2 micro-batches" else 1
    if it.variant == "given cuts":
        options["partition"] = _cuts(it.num_ranks)
    return known["strategy"](**known["init_params"], **options)


def _cuts(number: int) -> list[int]:
    """The thirteen atoms of a ``Pair``'s student, over so many stages."""
    return [13 // number + (place < 13 % number) for place in range(number)]


def callbacks_of(it: Configuration) -> list[Any]:
    """Of a mode, and those that save."""
    found: list[Any] = []
    if has_teacher(it):
        found.append(MomentumEMA(0.9))
    if it.mode == "relay":
        found.append(BlockwiseRelay(it.variant, profile_steps=1, profile_cache=None))  # type: ignore[arg-type]
    if it.mode == "fanout":
        found.append(HeadCheckpoint("loss"))
        if it.caches:
            found.append(AutoCache(memory="1MB", always=True))
    if it.mode == "freeze":
        found.append(_freezes(it))
    name = {"filename": "newest", "enable_version_counter": False} if it.keeps == "newest" else {}
    keeps: dict[str, Any] = {**name, "save_top_k": 1 if name else -1}
    return [
        *found,
        ModelCheckpoint(SAVED, every_n_train_steps=2, **keeps),
        OnExceptionCheckpoint(SAVED, "exception"),
    ]


def _freezes(it: Configuration) -> FreezeAndRepack:
    repack: Any = {"keeps the mesh": False, "repacks as told": {2: 2, 4: 1}}.get(it.variant, True)
    cache = AutoCache("student", memory="1MB", always=True) if it.caches else None
    policy = ScheduledFreeze({1: 2, 2: 4})
    return FreezeAndRepack(policy, repack=repack, num_active=2, cache=cache)


class Report(Callback):
    """Writes what each rank has at the end, and waits before batches."""

    def __init__(self, pause: float) -> None:
        self._pause = pause

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(self._pause)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        states = [trainer.strategy.optimizer_state(one) for one in trainer.optimizers]
        rates = [group["lr"] for one in trainer.optimizers for group in one.param_groups]
        found = {
            "states": [state.get("state", {}) for state in states], "rates": rates,
            "steps": trainer.global_step,
        }  # fmt: skip
        torch.save(found, f"{AT_END}{trainer.global_rank}.pt")


def trainer_of(task: Task, *callbacks: Any) -> Trainer:
    """The Trainer; quiet."""
    it = task.configuration
    # How it is cut decides what comes out: which weights are read, how many devices are left.
    depends_on_plan = it.variant == "measured" or it.mode == "freeze"
    return Trainer(
        accelerator="cpu", devices=it.num_ranks, strategy=strategy_of(task),
        max_epochs=NUM_EPOCHS, val_check_interval=2 if it.validation == "mid-epoch" else 1.0,
        accumulate_grad_batches=it.accumulate, logger=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=".",
        callbacks=[*callbacks_of(it), *callbacks], deterministic=depends_on_plan or None,
        plugins=[AsyncCheckpointIO()] if it.writes_meanwhile else None,
    )  # fmt: skip


def run(task: Task, *callbacks: Any) -> None:
    """Train; what came of it is in files."""
    warnings.filterwarnings("ignore")
    torch.set_default_dtype(torch.float64)
    module = module_of(task.configuration)
    trainer = trainer_of(task, *callbacks, Report(task.pause))
    torch.manual_seed(3)
    trainer.fit(module, *loaders(task.configuration), ckpt_path=task.checkpoint, weights_only=False)
    is_first = task.launcher in {"spawn", "fork", "forkserver"} or trainer.global_rank == 0
    if is_first:  # whose module is whole
        part = Path(f"{RESULT}.{os.getpid()}")
        torch.save(module.state_dict(), part)
        part.replace(RESULT)


def result_of(folder: Path) -> dict[str, Any]:
    """What a run has come to: weights, the optimizers' state of all ranks, rates and steps.

    Only weights, if there was nothing left to be trained.
    """
    found = {"weights": torch.load(folder / RESULT, weights_only=False)}
    ranks = [torch.load(path, weights_only=False) for path in sorted(folder.glob(f"{AT_END}*"))]
    if ranks:
        found["states"] = [
            {name: state for rank in ranks for name, state in rank["states"][index].items()}
            for index in range(len(ranks[0]["states"]))
        ]
        found |= {name: ranks[0][name] for name in ("rates", "steps")}
    return found
