from __future__ import annotations

import importlib
import sys

import pytest

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.integrations.nodes import check_nodes


@pytest.mark.parametrize(
    ("nodes", "num_stages"),
    [
        ([0, 0], 2),
        ([0, 0, 0, 0, 1, 1, 1, 1], 4),
        ([0, 0, 0, 0, 1, 1, 1, 1], 2),
        ([0, 0, 1, 1], 4),  # it doesn't fit on one
        ([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], 6),
        ([0, 0, 0, 1, 1, 1], 1),
    ],
)
def test_pipelines_on_as_few_nodes_as_they_can_need_no_word(
    nodes: list[int], num_stages: int
) -> None:
    assert check_nodes(nodes, num_stages) == ""


def test_a_pipeline_that_lies_on_two_nodes_without_need_is_told() -> None:
    told = check_nodes([0] * 4 + [1] * 4 + [2] * 4, 3)
    assert "num_stages=3 with 4 workers on each node: 2 of 4 pipelines lie" in told
    assert "num_stages of 1 or 2 or 4 keeps" in told


@pytest.mark.parametrize(
    ("nodes", "match"),
    [([0, 1, 0, 1], "numbers workers node by node"), ([0, 0, 0, 1], "3 and 1 workers.*SPREAD")],
)
def test_nodes_that_a_pipeline_cant_follow_are_refused(nodes: list[int], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        check_nodes(nodes, 2)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.train", None)
    monkeypatch.delitem(sys.modules, "lightning_tspipe.integrations.ray", raising=False)
    with pytest.raises(ImportError, match=r'pip install "lightning-tspipe\[ray\]"'):
        importlib.import_module("lightning_tspipe.integrations.ray")
