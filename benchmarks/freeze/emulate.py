"""One rank of an emulated run: an ordinary Trainer and strategy, a network that sleeps.

Started by ``main.py``, once; Lightning starts the other ranks. Rank 0 writes the result.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from benchmarks.freeze.sleepers import Sleeping
from lightning_tspipe import (
    AutoCache,
    FreezeAndRepack,
    PipelineTimeline,
    ScheduledFreeze,
    TSPipeStrategy,
)
from lightning_tspipe.caching import WithIds
from lightning_tspipe.ir.pipeline import NetworkLayout
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.strategy.setup.freezing import Freezing, choose
from lightning_tspipe.strategy.training import repacking

METHODS = ("baseline", "balanced", "freeze", "unpipelined", "repack", "cache", "shortened")
WITHOUT = {"baseline", "balanced"}
"""They freeze nothing; the second one has finer atoms in its profile."""
FRACTION = 1 / 64
"""Of the real bytes that travel between stages: two cores copy for all devices."""
BATCH_SIZE = 256
LINK = (4e-4, 2e9)
ACTION_SECONDS = 3e-4
SCHEDULE = {1: 4, 2: 7, 3: 9, 4: 10, 5: 11, 6: 12}
"""Frozen layers by epoch: the most that the paper's rule allows with alpha = 1/3, of 14."""
STAGES = {4: 2, 9: 1}
"""Of what is trained, by frozen layers, to show how pipelines get shorter one after the other."""


class Times(Callback):
    """Seconds of a step of each epoch: the median, since the first ones make the schedules."""

    def __init__(self) -> None:
        self.epochs: list[float] = []
        self._ends: list[float] = []

    @override
    def on_train_batch_end(self, *_: object) -> None:
        self._ends.append(time.perf_counter())

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.epochs.append(median(end - start for start, end in pairwise(self._ends)))
        self._ends = []
        if trainer.is_global_zero:
            print(f"epoch {trainer.current_epoch}: {self.epochs[-1]:.3f} s", file=sys.stderr)


class KnowsCosts(Callback):
    """Has the strategy know the costs, instead of measuring sleeps."""

    def __init__(self, profile: StepProfile, plan: Plan) -> None:
        self._profile, self._plan = profile, plan

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        strategy.freezing.learn(self._profile, self._plan, 1)


def main() -> None:
    """Train, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="of an epoch")
    parser.add_argument("--profile", type=Path, required=True, help="what everything costs")
    parser.add_argument("--plan", type=Path, required=True, help="the first plan")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--timelines", type=Path, help="record steps of each epoch in this folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    profile = StepProfile.from_json(options.profile.read_text(encoding="utf-8"))
    plan = Plan.from_json(options.plan.read_text(encoding="utf-8"))
    if options.method == "unpipelined":
        vars(repacking)["choose"] = _unpipelined
    times = Times()
    callbacks: list[Any] = [times]
    freezing = None
    if options.method not in WITHOUT:
        cache = AutoCache(memory="1GB", always=True) if options.method == "cache" else None
        repacks: Any = options.method in {"repack", "cache"}
        if options.method == "shortened":
            repacks = STAGES
        freezing = FreezeAndRepack(ScheduledFreeze(SCHEDULE), repack=repacks, cache=cache)
        callbacks = [freezing, KnowsCosts(profile, plan), times]
        callbacks += _timelines(options.timelines, options.steps)
    schedule = "gpipe" if options.method == "unpipelined" else "tspipe"
    trainer = Trainer(
        accelerator="cpu", devices=options.devices, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
        strategy=TSPipeStrategy(plan=replace(plan, schedule=schedule)),
        max_epochs=1 if freezing is None else max(SCHEDULE) + 1,
    )  # fmt: skip
    data: Any = TensorDataset(torch.zeros(options.steps * BATCH_SIZE, 1))
    trainer.fit(Sleeping(profile), DataLoader(WithIds(data), BATCH_SIZE))
    if trainer.is_global_zero:
        history = [] if freezing is None else freezing.history
        ideal = [
            _ideal(profile, options.devices, epoch) for epoch in range(trainer.max_epochs or 0)
        ]
        found = {"seconds": times.epochs, "history": history, "ideal": ideal}
        options.result.write_text(json.dumps(found), encoding="utf-8")


def _timelines(folder: Path | None, num_steps: int) -> list[Callback]:
    """A window within each epoch."""
    epochs = range(max(SCHEDULE) + 1 if folder is not None else 0)
    return [
        PipelineTimeline(epoch * num_steps + 1, num_steps - 2, f"{folder}/{epoch}")
        for epoch in epochs
    ]


def _ideal(profile: StepProfile, devices: int, epoch: int) -> float:
    """Seconds of a step if no device ever waited: what is trained, and what froze just now."""
    before, now = (max([0, *(n for e, n in SCHEDULE.items() if e <= at)])
                   for at in (epoch - 1, epoch))  # fmt: skip
    forward, backward = (profile.student.sums(kind, BATCH_SIZE) for kind in ("forward", "backward"))
    return (forward[-1] - forward[before] + backward[-1] - backward[now]) / devices


def _unpipelined(
    freezing: Freezing,
    num_frozen: int,
    num_devices: int,
    meshes: Sequence[int],
    constraints: Mapping[str, Any],
) -> Plan | None:
    """As in the paper: what is frozen runs on the first device, before the active layers."""
    found = choose(freezing, num_frozen, num_devices, meshes, constraints)
    if found is None or found.pipeline.teacher is None:
        return found
    teacher = found.pipeline.teacher
    first = NetworkLayout(
        (found.pipeline.num_ranks - 1,), teacher.num_calls, teacher.num_microbatches, frozenset()
    )
    whole = replace(
        found.costs.teacher[-1], forward=sum(cost.forward for cost in found.costs.teacher)
    )
    return replace(
        found,
        pipeline=replace(found.pipeline, teacher=first),
        teacher_cuts=(0, num_frozen),
        costs=replace(found.costs, teacher=(whole,)),
    )


if __name__ == "__main__":
    main()
