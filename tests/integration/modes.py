"""Every way of training, for the test that goes on from everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_tspipe import (
    AutoCache,
    BlockwiseRelay,
    DelayedTeacherUpdate,
    FreezeAndRepack,
    HeadCheckpoint,
    HeadEarlyStopping,
    KNNEvaluator,
    MomentumEMA,
    OnlineLinearProbe,
    ScheduledFreeze,
    TSPipeStrategy,
    WeightPrediction,
)
from lightning_tspipe.caching import WithIds
from tests.exactness import fanout
from tests.exactness.modules import NUM_CLASSES, images, labels
from tests.integration import freezing, relayed
from tests.integration.by_hand import ByHand, body_and_tail, sample_by_sample
from tests.integration.everywhere import Mode
from tests.integration.test_asynchronous import Lit
from tests.integration.test_probe import Distillation
from tests.integration.trainings import lightning_module

WORLD = "lightning.pytorch"


# Loaders


class Stream(IterableDataset[Any]):
    """A data set in random order, without a length."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return map(self._dataset.__getitem__, torch.randperm(len(self._dataset)).tolist())


def streamed(dataset: Any, *, batch_size: int, shuffle: bool) -> Any:
    return DataLoader(Stream(dataset), batch_size)


def with_workers(dataset: Any, **options: Any) -> Any:
    # Forked: they have this process's float64.
    return DataLoader(dataset, num_workers=1, multiprocessing_context="fork", **options)


# A student and its teacher


def views(index: int) -> dict[str, Any]:
    """Two views, augmented by whatever torch draws at that moment."""
    made = [images(1, index + 100 * view)[0] + 0.1 * torch.randn(3, 5, 5) for view in range(2)]
    return {"views": made, "weight": float(index % 4), "name": str(index)}


def pair(
    case: str = "Byol-batch-2-by hand",
    optimizer: str = "adamw",
    change: Callable[[Any], None] | None = None,
) -> Any:
    """A module of the exactness tests, with a learning rate that falls and a validation."""
    module = lightning_module(case, WORLD, optimizer)

    def validation_step(batch: Any) -> None:
        loss = module.student(batch["views"][0]).square().mean() * torch.rand(())
        module.log("val", loss, batch_size=len(batch["weight"]))

    module.validation_step = validation_step
    if change is not None:
        change(module)
    return module


def without_ema(module: Any) -> None:
    module.ema = "by the callback"


def by_hand(module: Any) -> None:
    ByHand(sample_by_sample, body_and_tail)(module)


def becoming_another(module: Any) -> None:
    """With the last batch of the first epoch a second loss begins."""
    own = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        loss = own(batch, batch_idx)
        if module.global_step >= 3:
            loss = loss + module.student(batch["views"][1].flip(0)).square().mean()
        return loss

    module.training_step = training_step


def piped(module: Any, **options: Any) -> Any:
    names = {"student": module.student_names, "teacher": module.teacher_names or None}
    return TSPipeStrategy(**{"num_microbatches": 1, **names, **options})


def delayed() -> list[Any]:
    return [DelayedTeacherUpdate()]


def predicting() -> list[Any]:
    return [WeightPrediction()]


def averaging() -> list[Any]:
    return [MomentumEMA((0.5, 1.0), student="student.0", buffers="copy"), DelayedTeacherUpdate()]


def paired(change: Any = None, case: str = "Byol-batch-2-by hand", **options: Any) -> Mode:
    named = {k: options.pop(k) for k in ("trainer", "callbacks", "num_ranks") if k in options}
    made = Mode(partial(pair, case, change=change), views, partial(piped, **options), delayed)
    return replace(made, **named)


# Asynchronous


def one(index: int) -> tuple[Tensor, int]:
    return images(1, index)[0] + 0.1 * torch.randn(3, 5, 5), index % 3


def stages(number: int, weights: str, dropout: bool = False) -> Any:
    torch.manual_seed(number)
    module = Lit(number)
    module.optimizer = "momentum" if weights == "spectrain" else "adamw"
    if dropout:
        module.student[0].append(nn.Dropout(0.3))
    return module


def asynchronous(weights: str, cuts: tuple[int, ...], **options: Any) -> Mode:
    named = {k: options.pop(k) for k in ("trainer", "dropout") if k in options}
    dropout = named.pop("dropout", False)

    def strategy(_module: Any) -> Any:
        return TSPipeStrategy(schedule="1f1b", weights=weights, partition=list(cuts), **options)

    made = Mode(partial(stages, len(cuts), weights, dropout), one, strategy, num_ranks=len(cuts),
                num_samples=18)  # fmt: skip
    return replace(made, **named)


def rounds(schedule: Literal["interleaved", "zbv"]) -> Mode:
    """Several stages on each of two ranks, windows of five batches and a shorter one."""

    def strategy(_module: Any) -> Any:
        return TSPipeStrategy(schedule=schedule, partition=[2, 2, 2, 2])

    return Mode(partial(stages, 2, "synchronous", dropout=True), one, strategy, num_ranks=2,
                num_samples=18, trainer={"accumulate_grad_batches": 5})  # fmt: skip


def at_times_thrice(schedule: str, cuts: list[int]) -> Mode:
    """In every second window the student runs three times.

    Where a step ends, a stage may have run one call of a later batch and not yet the others.
    """

    def module() -> Any:
        made = stages(4, "synchronous")
        own = made.training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            loss = own(batch, batch_idx)
            if made.global_step % 2 == 0:
                for factor in (2, 3):
                    loss = loss + made.student(factor * batch[0]).square().mean()
            return loss

        made.training_step = training_step
        return made

    def strategy(_module: Any) -> Any:
        return TSPipeStrategy(schedule=schedule, weights="synchronous", partition=cuts)

    return Mode(module, one, strategy, num_ranks=2, num_samples=22,
                trainer={"accumulate_grad_batches": 4})  # fmt: skip


def taught(schedule: str, cuts: list[int], **named: Any) -> Mode:
    """Windows of two batches, whose teacher runs ahead of the next update."""

    def module() -> Any:
        made = stages(4, "synchronous")
        own = made.training_step
        made.teacher = deepcopy(made.student).requires_grad_(requires_grad=False)

        def training_step(batch: Any, batch_idx: int) -> Any:
            given = made.teacher(batch[0])
            return own(batch, batch_idx) + (made.student(2 * batch[0]) - given).square().mean()

        made.training_step = training_step
        return made

    def strategy(_module: Any) -> Any:
        partition = {"student": cuts, "teacher": cuts}
        return TSPipeStrategy(schedule=schedule, weights="synchronous", partition=partition)

    mode = Mode(module, one, strategy, num_ranks=2, num_samples=22,
                trainer={"accumulate_grad_batches": 2})  # fmt: skip
    return replace(mode, **named)


class Changes(Callback):
    """A teacher that was frozen until then changes behind an update."""

    def on_train_batch_end(self, _trainer: Any, module: Any, *others: Any) -> None:
        *_, batch_idx = others
        if batch_idx == 3:
            with torch.no_grad():
                pairs = zip(module.student.parameters(), module.teacher.parameters(), strict=True)
                for own, mean in pairs:
                    mean.lerp_(own, 0.5)


def averaged_late() -> list[Any]:
    return [MomentumEMA(0.9), DelayedTeacherUpdate(windows=True)]


# Heads on a trunk


def labelled(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(fanout.WIDTH, generator=generator) + 0.1 * torch.randn(fanout.WIDTH)
    found = [torch.randint(n, (), generator=generator) for n in fanout.NUM_CLASSES]
    return x, torch.stack(found)


def fixed_label(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(fanout.WIDTH, generator=generator)
    return x, torch.stack([torch.randint(n, (), generator=generator) for n in fanout.NUM_CLASSES])


class Heads(fanout.Tasks):
    """Batches may have ids, and heads dropout."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[:2], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch[:2], batch_idx)

    def head_optimizer(self, name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        # No Adam where a bias is in front of a norm: of its gradient it sees the rounding.
        return fanout.make_optimizer("task1" if name == "task2" else "task0", parameters)


def heads(number: int = 3) -> Any:
    module = Heads(number)
    module.student.heads["task1"].insert(1, nn.Dropout(0.2))
    return module


def fanned(**named: Any) -> Mode:
    options = {"partition": [5, 5], **named.pop("options", {})}
    return replace(
        Mode(heads, labelled, lambda _: TSPipeStrategy(**options), num_samples=18), **named
    )


def watched_heads() -> list[Any]:
    return [HeadCheckpoint("val_loss"), HeadEarlyStopping(patience=1, min_delta=0.02)]


# Layers that freeze


class Draws(Callback):
    """Draws a random number where an epoch begins, behind all that happens there."""

    def on_train_epoch_start(self, *_: Any) -> None:
        torch.rand(())


def freezes_and_draws() -> list[Any]:
    return [*freezes(repack={2: 1}), Draws()]


def numbered(index: int) -> tuple[Tensor, int]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(4, generator=generator), index % freezing.NUM_CLASSES


def freezes(
    cache: bool = False, repack: Any = False, frozen: Any = None, dtype: Any = None
) -> list[Any]:
    cached = AutoCache("student", memory=8_000_000, dtype=dtype, always=True) if cache else None
    policy = ScheduledFreeze(frozen or {1: 2, 2: 4})
    return [FreezeAndRepack(policy, repack=repack, cache=cached),
            MomentumEMA(0.8, teacher="average", buffers="average")]  # fmt: skip


def frozen(num_ranks: int = 2, num_stages: int | None = None, **named: Any) -> Mode:
    number = num_stages or num_ranks
    cuts = [7 * (i + 1) // number - 7 * i // number for i in range(number)]
    options = {"num_stages": num_stages, "partition": {"student": cuts}, "num_microbatches": 2}
    callbacks = {k: named.pop(k) for k in ("cache", "repack", "frozen", "dtype") if k in named}
    options |= named.pop("options", {})
    case = freezing.Case(averaged=True, **named.pop("case", {}))
    made = Mode(
        partial(freezing.Validated, case), numbered,
        lambda _: TSPipeStrategy(student="student", **options), partial(freezes, **callbacks),
        with_ids=partial(WithIds, inputs=0) if callbacks.get("cache") else lambda data: data,
        num_ranks=num_ranks, num_samples=22, batch_size=8 * (num_stages or num_ranks) // num_ranks,
        epochs=3,
    )  # fmt: skip
    return replace(made, **named)


# Blocks


def pictures(index: int) -> tuple[Tensor, int]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(3, 8, 8, generator=generator) + 0.1 * torch.randn(3, 8, 8), index % 9


def blocks(**named: Any) -> Any:
    torch.manual_seed(0)
    return relayed.Blocks(4, **named)


def relaying(module: dict[str, Any] | None = None, trainer: Any = None, num_ranks: int = 2,
             **options: Any) -> Mode:  # fmt: skip
    options = {"partition": [1, 3], "profile_cache": None, "profile_steps": 1, **options}
    return Mode(
        partial(blocks, **(module or {})), pictures, lambda _: "tspipe",
        lambda: [BlockwiseRelay(**options)], num_ranks=num_ranks, trainer=trainer or {},
    )  # fmt: skip


# Evaluations with a state


def probed() -> list[Any]:
    probe = OnlineLinearProbe(NUM_CLASSES, freshly(10, 7), "backbone", lr=0.3, batch_size=3)
    return [probe, KNNEvaluator(freshly(11, 8), freshly(10, 7), "backbone", k=3, batch_size=3)]


def freshly(size: int, seed: int) -> Any:
    return torch.utils.data.TensorDataset(images(size, seed), labels(size, seed))


def classed(index: int) -> tuple[Tensor, int]:
    return images(1, index)[0] + 0.1 * torch.randn(3, 5, 5), index % NUM_CLASSES


class Probed(Distillation):
    """The same, validated."""

    def validation_step(self, batch: Any) -> None:
        self.log("val", self.head(self.backbone(batch[0])).square().mean() * torch.rand(()))


def probing(**named: Any) -> Mode:
    strategy = partial(TSPipeStrategy, student=["backbone", "head"], num_microbatches=1)
    made = Mode(Probed, classed, lambda _: strategy(), probed)
    return replace(made, **named)


TWICE = {"val_check_interval": 2}
ACCUMULATES = {"accumulate_grad_batches": 3}

PLAIN: dict[str, Mode] = {
    "tspipe": paired(),
    "gpipe": paired(schedule="gpipe"),
    "sequential": paired(schedule="sequential"),
    "micro-batches": paired(num_microbatches=2, case="RandomStep"),
    "accumulation": paired(trainer=ACCUMULATES),
    "by hand": paired(by_hand),
    "averaging": paired(without_ema, callbacks=averaging),
    "three ranks": paired(num_ranks=3),
    "replicas": paired(num_ranks=4, num_stages=2, case="Byol-group-2-by hand",
                       trainer={"accumulate_grad_batches": 2}),
    "replicas, divided state": paired(num_ranks=4, num_stages=2, case="Byol-group-2-by hand",
                                      trainer=ACCUMULATES, zero_stage=1),
    "replicas by hand": paired(by_hand, num_ranks=4, num_stages=2, case="Byol-group-2-by hand"),
    "pipeoptim": asynchronous("pipeoptim", (3, 4)),
    "pipedream": asynchronous("pipedream", (3, 4, 4)),
    "2bw": asynchronous("2bw", (3, 4), trainer={"accumulate_grad_batches": 2}),
    "spectrain": asynchronous("spectrain", (4, 4), dropout=True, activation_checkpointing=True),
    "windows": asynchronous("synchronous", (4, 4), dropout=True,
                            trainer={"accumulate_grad_batches": 3}),
    "interleaved": rounds("interleaved"),
    "to and fro": rounds("zbv"),
    "windows, at times thrice": at_times_thrice("1f1b", [7, 8]),
    "interleaved, at times thrice": at_times_thrice("interleaved", [3, 4, 4, 4]),
    "to and fro, at times thrice": at_times_thrice("zbv", [3, 4, 4, 4]),
    "windows, teacher ahead": taught("1f1b", [7, 8]),
    "interleaved, teacher ahead": taught("interleaved", [3, 4, 4, 4]),
    "to and fro, teacher ahead": taught("zbv", [3, 4, 4, 4]),
    "windows, teacher changes": taught("1f1b", [7, 8], callbacks=lambda: [Changes()]),
    "windows, teacher late": taught("1f1b", [7, 8], callbacks=averaged_late),
    "interleaved, teacher late": taught("interleaved", [3, 4, 4, 4], callbacks=averaged_late),
    "to and fro, teacher late": taught("zbv", [3, 4, 4, 4], callbacks=averaged_late),
    "fan-out": fanned(),
    "fan-out, heads watched": fanned(callbacks=watched_heads, epochs=3, validates=True,
                                     decides=True),
    "fan-out, accumulation": fanned(trainer={"accumulate_grad_batches": 2}),
    "fan-out, cache": fanned(sample=fixed_label, callbacks=lambda: [AutoCache(always=True)],
                             with_ids=partial(WithIds, inputs=0), epochs=3),
    "freeze": frozen(),
    "freeze, draws": frozen(case={"draws": True}),
    "freeze, repack": frozen(repack={4: 1}),
    "freeze, cache": frozen(cache=True),
    "freeze, repack, cache": frozen(cache=True, repack={4: 1}),
    "freeze, mesh": frozen(4, 2, repack={2: 1}),
    "freeze, mesh, divided state": frozen(4, 2, repack={2: 1}, options={"zero_stage": 1}),
    "freeze, to a mesh, divided state": frozen(4, repack={2: 2}, options={"zero_stage": 1}),
    "freeze, mesh stays": frozen(4, 2),
    "freeze, mesh, cache": frozen(4, 2, repack={2: 1}, cache=True),
    "freeze, mesh at the last transition": frozen(4, 2, repack={4: 1}),
    "freeze, to a mesh": frozen(4, repack={2: 2}),
    "freeze, to a mesh, cache": frozen(4, repack={2: 2}, cache=True),
    "relay": relaying(),
    "relay, accumulation": relaying(trainer={"accumulate_grad_batches": 2}),
    "relay, shared": relaying({"labelled": True}, mode="ahd", widths=[2, 1], num_ranks=3),
    "relay, optimizers": relaying({"optimizer": "blocks"}),
    "probe": probing(),
}  # fmt: skip

MODES = dict(PLAIN)
MODES |= {f"{name}, validation": replace(mode, validates=True) for name, mode in PLAIN.items()}
MODES |= {
    f"{name}, validation within": replace(mode, validates=True, trainer={**mode.trainer, **TWICE})
    for name, mode in PLAIN.items()
}


STEPS = {"max_steps": 6, "max_epochs": -1}
ROUNDED = torch.float32
ODD: dict[str, Mode] = {
    "freeze, rounded cache": frozen(cache=True, dtype=ROUNDED),
    "freeze, to a mesh, rounded cache": frozen(4, repack={2: 2}, cache=True, dtype=ROUNDED),
    "freeze, repack, draws between epochs": replace(
        frozen(repack={2: 1}), callbacks=freezes_and_draws),
    "steps, freeze, repack, draws between epochs": replace(
        frozen(trainer={**STEPS, "max_steps": 9}), callbacks=freezes_and_draws),
    "fan-out, rounded cache": fanned(
        sample=fixed_label, callbacks=lambda: [AutoCache(dtype=ROUNDED)],
        with_ids=partial(WithIds, inputs=0), epochs=3),
    "another": replace(paired(becoming_another, trainer=TWICE), validates=True),
    "steps": paired(trainer=STEPS),
    "steps, validation within": replace(paired(trainer={**STEPS, **TWICE}), validates=True),
    "steps, freeze": replace(
        frozen(trainer={**STEPS, "max_steps": 9, **TWICE}), validates=True),
    "steps, freeze, to a mesh": replace(
        frozen(4, repack={2: 2}, trainer={**STEPS, "max_steps": 9, **TWICE}), validates=True),
    "steps, fan-out": fanned(validates=True, trainer={**STEPS, "max_steps": 9, **TWICE}),
    "stream": replace(paired(), loader=streamed),
    "stream, draws between epochs": replace(
        paired(), loader=streamed, callbacks=lambda: [Draws()]),
    "stream, validation": replace(paired(), loader=streamed, validates=True),
    "stream, pipeoptim": replace(asynchronous("pipeoptim", (3, 4)), loader=streamed),
    "stream, fan-out, validation": fanned(loader=streamed, validates=True),
    "workers": replace(paired(trainer=TWICE), loader=with_workers, validates=True),
    "sanity": replace(paired(trainer={**TWICE, "num_sanity_val_steps": 2}), validates=True),
    "sanity, fan-out": fanned(validates=True, trainer={**TWICE, "num_sanity_val_steps": 2}),
    "limited": replace(paired(trainer={**TWICE, "limit_train_batches": 3}), validates=True),
    "across epochs": replace(
        paired(trainer={"val_check_interval": 3, "check_val_every_n_epoch": None}),
        validates=True),
    "second epochs": replace(
        paired(trainer={"check_val_every_n_epoch": 2}), validates=True, epochs=3),
    "no drain": asynchronous("pipeoptim", (3, 4), drain_epochs=False),
    "no drain, draws between epochs": replace(
        asynchronous("pipeoptim", (3, 4), drain_epochs=False), callbacks=lambda: [Draws()]),
    "no drain, three": asynchronous("pipedream", (3, 4, 4), drain_epochs=False),
    "no drain, validation": replace(
        asynchronous("pipedream", (3, 4, 4), drain_epochs=False), validates=True),
}  # fmt: skip
MODES |= ODD


@dataclass(frozen=True)
class Named:
    """Makes a mode in the process that trains it: modes can't be sent there."""

    name: str

    def __call__(self) -> Mode:
        return MODES[self.name]
