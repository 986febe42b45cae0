"""Ranks of a run, and where it goes on, without a process beside this one."""

from __future__ import annotations

from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_tspipe import TSPipeStrategy
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.strategy.lightning.namespaces import installed_namespaces, namespace_of
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup.options import SetupOptions
from lightning_tspipe.strategy.setup.resumption import Resumption


class OnRank(Run):
    """A strategy, as far as its ranks go."""

    def model_to_device(self) -> None:
        """Nothing is trained."""


def run_of(rank: int, num_stages: int | None, *, processes: int = 4, nodes: int = 1) -> Run:
    run = OnRank(
        SetupOptions(),
        num_stages,
        timedelta(seconds=1),
        parallel_devices=[torch.device("cpu")] * processes,
        cluster_environment=SimpleNamespace(global_rank=lambda: rank),
    )
    run.num_nodes = nodes
    return run


def test_ranks_count_pipeline_by_pipeline() -> None:
    places = [(run.replica, run.pipeline_rank) for run in (run_of(rank, 2) for rank in range(4))]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_all_devices_are_one_pipeline_unless_the_user_says_otherwise() -> None:
    for nodes, stages, expected in ((1, None, (4, 1)), (2, None, (8, 1)), (2, 4, (4, 2))):
        run = run_of(0, stages, nodes=nodes)
        assert (run.num_ranks, run.num_replicas) == expected


def test_the_first_rank_has_the_loss_and_the_last_one_reads() -> None:
    runs = [run_of(rank, 2) for rank in range(4)]
    assert [run.is_loss_rank for run in runs] == [True, False, True, False]
    assert [run.is_data_rank for run in runs] == [False, True, False, True]
    assert [run.is_global_zero for run in runs] == [True, False, False, False]


@pytest.mark.parametrize("number", [0, -1, 1.5, "2"])
def test_no_number_of_stages(number: Any) -> None:
    with pytest.raises(ConfigurationError, match="the number of devices of each pipeline"):
        run_of(0, number)


def test_alone_there_is_nobody_to_ask() -> None:
    run = run_of(0, None, processes=1)
    run.barrier("anywhere")
    assert run.broadcast("mine", 3) == "mine"
    assert run.reduce_boolean_decision(True)
    assert not run.reduce_boolean_decision(False, all=False)


def test_after_a_failure_of_workers_nobody_is_waited_for() -> None:
    run = run_of(0, None)
    assert not run.is_failing
    run.have_workers_failed = True
    assert run.is_failing


def test_a_run_goes_on_once() -> None:
    resumption = Resumption()
    replicas = [{"step": 3, "gradients": {}}, {"step": 3, "gradients": {}, "second": True}]
    resumption.go_on(replicas, 1, 2, shares_batches=False)
    assert resumption.here == replicas[1]
    assert resumption.take() == replicas[1]
    assert (resumption.take(), resumption.replicas) == (None, None)


def test_on_another_mesh_replicas_share_what_was_accumulated() -> None:
    resumption = Resumption()
    parts = [torch.tensor([2.0]), torch.tensor([4.0])]
    replicas = [{"step": 3, "loader": None, "gradients": {"w": part}} for part in parts]
    resumption.go_on(replicas, 0, 1, shares_batches=False)
    assert resumption.here is not None
    assert resumption.here["gradients"]["w"].tolist() == [3.0]  # the mean: an update takes that
    assert resumption.here["flights"] is None


@pytest.mark.parametrize("shares_batches", [True, False])
def test_on_another_mesh_only_shared_batches_keep_their_order(shares_batches: bool) -> None:
    """Their replicas read parts of what all read; others deal the samples out anew."""
    loader = {"num_batches": 2, "start": "as it was drawn", "loader": "a state of one replica"}
    ahead = {"loader": loader, "teacher_ahead": {"call": 1}, "prediction": {"step": 3}}
    resumption = Resumption()
    resumption.go_on(
        [{"step": 3, "gradients": {}, **ahead}] * 2, 2, 3, shares_batches=shares_batches
    )
    assert resumption.here is not None
    assert resumption.here["step"] == 3
    found = {name: resumption.here[name] for name in ahead}
    shared = {**ahead, "loader": {**loader, "loader": None}}
    assert found == (shared if shares_batches else dict.fromkeys(ahead))


def test_a_module_path_tells_the_namespace() -> None:
    for each in installed_namespaces():
        assert namespace_of(f"{each.name}.accelerators.cpu") is each
    assert namespace_of("somewhere.else") is installed_namespaces()[0]


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_a_strategy_travels_to_its_workers(start_method: Any) -> None:
    strategy = TSPipeStrategy(start_method=start_method)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False
    )
    assert ForkingPickler.dumps(trainer)
