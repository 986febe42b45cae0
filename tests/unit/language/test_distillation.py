from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from lightning_tspipe import ConfigurationError, DistillationLoss

IGNORED = -100
WORDS = 11


def whole(
    loss: DistillationLoss, student: Tensor, teacher: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The formula, by torch's own functions: loss, divergence, cross entropy."""
    keep = labels != loss.ignore_index
    student, teacher = student[keep], teacher[keep]
    own, guide = (F.log_softmax(x / loss.temperature, -1) for x in (student, teacher))

    def divergence(p: Tensor, q: Tensor) -> Tensor:
        return F.kl_div(q, p, reduction="batchmean", log_target=True)

    middle = torch.logaddexp(own, guide) - math.log(2)
    found = {
        "forward_kl": divergence(guide, own),
        "reverse_kl": divergence(own, guide),
        "jsd": (divergence(guide, middle) + divergence(own, middle)) / 2,
    }[loss.kind]
    entropy = F.cross_entropy(student, labels[keep])
    made = loss.alpha * loss.temperature**2 * found + (1 - loss.alpha) * entropy
    return made, found, entropy


def networks(*, bias: bool, dtype: torch.dtype = torch.float64, words: int = WORDS) -> Any:
    torch.manual_seed(0)
    heads = nn.Linear(4, words, bias, dtype=dtype), nn.Linear(6, words, bias, dtype=dtype)
    for head in heads:
        nn.init.normal_(head.weight)  # far from uniform
    hidden = torch.randn(3, 5, 4, dtype=dtype, requires_grad=True)
    guide = torch.randn(3, 5, 6, dtype=dtype)
    labels = torch.randint(words, (3, 5))
    labels[0, 2] = labels[2] = IGNORED
    return hidden, heads[0], guide, heads[1], labels


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("chunk_size", [1, 6, 1000, (6, 4), (3, 1), (1000, 11), (15, 1000)])
@pytest.mark.parametrize(
    ("temperature", "alpha", "bias"), [(1.0, 0.5, False), (2.5, 0.9, True), (0.7, 1.0, False)]
)
def test_it_is_that_of_whole_logits(
    kind: Any, chunk_size: Any, temperature: float, alpha: float, bias: bool
) -> None:
    loss = DistillationLoss(temperature, alpha, chunk_size, kind=kind)
    hidden, head, guide, guide_head, labels = networks(bias=bias)
    leaves = [hidden, *head.parameters()]
    expected, divergence, entropy = whole(loss, head(hidden), guide_head(guide), labels)
    wanted = torch.autograd.grad(3 * expected, leaves)
    found = loss(hidden, head, guide, guide_head, labels)
    guides = whole(loss, guide_head(guide), guide_head(guide), labels)[2]
    same(found, (expected, divergence, entropy, guides, (labels != IGNORED).sum()))
    same(torch.autograd.grad(3 * found.loss, leaves), wanted)
    assert not any(part.requires_grad for part in found[1:])


def same(found: Any, expected: Any) -> None:
    for a, b in itertools.zip_longest(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_alpha_0_is_cross_entropy() -> None:
    hidden, head, guide, guide_head, labels = networks(bias=True)
    found = DistillationLoss(alpha=0)(hidden, head, guide, guide_head, labels)
    expected = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten())
    same([found.loss], [expected])


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_logits_that_are_far_apart(kind: Any) -> None:
    """Where probabilities vanish, nothing is lost."""
    loss = DistillationLoss(1.0, 1.0, 4, kind=kind)
    hidden, head, guide, guide_head, labels = networks(bias=False)
    scaled = (hidden.detach() * 500).requires_grad_()
    expected = whole(loss, head(scaled), guide_head(guide * 500), labels)[0]
    found = loss(scaled, head, guide * 500, guide_head, labels).loss
    assert found > 100 or kind == "jsd"
    same([found], [expected])
    gradients = (torch.autograd.grad(x, [scaled])[0] for x in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)  # of numbers near 1e4


def test_no_token_counts() -> None:
    hidden, head, guide, guide_head, labels = networks(bias=False)
    found = DistillationLoss()(hidden, head, guide, guide_head, torch.full_like(labels, IGNORED))
    assert found.loss == found.num_tokens == 0
    (gradient,) = torch.autograd.grad(found.loss, [hidden])
    assert not gradient.any()


def test_half_precision_is_that_of_logits_in_half_precision() -> None:
    hidden, head, guide, guide_head, labels = networks(bias=False, dtype=torch.bfloat16)
    loss = DistillationLoss(2.0, 0.5, 4)
    logits = head(hidden).float(), guide_head(guide).float()
    expected = whole(loss, *logits, labels)[0]
    found = loss(hidden, head, guide, guide_head, labels).loss
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    made, wanted = (torch.autograd.grad(x, [hidden, head.weight]) for x in (found, expected))
    for a, b in zip(made, wanted, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.float(), b.float(), rtol=0.05, atol=0.01)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_autocast(kind: Any) -> None:
    hidden, head, guide, guide_head, labels = networks(bias=True, dtype=torch.float32)
    loss = DistillationLoss(2.0, 0.5, 4, kind=kind)
    with torch.autocast("cpu", torch.bfloat16):
        expected = whole(loss, head(hidden).float(), guide_head(guide).float(), labels)[0]
        found = loss(hidden, head, guide, guide_head, labels).loss
    torch.testing.assert_close(found, expected)
    made, wanted = (torch.autograd.grad(x, [hidden, head.weight]) for x in (found, expected))
    for a, b in zip(made, wanted, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.01)


def most_bytes(made: Callable[[], Tensor]) -> int:
    """The most memory that making a loss, and its backward, hold at once beside what there was."""
    with torch.profiler.profile(profile_memory=True) as profile:
        made().backward()
    events = profile.profiler.kineto_results.events()
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(size for _, size in memory))


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("chunk_size", [64, (128, 2000), 1])
def test_no_more_than_two_chunks_are_in_memory(kind: Any, chunk_size: Any) -> None:
    words, tokens = 20_000, 300
    hidden, guide = torch.randn(tokens, 2, requires_grad=True), torch.randn(tokens, 2)
    head, guide_head = nn.Linear(2, words), nn.Linear(2, words)
    labels = torch.randint(words, (tokens,))
    loss = DistillationLoss(2.0, 0.5, chunk_size, kind=kind)
    few, part = chunk_size if isinstance(chunk_size, tuple) else (chunk_size, words)
    gradients = 4 * 3 * words  # of the weight and the bias
    rest = 2 * gradients + 100_000  # while they are multiplied by what comes back
    most = most_bytes(lambda: loss(hidden, head, guide, guide_head, labels).loss)
    assert most <= 2 * 4 * few * part + rest < 4 * tokens * words
    logits = most_bytes(lambda: whole(loss, head(hidden), guide_head(guide), labels)[0])
    assert logits > 4 * 4 * tokens * words  # what is measured is seen


@pytest.mark.parametrize(
    "arguments", [{"temperature": 0}, {"alpha": 1.5}, {"chunk_size": 0}, {"kind": "kl"}]
)
def test_bad_arguments(arguments: Any) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(arguments))):
        DistillationLoss(**arguments)


def test_other_vocabularies_and_lengths() -> None:
    hidden, head, guide, guide_head, labels = networks(bias=False)
    loss = DistillationLoss()
    with pytest.raises(ConfigurationError, match="same tokenizer"):
        loss(hidden, head, guide, nn.Linear(6, WORDS + 1), labels)
    with pytest.raises(ConfigurationError, match="last token"):
        loss(hidden, head, guide, guide_head, labels[:, 1:])
    with pytest.raises(ConfigurationError, match="hidden states of the teacher"):
        loss(hidden, head, hidden, guide_head, labels)
