from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_tspipe.capture.trace import Networks, Tracer
from lightning_tspipe.errors import PartitionError
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.stages.network import networks_of
from lightning_tspipe.runtime.weights.ownership import Shards
from tests.local_transport import LocalNetwork, LocalTransport
from tests.threads import run_on_threads

CPU = torch.device("cpu")
PLACEMENT = Placement(2, (0, 1, 3), (1, 0))


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.classifier = nn.Linear(2, 2)
        self.register_buffer("queue", torch.arange(3.0))

    def training_step(self, x: Tensor) -> Tensor:
        return self.classifier(self.student(x)).sum()  # type: ignore[no-any-return]


def make(rank: int) -> tuple[Module, Shards]:
    torch.manual_seed(0)
    module = Module()
    plan = Tracer(module, Networks(("student",)), CPU).trace(
        module.training_step, torch.randn(4, 3), 0
    )
    network = networks_of(module, plan, CPU)["student"]
    shards = Shards(module, Captured(plan, {"student": network}), PLACEMENT)
    shards.place(rank, CPU)
    return module, shards


def make_all() -> list[tuple[Module, Shards]]:
    """Made one after the other: threads share the random generator."""
    return [make(rank) for rank in range(2)]


def on_ranks(work: Callable[[int, LocalTransport], Any]) -> list[Any]:
    network = LocalNetwork(2, timeout=10)
    return run_on_threads(
        lambda rank: work(rank, LocalTransport(network, rank)), num_ranks=2, seconds=30
    )


def test_each_rank_keeps_its_stage_and_the_skeleton_of_the_rest() -> None:
    whole = Module()
    for rank, own in ((1, {"student.0"}), (0, {"student.1", "student.2"})):
        module, shards = make(rank)
        for name, tensor in module.state_dict(keep_vars=True).items():
            pipelined = name.startswith("student.")
            assert shards.is_divided(name) == pipelined
            here = not pipelined or name.rpartition(".")[0] in own
            assert tensor.is_meta != here, (rank, name)
            assert tensor.shape == whole.state_dict()[name].shape
        assert {p.requires_grad for p in module.parameters()} == {True}


def test_an_optimizer_made_before_keeps_its_parameters() -> None:
    torch.manual_seed(0)
    module = Module()
    parameters = list(module.parameters())
    plan = Tracer(module, Networks(("student",)), CPU).trace(
        module.training_step, torch.randn(4, 3), 0
    )
    network = networks_of(module, plan, CPU)["student"]
    Shards(module, Captured(plan, {"student": network}), PLACEMENT).place(0, CPU)
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))


def test_a_weight_that_was_computed_from_parameters_does_not_hold_them() -> None:
    torch.manual_seed(0)
    module = Module()
    with pytest.warns(FutureWarning):  # as lightly uses it
        module.student[2] = nn.utils.weight_norm(module.student[2])
    plan = Tracer(module, Networks(("student",)), CPU).trace(
        module.training_step, torch.randn(4, 3), 0
    )
    network = networks_of(module, plan, CPU)["student"]
    Shards(module, Captured(plan, {"student": network}), PLACEMENT).place(1, CPU)
    assert module.student[2].weight_v.is_meta


def test_the_whole_state_comes_together_on_the_loss_rank() -> None:
    torch.manual_seed(0)
    expected = dict(Module().state_dict())
    made = make_all()

    def work(rank: int, transport: LocalTransport) -> dict[str, Any]:
        _, shards = made[rank]
        return shards.state_dict(rank, transport)

    state, nothing = on_ranks(work)
    assert nothing == {}
    assert list(state) == list(expected)
    torch.testing.assert_close(state, expected, rtol=0, atol=0)


def test_the_whole_module_comes_back_to_the_loss_rank() -> None:
    torch.manual_seed(0)
    expected = dict(Module().state_dict())
    made = make_all()

    def work(rank: int, transport: LocalTransport) -> tuple[Module, list[nn.Parameter]]:
        module, shards = made[rank]
        before = list(module.parameters())
        shards.restore(rank, transport)
        return module, before

    (module, before), (other, _) = on_ranks(work)
    torch.testing.assert_close(dict(module.state_dict()), expected, rtol=0, atol=0)
    assert all(a is b for a, b in zip(before, module.parameters(), strict=True))
    assert other.student[1].weight.is_meta
    assert not other.student[0].weight.is_meta


def test_the_optimizer_state_of_all_ranks() -> None:
    made = make_all()

    def work(rank: int, transport: LocalTransport) -> tuple[dict[str, Any], list[str]]:
        module, shards = made[rank]
        optimizer = torch.optim.AdamW(module.parameters())
        names = []
        for name, parameter in module.named_parameters():
            if shards.owner(name) == rank:
                parameter.grad = torch.full_like(parameter, len(name))
                names.append(name)
        optimizer.step()
        return shards.optimizer_state(optimizer, transport), names

    (whole, mine), (_, theirs) = on_ranks(work)
    names = [name for name, _ in Module().named_parameters()]
    assert {*mine, *theirs} == set(names)
    assert list(whole["state"]) == list(range(len(names)))
    for index, name in enumerate(names):
        average = whole["state"][index]["exp_avg"]
        torch.testing.assert_close(average, torch.full_like(average, 0.1 * len(name)))
    fresh = torch.optim.AdamW(Module().parameters())
    fresh.load_state_dict(whole)


def test_restored_state_of_other_ranks_is_dropped() -> None:
    whole = Module()
    optimizer = torch.optim.AdamW(whole.parameters())
    whole.training_step(torch.randn(4, 3)).backward()
    optimizer.step()
    module, shards = make(0)
    sharded = torch.optim.AdamW(module.parameters())
    sharded.load_state_dict(optimizer.state_dict())
    shards.forget_optimizer_state(sharded)
    kept = {name for name, p in module.named_parameters() if p in sharded.state}
    assert kept == {name for name, p in module.named_parameters() if not p.is_meta}


def test_what_is_updated_by_stages_stays_in_one() -> None:
    module = Module()
    module.student = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 2))
    module.student[2].weight = module.student[0].weight
    plan = Tracer(module, Networks(("student",)), CPU).trace(
        module.training_step, torch.randn(4, 3), 0
    )
    network = networks_of(module, plan, CPU)["student"]
    assert network.joined(ties=False) == dict.fromkeys((0, 1), "student.0.weight")
    assert network.joined(ties=True) == {}
    network.check_cuts((0, 3, 4), ties=False)
    network.check_cuts((0, 2, 4), ties=True)
    with pytest.raises(PartitionError, match=r"student\.0\.weight.*front of atom 2.*partition="):
        network.check_cuts((0, 2, 4), ties=False)


def test_a_buffer_that_a_forward_changes_stays_in_one_stage() -> None:
    module = Module()
    norm = nn.BatchNorm1d(3, affine=False)
    module.student = nn.Sequential(nn.Linear(3, 3), norm, nn.Linear(3, 3), norm, nn.Linear(3, 2))
    plan = Tracer(module, Networks(("student",)), CPU).trace(
        module.training_step, torch.randn(4, 3), 0
    )
    network = networks_of(module, plan, CPU)["student"]
    network.check_cuts((0, 4, 5), ties=True)
    with pytest.raises(PartitionError, match=r"student\.1\..*front of atom 2.*no buffer"):
        network.check_cuts((0, 2, 5), ties=True)


def test_gradients_come_back_where_they_belong() -> None:
    """Clipped by their norm, those on two ranks would count twice."""
    ranks = make_all()
    for name, parameter in ranks[0][0].named_parameters():
        if name.startswith(("student.1", "student.2", "classifier")):
            parameter.grad = torch.ones_like(parameter)
    found = [shards.gradients(rank) for rank, (_, shards) in enumerate(ranks)]
    assert found[1] == {}
    assert "classifier.weight" in found[0]
    again = make_all()
    for rank, (module, shards) in enumerate(again):
        shards.put_gradients(found[0], rank)
        here = {name for name, p in module.named_parameters() if p.grad is not None}
        assert here == (found[0].keys() if rank == 0 else set())
