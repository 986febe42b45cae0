from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_tspipe.runtime.stages.batchnorm import DeferredStatistics
from lightning_tspipe.runtime.stages.compiling import Compiler
from tests.unit.networks.cutting import cut

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 4)
    )


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: Any, _inputs: Any) -> Callable[..., Any]:
        self.num_graphs += 1
        return graph.forward  # type: ignore[no-any-return]


def train(
    module: nn.Module, compiler: Compiler | None, statistics: DeferredStatistics | None
) -> list[Tensor]:
    chain = cut(module, torch.randn(4, 3, 5, 5))
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        for part in torch.randn(4, 3, 5, 5).chunk(2):
            values: Any = (part,)
            if statistics is None:
                values, _ = chain.run(values, 0, len(chain.atoms), compiler)
            else:
                with statistics.accumulate():
                    values, _ = chain.run(values, 0, len(chain.atoms), compiler)
            loss = values[0].square().sum()
            loss.backward()
            losses.append(loss.detach())
        if statistics is not None:
            statistics.commit()
    return [*losses, *(p.grad for p in module.parameters()), *module.buffers()]  # type: ignore[list-item]


@pytest.mark.parametrize("deferred", [False, True])
def test_compiled_ranges_compute_the_same_bits(deferred: bool) -> None:
    torch._dynamo.reset()
    plain, compiled = network(), network()
    backend = Counting()
    expected = train(plain, None, DeferredStatistics([plain]) if deferred else None)
    statistics = DeferredStatistics([compiled]) if deferred else None
    actual = train(compiled, Compiler({"backend": backend}), statistics)
    assert backend.num_graphs > 0
    assert all(map(torch.equal, actual, expected))


def broken(_graph: Any, _inputs: Any) -> Any:
    raise FileNotFoundError("no g++ here")


def test_without_a_compiler_stages_run_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    module = network()
    expected = train(copy.deepcopy(module), None, None)
    with caplog.at_level(logging.WARNING, logger="lightning_tspipe"):
        actual = train(module, Compiler({"backend": broken}), None)
    assert all(map(torch.equal, actual, expected))
    ours = [record.message for record in caplog.records if record.name == "lightning_tspipe"]
    assert len(ours) == 1
    assert "no g++ here" in ours[0]


def test_errors_of_the_network_are_its_own() -> None:
    torch._dynamo.reset()
    chain = cut(network(), torch.randn(4, 3, 5, 5))
    with pytest.raises(Exception, match="channels"):
        chain.run((torch.randn(2, 5, 5, 5),), 0, 5, Compiler({"backend": "eager"}))
