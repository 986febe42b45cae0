from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.networks.program import Atom
from lightning_tspipe.runtime.stages.batchnorm import DeferredStatistics
from lightning_tspipe.runtime.stages.stage import Execution
from tests.unit.networks.cutting import cut


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU()) for _ in range(4))
    return nn.Sequential(*blocks, nn.Dropout(0.5))


def atoms_of(module: nn.Module) -> tuple[Atom, ...]:
    return cut(module, torch.zeros(2, 8)).atoms


def execution(module: nn.Module, again: Collection[int] | None = None) -> Execution:
    program = cut(module, torch.zeros(2, 8))
    again = range(len(program.atoms)) if again is None else again
    return Execution(program.run, {"net": module}, DeferredStatistics([module]), again)


def kept_bytes(module: nn.Module, again: Collection[int] | None) -> int:
    """What the graph holds between forward and backward, beside parameters."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(64, 8, requires_grad=True)
    run, stop = execution(module, again), len(atoms_of(module))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run.run((x,), 0, stop)
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    return sum(size for address, size in kept.items() if address not in own)


def test_only_what_came_in_is_kept() -> None:
    module = network()
    received = 64 * 8 * 4
    assert kept_bytes(module, again=()) > 8 * received
    assert kept_bytes(module, again=None) == received
    half = range(len(atoms_of(module)) // 2)
    assert received < kept_bytes(module, again=half) < kept_bytes(module, again=())


@pytest.mark.parametrize("again", [None, (0, 1), (1, 3, 4)])
def test_gradients_statistics_and_random_numbers_are_those_of_one_run(
    again: Collection[int] | None,
) -> None:
    results = []
    for module, chosen in ((network(), ()), (network(), again)):
        torch.manual_seed(1)
        run = execution(module, chosen)
        for _ in range(2):
            x = torch.randn(6, 8)
            (y,), _ = run.run((x,), 0, len(atoms_of(module)))
            y.square().sum().backward()
        results.append([*(p.grad for p in module.parameters()), *module.buffers(), torch.rand(1)])
    for expected, actual in zip(*results, strict=True):
        assert expected is not None
        assert actual is not None
        assert torch.equal(expected, actual)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x * self.weight


def test_what_counts_its_runs_is_refused() -> None:
    module = nn.Sequential(nn.Linear(8, 8), Counter())
    with pytest.raises(ConfigurationError, match=r"net\.1 \(Counter\) changes its buffer 'count'"):
        execution(module).run((torch.randn(2, 8),), 0, 2)
    execution(module, again=(0,)).run((torch.randn(2, 8),), 0, 2)
