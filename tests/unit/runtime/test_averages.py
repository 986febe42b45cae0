from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from lightning_tspipe.capture.trace import Networks
from lightning_tspipe.errors import PartitionError
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.profiling.steps import profile_step
from lightning_tspipe.runtime.execution.engine import Rank
from lightning_tspipe.runtime.transport.base import Alone
from lightning_tspipe.runtime.weights.ownership import Shards, followed_tensors

CPU = torch.device("cpu")


class Module(nn.Module):
    """A trained network, an average of it, and another one that is built differently."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.average = deepcopy(self.student)
        self.other = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def training_step(self, x: Tensor) -> Tensor:
        return self.student(x).sum()  # type: ignore[no-any-return]


def test_tensors_follow_those_of_their_name_and_shape() -> None:
    module = Module()
    found = followed_tensors(module, Networks(("student",), ("average",)))
    assert len(found) == len(module.average.state_dict())
    assert found["average.1.running_mean"] == "student.1.running_mean"
    part = Networks(("student",), ("average.2",), averages={"average.2": "student.2"})
    assert followed_tensors(module, part) == {
        "average.2.weight": "student.2.weight", "average.2.bias": "student.2.bias"
    }  # fmt: skip


def test_an_average_lies_with_the_student_and_is_not_trained() -> None:
    module, transport = Module(), Alone()
    here = Rank(module, Networks(("student",), ("average",)), transport, CPU)
    captured = here.capture(module.training_step, torch.randn(4, 3))
    shards = Shards(module, captured, Placement(2, (0, 1, 3), (1, 0)))
    owners = {"average.0.weight": 1, "average.1.running_mean": 0, "average.2.bias": 0}
    assert {name: shards.owner(name) for name in owners} == owners
    trained = {p for rank in (0, 1) for part in shards.by_stage(rank).values() for p in part}
    # Each parameter of it would take a gradient; what is left is what the loss rank could read.
    assert trained == {*module.student.parameters(), *module.other.parameters()}


def test_what_the_step_changes_must_follow_something() -> None:
    module, networks = Module(), Networks(("student",), ("other",))
    assert "other.0.weight" not in followed_tensors(module, networks)
    with pytest.raises(PartitionError, match=r"other\.0\.weight has no counterpart"):
        followed_tensors(module, networks, needs_all=True)
    with pytest.raises(PartitionError, match=r"average\.0\.weight has no counterpart"):
        followed_tensors(module, Networks((), ("average",)), needs_all=True)


def test_the_planner_counts_the_bytes_of_an_average() -> None:
    held = []
    for teacher in ((), ("average",)):
        module, transport = Module(), Alone()
        here = Rank(module, Networks(("student",), teacher), transport, CPU)
        captured = here.capture(module.training_step, torch.randn(4, 3))
        profile = profile_step(captured, CPU, [], (1,)).student
        held.append([atom.parameter_bytes for atom in profile.atoms])
        assert [atom.trainable_bytes for atom in profile.atoms] == [64, 32, 40]
    assert held[0] == [64, 72, 40]
    assert held[1] == [2 * number for number in held[0]]
