"""The meta device stands for a GPU: what goes there is seen to be there, without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import MeanMetric

from lightning_tspipe.capture.trace import Networks, Tracer
from lightning_tspipe.moving import move, put
from tests.exactness.modules import Tap
from tests.exactness.tied import TiedBesideTheLoss

META = torch.device("meta")


class Beside(nn.Module):
    """All kinds of what a step may compute with."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.head = nn.Linear(3, 2), nn.Linear(2, 2)
        self.recurrent, self.mean, self.later = nn.LSTM(2, 2), MeanMetric(), nn.LazyLinear(2)
        self.register_buffer("queue", torch.randn(4, 2))
        self.other = nn.Module()
        self.other.register_buffer("queue", self.queue)


def test_what_is_moved_stays_itself() -> None:
    module = Beside()
    head, weight = module.head.weight, module.network.weight
    optimizer = torch.optim.SGD(module.head.parameters(), lr=0.1)
    move(module, META, lambda name: None if name.startswith("network.") else META)
    assert module.head.weight is head is optimizer.param_groups[0]["params"][0]
    assert head.is_meta
    assert isinstance(head, nn.Parameter)
    assert module.network.weight is weight
    assert not weight.is_meta
    assert module.queue is module.other.queue
    assert module.queue.is_meta
    assert all(own.is_meta for own in module.recurrent.parameters())
    assert module.mean.mean_value.is_meta
    assert isinstance(module.later.weight, nn.UninitializedParameter)


def test_what_the_step_computes_with_moves_to_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tracer, "_present_autocast", lambda _: ("cpu", torch.bfloat16, False))
    module = Tap("group")
    batch = pytree.tree_map_only(Tensor, lambda x: x.to(META), module.batch(4, 0))

    def step(batch: Any) -> Any:
        return module.training_step(batch, 0)

    networks = Networks(module.student_names, module.teacher_names)
    Tracer(module, networks, META).trace(step, batch, 0)
    assert module.classifier.weight.is_meta
    assert not any(parameter.is_meta for parameter in module.backbone.parameters())


def test_what_is_tied_with_a_network_moves_too() -> None:
    """Under its first name it belongs to the network, which stays where it is."""
    module = TiedBesideTheLoss()
    Tracer(module, Networks(("student",)), META)
    assert module.head.weight is module.student.words.weight
    assert module.head.weight.is_meta
    assert not module.student.norm.weight.is_meta


def test_values_are_taken_back_from_what_a_forgotten_graph_refers_to() -> None:
    module = nn.Linear(2, 2, device=META)
    weight = module.weight
    undo = put(module, weight, torch.ones(2, 2))
    cycle: list[Any] = [weight[0] * weight[1]]
    cycle.append(cycle)
    del cycle  # collected when somebody asks for it
    undo()
    assert module.weight is weight
    assert weight.is_meta
