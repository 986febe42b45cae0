"""The pipelined side: one engine per rank, ranks as threads of this process or as processes."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from lightning_tspipe.capture.trace import Networks
from lightning_tspipe.planning.placement import Placement, default_ranks
from lightning_tspipe.runtime.execution.engine import Rank
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.stages.compiling import Compiler
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.wired import GlooTransport
from tests.device import DEVICE, on_device, on_host
from tests.exactness.modules import Trained
from tests.exactness.setting import Record, Setting, gradients_of, loss_of, state_of
from tests.strict import StrictNetwork
from tests.threads import run_on_threads


def run_pipelined(setting: Setting) -> Record:
    """Train on ``setting.num_ranks`` threads, as one pipeline."""
    network = StrictNetwork(setting.num_ranks, timeout=30)
    modules = [setting.build() for _ in range(setting.num_ranks)]

    def work(rank: int) -> Record:
        return train_rank(setting, modules[rank], network.transport(rank))

    # Threads share Python's generators: another rank may draw while one records.
    with mock.patch("lightning_tspipe.networks.recording.other_random_state", int):
        return merge(run_on_threads(work, setting.num_ranks, seconds=100))


def train_on_gloo(settings: list[Setting]) -> list[Record]:
    """One rank's part of several trainings, one after the other."""
    limit = timedelta(seconds=60)
    rank, num_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=limit)
    records = []
    for setting in settings:
        transport = GlooTransport(torch.device("cpu"), limit)
        records.append(train_rank(setting, setting.build(), transport))
    dist.destroy_process_group()
    return records


def train_rank(setting: Setting, module: Trained, transport: Transport) -> Record:
    """One rank's part of a training; only what this rank holds is recorded."""
    networks = Networks(module.student_names, module.teacher_names)
    compiler = Compiler({"backend": setting.backend}) if setting.backend else None
    here = Rank(module, networks, transport, DEVICE, compiler=compiler)
    epochs = setting.epochs(module)
    captured = here.capture(partial(_step, module, 0), on_device(epochs[0][0]))
    placement = make_placement(setting, module, captured)
    engine = PipelineEngine(here, captured, placement, setting.schedule)
    if setting.predict:
        engine.predict_teacher()
    optimizer = setting.make_optimizer(module)
    own = _own_parameters(engine)
    record, count = Record(), 0
    for batches in epochs:
        engine.drain()
        for index in range(len(batches)):
            loss = _forward(engine, setting, module, batches, index)
            if count % setting.accumulate == 0:
                optimizer.zero_grad()
            engine.backward(None if loss is None else (loss / setting.accumulate).backward)
            if loss is not None:
                record.losses.append(on_host(loss.detach().clone()))
            record.gradients.append(on_host(gradients_of(own)))
            count += 1
            if count % setting.accumulate == 0:
                optimizer.step()
                module.after_step()
    state = engine.shards.state_dict(engine.rank, transport)
    record.weights = {name: value.clone() for name, value in state.items()}
    record.optimizer = on_host(state_of(optimizer, own))
    return record


def _step(module: Trained, index: int, batch: Any) -> Any:
    return module.training_step(batch, index)


def _forward(
    engine: PipelineEngine, setting: Setting, module: Trained, batches: list[Any], index: int
) -> Any:
    """The loss on the loss rank; only the data rank gets to see the batches."""
    batch, ahead = None, []
    if engine.is_data_rank:
        batch = on_device(batches[index])
        later = range(index + 1, min(index + 1 + engine.lookahead, len(batches)))
        ahead = [(on_device(batches[i]), partial(_step, module, i)) for i in later]
    result = engine.forward(partial(_step, module, index), batch, ahead)
    return None if result is None else loss_of(result)


def _own_parameters(engine: PipelineEngine) -> dict[str, nn.Parameter]:
    """What this rank holds; everything else that is pipelined must be off this rank."""
    own = {}
    for name, parameter in engine.module.named_parameters():
        is_own = engine.shards.owner(name) == engine.rank
        assert parameter.is_meta != engine.shards.holds(name, engine.rank)
        if is_own:
            own[name] = parameter
    return own


def make_placement(setting: Setting, module: Trained, captured: Captured) -> Placement:
    """Stages of about equally many atoms; an EMA pair shares a rank."""
    cuts = even_cuts(len(captured.networks["student"].atoms), setting.num_stages)
    ranks = default_ranks(setting.num_stages, setting.num_ranks)
    teacher_cuts: tuple[int, ...] = ()
    teacher_ranks: tuple[int, ...] = ()
    if "teacher" in captured.networks:
        num_atoms = len(captured.networks["teacher"].atoms)
        if module.unpaired:
            # Cut on its own, and not even into as many stages.
            num_stages = max(1, setting.num_stages - 1)
            teacher_cuts = even_cuts(num_atoms, num_stages)
            teacher_ranks = default_ranks(num_stages, setting.num_ranks)
        else:
            teacher_cuts = (*(cut for cut in cuts if cut < num_atoms), num_atoms)
            teacher_ranks = ranks[: len(teacher_cuts) - 1]
    split = frozenset(range(setting.num_stages)) if setting.split else frozenset()
    return Placement(
        setting.num_ranks, cuts, ranks, teacher_cuts, teacher_ranks,
        setting.num_microbatches, split, atoms_again(setting, cuts[-1]),
    )  # fmt: skip


def atoms_again(setting: Setting, num_atoms: int) -> frozenset[int]:
    """All atoms, or two of three, so that stages begin with either kind."""
    if not setting.again:
        return frozenset()
    return frozenset(atom for atom in range(num_atoms) if setting.again == "all" or atom % 3)


def even_cuts(num_atoms: int, num_stages: int) -> tuple[int, ...]:
    """Stages of about equally many atoms."""
    assert num_atoms >= num_stages, "the model is too small to test so many stages"
    return tuple(round(stage * num_atoms / num_stages) for stage in range(num_stages + 1))


def merge(records: list[Record]) -> Record:
    """What all ranks hold together; the loss rank comes first."""
    whole = records[0]
    for other in records[1:]:
        assert not other.losses, "only the loss rank computes the loss"
        for mine, theirs in zip(whole.gradients, other.gradients, strict=True):
            assert not mine.keys() & theirs.keys(), "a parameter has two owners"
            mine.update(theirs)
        whole.optimizer.update(other.optimizer)
    return whole
