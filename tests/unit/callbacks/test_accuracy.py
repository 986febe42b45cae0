"""Accuracies by torchmetrics are what one would count, also of divided samples."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_tspipe.callbacks import accuracy
from lightning_tspipe.callbacks.accuracy import Accuracies


def samples(num_classes: int, number: int = 40) -> tuple[Tensor, Tensor]:
    """Scores without ties, and labels of which some are of no class."""
    generator = torch.Generator().manual_seed(num_classes)
    scores = torch.randn(number, num_classes, generator=generator)
    return scores, torch.randint(-1, num_classes + 2, (number,), generator=generator)


def counted(scores: Tensor, labels: Tensor) -> list[float]:
    hits = scores.argsort(dim=1, descending=True)[:, :5] == labels[:, None]
    return [int(hits[:, :number].sum()) / len(labels) for number in (1, 5)]


@pytest.mark.parametrize("num_classes", [1, 2, 5, 9])
def test_they_are_as_counted(num_classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "_SCORES_AT_ONCE", 25)  # samples come in parts
    scores, labels = samples(num_classes)
    found = Accuracies(num_classes)
    for part in zip(scores.split(15), labels.split(15), strict=True):
        found.update(*part)
    result = found.compute("knn")
    assert list(result) == ["knn_top1", "knn_top5"]
    assert list(result.values()) == pytest.approx(counted(scores, labels))


def test_classes_that_nobody_voted_for_come_in_their_order() -> None:
    found = Accuracies(9)
    found.update(torch.zeros(9, 9), torch.arange(9))
    result = found.compute("x")
    assert list(result.values()) == pytest.approx([1 / 9, 5 / 9])


def test_right_at_first_is_not_right_for_ever() -> None:
    """Both accuracies are equal after the first samples."""
    found = Accuracies(9)
    found.update(torch.eye(9), torch.arange(9))
    found.update(torch.eye(9), torch.arange(9).roll(1))
    assert found.compute("x")["x_top1"] == pytest.approx(0.5)


def test_members_of_a_group_count_together() -> None:
    """One of them got no samples."""
    scores, labels = samples(9)
    members: list[Any] = [[scores[:30], labels[:30]], [scores[30:], labels[30:]], None]
    sent: list[list[Tensor]] = [[], [], []]

    def of(rank: int, gather: Any) -> Accuracies:
        group: Any = SimpleNamespace(size=3, gather=gather)
        found = Accuracies(9, group=group)
        if members[rank] is not None:
            found.update(*members[rank])
        return found

    def keeping(rank: int) -> Callable[[Tensor], list[Tensor]]:
        def gather(value: Tensor) -> list[Tensor]:
            sent[rank].append(value)
            return [value]

        return gather

    for rank in range(3):
        of(rank, keeping(rank)).compute("x")
    assert {len(each) for each in sent} == {len(sent[0])}
    turns = iter(zip(*sent, strict=True))
    result = of(0, lambda _: list(next(turns))).compute("x")
    assert list(result.values()) == pytest.approx(counted(scores, labels))
