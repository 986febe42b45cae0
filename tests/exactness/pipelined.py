"""The pipelined side: an engine per rank, ranks as threads of this process."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_tspipe.capture.trace import Networks
from lightning_tspipe.planning.placement import Placement, default_ranks
from lightning_tspipe.runtime.engine import Engine
from lightning_tspipe.runtime.transport import LocalNetwork, LocalTransport
from tests.exactness.reference import Record


def even_cuts(num_atoms: int, num_stages: int) -> tuple[int, ...]:
    """Stages of about equally many atoms."""
    return tuple(round(stage * num_atoms / num_stages) for stage in range(num_stages + 1))


def run_pipelined(  # noqa: PLR0913, PLR0917 - a whole training
    module: nn.Module,
    student: Sequence[str],
    teacher: Sequence[str],
    epochs: Sequence[Sequence[Any]],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    num_ranks: int,
    num_microbatches: int,
    schedule: str = "tspipe",
    split: bool = False,
    num_stages: int | None = None,
    accumulate: int = 1,
    after_step: Callable[[nn.Module], None] | None = None,
) -> Record:
    """Train copies of ``module`` on ``num_ranks`` threads, as one pipeline."""
    network = LocalNetwork(num_ranks, timeout=30)
    records = [Record() for _ in range(num_ranks)]
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            _train(rank, records[rank])
        except BaseException as error:  # noqa: BLE001 - reported by the caller
            failures.append(error)

    def _train(rank: int, record: Record) -> None:
        mine = modules[rank]
        engine = Engine(
            mine, Networks(tuple(student), tuple(teacher)), LocalTransport(network, rank),
            torch.device("cpu"),
        )  # fmt: skip
        first = epochs[0][0]
        captured = engine.capture(partial(_step, mine, 0), first)
        stages = num_stages or num_ranks
        cuts = even_cuts(len(captured.networks["student"].atoms), stages)
        placement = Placement(
            num_ranks,
            cuts,
            default_ranks(stages, num_ranks),
            num_microbatches=num_microbatches,
            split=frozenset(range(stages)) if split else frozenset(),
        )
        if "teacher" in captured.networks:
            # An EMA pair shares a rank: the teacher is cut where the student is.
            atoms = len(captured.networks["teacher"].atoms)
            kept = [s for s in range(stages) if cuts[s] < atoms]
            placement = Placement(
                num_ranks, cuts, placement.student_ranks,
                (*[cuts[s] for s in kept], atoms),
                tuple(placement.student_ranks[s] for s in kept),
                num_microbatches, placement.split,
            )  # fmt: skip
        engine.place(captured, placement, schedule, None)
        optimizer = make_optimizer(mine)
        parameters = dict(mine.named_parameters())
        count = 0
        for batches in epochs:
            engine.drain()
            for index, batch in enumerate(batches):
                following = index + 1 < len(batches) and schedule == "tspipe"
                ahead = (batches[index + 1], partial(_step, mine, index + 1)) if following else None
                loss = engine.forward(partial(_step, mine, index), batch, ahead)
                if count % accumulate == 0:
                    optimizer.zero_grad()
                engine.backward(None if loss is None else (loss / accumulate).backward)
                if loss is not None:
                    record.losses.append(loss.detach().clone())
                record.gradients.append(
                    {
                        k: p.grad.clone()
                        for k, p in parameters.items()
                        if p.grad is not None and engine.shards.owner(k) == rank
                    }
                )
                count += 1
                if count % accumulate == 0:
                    optimizer.step()
                    if after_step is not None:
                        after_step(mine)
        state = engine.shards.state_dict(rank, engine.transport)
        record.weights = {k: v.clone() for k, v in state.items()}
        names = {id(p): k for k, p in parameters.items()}
        record.optimizer = {
            names[id(p)]: dict(s)
            for p, s in optimizer.state.items()
            if engine.shards.owner(names[id(p)]) == rank
        }

    modules = [copy.deepcopy(module) for _ in range(num_ranks)]
    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a rank did not end"
    merged = records[0]
    for other in records[1:]:
        for mine, theirs in zip(merged.gradients, other.gradients, strict=True):
            mine.update(theirs)
        merged.optimizer.update(other.optimizer)
    return merged


def _step(module: nn.Module, index: int, batch: Any) -> Any:
    return module.training_step(batch, index)  # type: ignore[operator]
