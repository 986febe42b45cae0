"""Replicas of a pipeline train what one device trains on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_tspipe import ConfigurationError, TSPipeStrategy
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.simulation.timeline import Timeline
from lightning_tspipe.strategy.setup.refusals import refuse_divided
from tests.exactness.modules import make_epochs
from tests.integration.by_hand import (
    ByHand,
    adversarial,
    body_and_tail,
    network_and_probe,
    sample_by_sample,
    train_scaled,
    without_lightning,
)
from tests.integration.jobs import run, run_job
from tests.integration.replicas import (
    TrainedShare,
    tap_delayed,
    train_observed,
    train_on_loaders,
    train_share,
    train_unequal,
    train_unequal_unsized,
    validate,
    with_all_gather,
    with_dino_loss,
    with_gathering,
    with_rare_parameters,
)
from tests.integration.test_by_hand import SCALED
from tests.integration.test_trainer import save_plan
from tests.integration.trainings import CLOSE, Session, Training, build_module, delayed, train

EVEN = ((4, 4, 2, 4, 4, 2), (4, 4, 2, 4, 4, 2))
TWO_BY_TWO: dict[str, Any] = {"num_stages": 2, "num_microbatches": 2}
WINDOWS: dict[str, Any] = {"num_stages": 2, "schedule": "1f1b", "weights": "synchronous"}
INTERLEAVED: dict[str, Any] = {"num_stages": 2, "schedule": "interleaved"}
ZBV: dict[str, Any] = {"num_stages": 2, "schedule": "zbv"}
DIVIDED: dict[str, Any] = {**TWO_BY_TWO, "zero_stage": 1}
SPLIT = Training("Tap-group-False", "instance", TWO_BY_TWO, num_ranks=4, sizes=EVEN)


def alone(function: Callable[..., Any], training: Training, folder: Path) -> TrainedShare:
    single = replace(training, strategy="auto", num_ranks=1, options={})
    trained: TrainedShare = run(function, single, num_ranks=1, folder=folder)[0]
    return trained


def together(function: Callable[..., Any], training: Training, folder: Path) -> list[TrainedShare]:
    return run(function, training, num_ranks=training.num_ranks, folder=folder)


def loss_ranks(training: Training, ranks: list[TrainedShare]) -> list[TrainedShare]:
    return ranks[:: training.options["num_stages"]]


def assert_same(expected: TrainedShare, training: Training, ranks: list[TrainedShare]) -> None:
    """Losses are those of the whole batch on average, weights on every replica the same."""
    replicas = loss_ranks(training, ranks)
    losses = torch.stack([torch.stack(replica.losses) for replica in replicas]).mean(0)
    assert len(set(losses.tolist())) > 1
    torch.testing.assert_close(list(losses), expected.losses, **CLOSE)
    for replica in replicas:
        torch.testing.assert_close(replica.weights, expected.weights, **CLOSE)
    assert {rank.global_step for rank in ranks} == {expected.global_step}
    assert {rank.world_size for rank in ranks} == {len(replicas)}


@pytest.mark.parametrize(
    ("case", "options", "num_ranks", "trainer"),
    [
        ("Tap-group-False", TWO_BY_TWO, 4, {"accumulate_grad_batches": 2,
                                            "gradient_clip_val": 0.05}),
        ("Distillation-group", {**TWO_BY_TWO, "schedule": "gpipe"}, 4, {"gradient_clip_val": 0.05}),
        ("Tied", TWO_BY_TWO, 4, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
        ("SimSiam-group", {"num_stages": 1}, 2, {"accumulate_grad_batches": 4}),
        ("Tied", DIVIDED, 4, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
        pytest.param("Tap-group-True", {**DIVIDED, "num_stages": 1}, 3, {},
                     marks=pytest.mark.slow),
        pytest.param("Tied", {**INTERLEAVED, "zero_stage": 1}, 4, {"accumulate_grad_batches": 3},
                     marks=pytest.mark.slow),
        pytest.param("FedByFrozen", TWO_BY_TWO, 4, {}, marks=pytest.mark.slow),
        pytest.param("Tied", WINDOWS, 4, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
                     marks=pytest.mark.slow),
        pytest.param("Distillation-group", WINDOWS, 4, {"accumulate_grad_batches": 3},
                     marks=pytest.mark.slow),
        ("Tied", INTERLEAVED, 4, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}),
        pytest.param("Distillation-group", ZBV, 4, {"accumulate_grad_batches": 3},
                     marks=pytest.mark.slow),
        pytest.param("Tap-group-True", {"num_stages": 3, "num_microbatches": 2}, 6, {},
                     marks=pytest.mark.slow),
        pytest.param("Distillation-group", {**TWO_BY_TWO, "split_backward": True}, 6,
                     {"accumulate_grad_batches": 3}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.parametrize("optimizer", ["adamw"])
def test_replicas_train_what_one_device_trains(  # noqa: PLR0913, PLR0917 - what varies
    case: str,
    options: dict[str, Any],
    num_ranks: int,
    trainer: dict[str, Any],
    optimizer: str,
    tmp_path: Path,
) -> None:
    sizes = EVEN if num_ranks // options["num_stages"] == 2 else ((6, 3, 6, 3), (6, 3, 6, 3))
    callbacks = tap_delayed if case.startswith("Tap") else delayed
    training = replace(
        SPLIT, case=case, options=options, num_ranks=num_ranks, trainer=trainer, sizes=sizes,
        optimizer=optimizer,
        callbacks=list if case.startswith(("Tied", "SimSiam", "Fed")) else callbacks,
    )  # fmt: skip
    if options.get("schedule") in {"gpipe", "1f1b", "interleaved", "zbv"}:
        training = replace(training, callbacks=list)
    if case == "SimSiam-group":
        training = replace(training, world="pytorch_lightning")
    expected = alone(train_share, training, tmp_path)
    ranks = together(train_share, training, tmp_path)
    assert_same(expected, training, ranks)
    torch.testing.assert_close(ranks[0].optimizer["state"], expected.optimizer["state"], **CLOSE)


@pytest.mark.parametrize(
    ("case", "change", "num_replicas"),
    [
        ("Contrastive-group", with_gathering, 2),
        ("Contrastive-group", with_all_gather, 2),
        ("Dino-group", with_dino_loss, 2),
        ("Dino-group", with_dino_loss, 1),
    ],
)
def test_losses_over_all_replicas(
    case: str, change: Callable[[Any], None], num_replicas: int, tmp_path: Path
) -> None:
    training = replace(
        SPLIT, case=case, change=change, num_ranks=2 * num_replicas, sizes=((4, 4, 4), (4, 2, 4)),
        callbacks=delayed if case.startswith("Dino") else list,
    )  # fmt: skip
    expected = alone(train_share, training, tmp_path)
    assert_same(expected, training, together(train_share, training, tmp_path))


@pytest.mark.slow
def test_loaders_metrics_and_decisions(tmp_path: Path) -> None:
    training = replace(SPLIT, case="Classifier-group", trainer={"max_epochs": 2})
    expected = alone(train_on_loaders, training, tmp_path)
    ranks = together(train_on_loaders, training, tmp_path)
    assert_same(expected, training, ranks)
    assert ranks[0].metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        if name != "train_loss":  # logged without sync_dist: rank 0's
            assert ranks[0].metrics[name] == pytest.approx(value, rel=1e-9), name
    assert all(rank.metrics == ranks[0].metrics for rank in ranks)
    assert [rank.notes["part"] for rank in ranks] == [False, (0, 2), False, (1, 2)]
    assert [rank.notes["seen"][0] for rank in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]


class AddsUp(Callback):
    """Each rank tells its number to those of the same stages, and to those of its pipeline."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        mesh = trainer.strategy.device_mesh
        self.found = [mesh.shape, mesh.mesh.tolist(), list(mesh.get_coordinate())]
        for name in ("dp", "pp"):
            number = torch.tensor([10.0**trainer.global_rank])
            dist.all_reduce(number, group=mesh[name].get_group())
            self.found.append(int(number))


def adds_up(training: Training) -> list[Any]:
    callback = AddsUp()
    Session(training, callback).fit()
    return callback.found


def test_a_device_mesh(tmp_path: Path) -> None:
    ranks = run(adds_up, SPLIT, num_ranks=4, folder=tmp_path)
    for rank, found in enumerate(ranks):
        replica, place = divmod(rank, 2)
        assert found == [(2, 2), [[0, 1], [2, 3]], [replica, place], (101, 1010)[place],
                         (11, 1100)[replica]]  # fmt: skip
    with pytest.raises(RuntimeError, match="there is no device mesh"):
        _ = TSPipeStrategy().device_mesh


class Held(Callback):
    """Of each parameter, whether the optimizer keeps something here; and the gradients' sum."""

    def __init__(self) -> None:
        self.found: list[dict[str, bool]] = []
        self.gradients: list[float] = []

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        here = [(n, p) for n, p in pl_module.student.named_parameters() if not p.is_meta]
        self.found.append({name: bool(optimizer.state.get(p)) for name, p in here})
        self.gradients.append(sum(p.grad is not None for _, p in here) / max(1, len(here)))


def held(training: Training) -> list[dict[str, bool]]:
    callback = Held()
    Session(training, callback).fit()
    assert set(callback.gradients[1:]) == {1.0}  # the first comes before the first batch
    return callback.found


def test_what_an_optimizer_keeps_is_held_once(tmp_path: Path) -> None:
    """By one of the replicas, which also updates it; gradients are on all of them."""
    training = replace(SPLIT, case="Distillation-group", options=DIVIDED, optimizer="adamw")
    ranks = run(held, training, num_ranks=4, folder=tmp_path)
    assert all(any(kept for rank in pair for kept in rank[-1].values())
               for pair in (ranks[:2], ranks[2:]))  # fmt: skip
    for ones, others in (ranks[::2], ranks[1::2]):
        assert ones[-1].keys() == others[-1].keys()
        assert all(ones[-1][name] != others[-1][name] for name in ones[-1]), (ones[-1], others[-1])


def test_a_zero_stage_that_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="zero_stage=2: must be 0, or 1"):
        TSPipeStrategy(zero_stage=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="zero_stage=1 with weights='pipeoptim'"):
        TSPipeStrategy(zero_stage=1, schedule="1f1b")
    assert TSPipeStrategy(zero_stage=1, schedule="1f1b", weights="2bw").options.zero_stage == 1


class ScheduleFree(torch.optim.SGD):
    """Has an average that takes the weights' place in evaluations."""

    def eval(self) -> None:
        pass


def test_optimizers_that_use_their_state_outside_of_a_step() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    refuse_divided([torch.optim.AdamW(parameters)])
    with pytest.raises(ConfigurationError, match="zero_stage=1 with ScheduleFree, whose eval"):
        refuse_divided([ScheduleFree(parameters)])


def test_an_evaluation_without_a_fit(tmp_path: Path) -> None:
    training = replace(SPLIT, case="Classifier-group")
    single = replace(training, strategy="auto", num_ranks=1, options={})
    expected = run(validate, single, num_ranks=1, folder=tmp_path)[0]
    for found in run(validate, training, num_ranks=4, folder=tmp_path):
        assert found == [pytest.approx(expected[0], rel=1e-9)]


def test_what_is_measured(tmp_path: Path) -> None:
    training = replace(SPLIT, case="Classifier-group", sizes=((4, 4, 2, 4, 4, 2),))
    ranks = together(train_observed, training, tmp_path)
    # Of the first replica, for all of them: the last batches are smaller.
    assert ranks[0].notes["num_samples"] == 2 * (2 + 2 + 1 + 2 + 2 + 1)
    (batches,) = make_epochs(build_module(training), training.sizes)
    assert ranks[0].notes["num_tokens"] == sum(labels.sum() for _, labels in batches)
    assert ranks[0].notes["tokens_per_second"] > 0
    assert ranks[1].notes == {}
    timeline = Timeline.from_json((tmp_path / "timeline.json").read_text())
    assert timeline.num_ranks == 2
    assert {pause.rank for pause in timeline.pauses if pause.reason == "reduce"} == {0, 1}


def test_a_plan_with_replicas(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    training = replace(SPLIT, case="Classifier-group", options={"plan": str(path)})
    run(save_plan, replace(training, num_ranks=1), str(path), num_ranks=1, folder=tmp_path)
    plan = replace(Plan.from_json(path.read_text()), num_replicas=2)
    path.write_text(plan.to_json())
    ranks = together(train, replace(training, sizes=((4, 4),)), tmp_path)
    assert [len(rank.meta) > 0 for rank in ranks] == [False, True, False, True]
    for name, value in ranks[0].weights.items():
        torch.testing.assert_close(ranks[2].weights[name], value, **CLOSE)


def test_statistics_of_batch_normalisation(tmp_path: Path) -> None:
    training = replace(SPLIT, case="Classifier-batch", options={"num_stages": 1}, num_ranks=2)
    first, second = together(train_share, training, tmp_path)
    names = {name for name in first.weights if "running" in name}
    assert len(names) == 4
    for name, value in first.weights.items():
        same = torch.allclose(value, second.weights[name])
        assert same == (name not in names), name


def test_parameters_that_only_one_replica_uses(tmp_path: Path) -> None:
    training = replace(
        SPLIT, case="Classifier-group", change=with_rare_parameters, sizes=((4, 4, 4),)
    )
    ranks = together(train_share, training, tmp_path)
    first, second = loss_ranks(training, ranks)
    torch.testing.assert_close(first.weights, second.weights, **CLOSE)
    # Weight decay would have changed it.
    torch.testing.assert_close(first.weights["rare.never"], torch.ones(3))
    assert first.weights["rare.sometimes"].tolist() != [1, 1]


def test_loaders_that_end_at_different_times(tmp_path: Path) -> None:
    training = replace(SPLIT, case="Classifier-group", sizes=((2, 2, 2, 2),))
    job = run_job(train_unequal, training, num_ranks=4, folder=tmp_path)
    assert all(rank.exit_code == 1 for rank in job.ranks), job.output
    assert "the replicas have training loaders of [4, 3] batches" in job.output
    ranks = together(train_unequal_unsized, training, tmp_path)
    assert {rank.global_step for rank in ranks} == {3}


def test_devices_that_cannot_be_divided() -> None:
    for wrong in (0, -1, "two", 1.5):
        with pytest.raises(ConfigurationError, match="number of devices of each pipeline"):
            TSPipeStrategy(num_stages=wrong)


def indivisible(training: Training) -> None:
    train_share(training)


def test_a_number_of_devices_that_is_no_multiple(tmp_path: Path) -> None:
    training = replace(SPLIT, options={"num_stages": 3})
    job = run_job(indivisible, training, num_ranks=4, folder=tmp_path)
    assert all(rank.exit_code == 1 for rank in job.ranks)
    assert "num_stages=3: 4 devices cannot be divided into pipelines of 3" in job.output


@pytest.mark.parametrize(
    "options", [TWO_BY_TWO, {**TWO_BY_TWO, "schedule": "gpipe"}, DIVIDED], ids=str
)
def test_optimization_by_hand(options: dict[str, Any], tmp_path: Path) -> None:
    change = ByHand(sample_by_sample, body_and_tail)
    training = replace(SPLIT, case="Byol-group-2-by hand", options=options, change=change)
    if "schedule" not in options:
        training = replace(training, callbacks=delayed)
    expected = alone(train_share, training, tmp_path)
    ranks = together(train_share, training, tmp_path)
    assert_same(expected, training, ranks)
    torch.testing.assert_close(ranks[0].optimizer["state"], expected.optimizer["state"], **CLOSE)


@pytest.mark.slow
def test_divided_state_past_lightning_s_wrapper(tmp_path: Path) -> None:
    training = replace(SPLIT, case="Byol-group-2-by hand", optimizer="adamw",
                       change=ByHand(without_lightning, body_and_tail))  # fmt: skip
    whole = together(train_share, training, tmp_path / "whole")
    divided = together(train_share, replace(training, options=DIVIDED), tmp_path / "divided")
    for one, other in zip(whole, divided, strict=True):
        torch.testing.assert_close(other.weights, one.weights, rtol=0, atol=0)
    torch.testing.assert_close(divided[0].optimizer, whole[0].optimizer, rtol=0, atol=0)


@pytest.mark.slow
def test_divided_state_with_scaled_losses(tmp_path: Path) -> None:
    """All ranks skip a step that overflowed on one, and share nothing then."""
    training = replace(SCALED, options=TWO_BY_TWO, num_ranks=4, sizes=EVEN)
    whole = run(train_scaled, training, num_ranks=4, folder=tmp_path / "whole")
    training = replace(training, options=DIVIDED)
    divided = run(train_scaled, training, num_ranks=4, folder=tmp_path / "divided")
    assert len(set(whole[0].scales)) > 1
    for one, other in zip(whole, divided, strict=True):
        assert other.scales == one.scales
        torch.testing.assert_close(other.trained.weights, one.trained.weights, rtol=0, atol=0)
    torch.testing.assert_close(divided[0].states, whole[0].states, rtol=0, atol=0)
    assert [rank.states for rank in divided[1:]] == [[{}]] * 3  # rank 0 has all of it


def test_gradients_of_a_batch_are_averaged_once(tmp_path: Path) -> None:
    change = ByHand(adversarial, network_and_probe)
    training = replace(SPLIT, case="Byol-group-2-by hand", change=change)
    job = run_job(train_share, training, num_ranks=4, folder=tmp_path, seconds=60)
    assert all(rank.exit_code == 1 for rank in job.ranks), job.output
    assert any("or update one network per batch" in error for error in job.errors), job.errors
