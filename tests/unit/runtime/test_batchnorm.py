from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_tspipe.runtime.stages.batchnorm import DeferredStatistics

LAYERS = [
    (nn.BatchNorm1d, (7, 3)),
    (nn.BatchNorm2d, (7, 3, 2, 2)),
    (nn.BatchNorm3d, (7, 3, 2, 1, 2)),
]


def run_call(network: nn.Module, statistics: DeferredStatistics, x: Tensor, parts: int) -> None:
    for micro_batch in x.tensor_split(parts):
        with statistics.accumulate():
            network(micro_batch)
    statistics.commit()


@pytest.mark.parametrize(("kind", "shape"), LAYERS)
@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_running_statistics_are_those_of_the_whole_batch(
    kind: type[nn.BatchNorm1d], shape: tuple[int, ...], momentum: float | None, parts: int
) -> None:
    torch.manual_seed(0)
    layer = kind(3, momentum=momentum, dtype=torch.float64)
    reference = copy.deepcopy(layer)
    statistics = DeferredStatistics([nn.Sequential(layer)])
    for _ in range(3):
        x = torch.randn(shape, dtype=torch.float64) * 3 + 5
        reference(x)
        run_call(layer, statistics, x, parts)
    assert_buffers_close(layer, reference)


def assert_buffers_close(layer: nn.Module, reference: nn.Module) -> None:
    for mine, theirs in zip(layer.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)


def test_outputs_and_gradients_are_those_of_the_micro_batch() -> None:
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(3)
    reference = copy.deepcopy(layer)
    statistics = DeferredStatistics([layer])
    x = torch.randn(4, 3)
    with statistics.accumulate():
        output = layer(x)
    assert torch.equal(output, reference(x))
    output.square().sum().backward()
    reference(x).square().sum().backward()
    assert torch.equal(layer.weight.grad, reference.weight.grad)  # type: ignore[arg-type]


def test_nothing_moves_before_the_commit_or_after_a_discard() -> None:
    layer = nn.BatchNorm1d(3)
    before = copy.deepcopy(layer.state_dict())
    statistics = DeferredStatistics([layer])
    with statistics.accumulate():
        layer(torch.randn(4, 3))
    statistics.discard()
    statistics.commit()
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_the_layer_is_itself_again_outside() -> None:
    layer = nn.BatchNorm1d(3)
    attributes = vars(layer).copy()
    statistics = DeferredStatistics([layer])
    with pytest.raises(ValueError, match="Expected more than 1 value"), statistics.accumulate():
        layer(torch.randn(1, 3))
    assert vars(layer) == attributes
    layer(torch.randn(4, 3))
    assert layer.num_batches_tracked == 1


def test_layers_that_track_nothing_or_are_frozen_behave_as_always() -> None:
    free = nn.BatchNorm1d(3, track_running_stats=False)
    frozen = nn.BatchNorm1d(3).eval()
    before = copy.deepcopy(frozen.state_dict())
    network = nn.Sequential(free, frozen)
    statistics = DeferredStatistics([network])
    x = torch.randn(4, 3)
    expected = network(x)
    with statistics.accumulate():
        assert torch.equal(network(x), expected)
    statistics.commit()
    assert all(torch.equal(value, before[name]) for name, value in frozen.state_dict().items())


class Activated(nn.BatchNorm1d):
    """Does more than normalise in its forward, as some model libraries do."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of the base class
        return super().forward(input).relu()


def test_a_subclass_keeps_its_forward() -> None:
    torch.manual_seed(0)
    layer = Activated(3, dtype=torch.float64)
    reference = copy.deepcopy(layer)
    x = torch.randn(6, 3, dtype=torch.float64)
    statistics = DeferredStatistics([layer])
    with statistics.accumulate():
        assert torch.equal(layer(x), reference(x))
    statistics.commit()
    assert_buffers_close(layer, reference)


def test_a_layer_called_twice_in_a_network_is_updated_twice() -> None:
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(3, dtype=torch.float64)
    statistics = DeferredStatistics([layer])
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    with statistics.accumulate():
        layer(x)
        layer(y)
    statistics.commit()
    reference = nn.BatchNorm1d(3, dtype=torch.float64)
    reference(x)
    reference(y)
    assert_buffers_close(layer, reference)


def test_two_networks_at_once() -> None:
    student, teacher = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    first, second = DeferredStatistics([student]), DeferredStatistics([teacher])
    with first.accumulate(), second.accumulate():
        student(torch.randn(4, 3))
        teacher(torch.randn(4, 3))
    first.commit()
    assert (int(student.num_batches_tracked), int(teacher.num_batches_tracked)) == (1, 0)  # type: ignore[arg-type]


def test_a_layer_that_runs_twice_is_updated_twice() -> None:
    x = torch.randn(8, 3, dtype=torch.float64)
    layer, expected = (nn.BatchNorm1d(3, dtype=torch.float64) for _ in range(2))
    statistics = DeferredStatistics([layer])
    for part in x.chunk(2):
        with statistics.accumulate():
            layer(part)
            layer(2 * part + 1)
    statistics.commit()
    expected(x)
    expected(2 * x + 1)
    torch.testing.assert_close(layer.state_dict(), expected.state_dict())
