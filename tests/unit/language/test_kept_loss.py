"""The loss by a teacher's most likely words: of whole logits, summed to k + 1 events."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from lightning_tspipe import ConfigurationError, DistillationLoss
from lightning_tspipe.language.targets import Targets, log_probs_key, to_bits
from tests.unit.language.test_distillation import WORDS, most_bytes, networks, same, whole

KINDS = ("forward_kl", "reverse_kl", "jsd")
CHUNKS = (1, 6, 1000, (6, 4), (3, 1), (15, 1000))


def batch_of(targets: Targets) -> dict[str, Tensor]:
    """As a dataset gives it."""
    settings = targets.settings
    key = log_probs_key(settings["temperature"], settings["vocabulary"])
    return {"words": targets.parts["words"], key: to_bits(targets.parts["log_probs"])}


def kept(loss: DistillationLoss, guide: Tensor, head: nn.Linear, k: int) -> dict[str, Tensor]:
    return batch_of(loss.targets(torch.zeros(guide.shape[:-1]), guide, head, k))


def events(logits: Tensor, words: Tensor) -> Tensor:
    """Log probabilities of some words, and of all others together."""
    logs = logits.log_softmax(-1)
    is_one = torch.zeros_like(logs, dtype=torch.bool).scatter(-1, words, value=True)
    others = logs.masked_fill(is_one, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logs.gather(-1, words), others], -1)


def summed(loss: DistillationLoss, k: int, student: Tensor, teacher: Tensor, labels: Tensor) -> Any:
    """The formula on whole logits: loss, divergence, cross entropy."""
    words = teacher.topk(k).indices
    both = (events(x / loss.temperature, words) for x in (student, teacher))
    warm = DistillationLoss(1.0, kind=loss.kind)
    own, guide = both
    divergence = whole(warm, own, guide, labels.clamp(max=0))[1]
    entropy = F.cross_entropy(student.flatten(0, 1), labels.flatten())
    made = loss.alpha * loss.temperature**2 * divergence + (1 - loss.alpha) * entropy
    return made, divergence, entropy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("k", [1, 3, WORDS - 1])
@pytest.mark.parametrize("temperature", [1.0, 2.5, 0.7])
def test_it_is_that_of_whole_logits_in_k_and_one_events(
    kind: Any, chunk_size: Any, k: int, temperature: float
) -> None:
    loss = DistillationLoss(temperature, {0.7: 1.0}.get(temperature, 0.6), chunk_size, kind=kind)
    hidden, head, guide, guide_head, labels = networks(bias=temperature > 1)
    leaves = [hidden, *head.parameters()]
    expected = summed(loss, k, head(hidden), guide_head(guide), labels)
    wanted = torch.autograd.grad(3 * expected[0], leaves)
    found = loss.kept(hidden, head, kept(loss, guide, guide_head, k), labels)
    same(found[:3], expected)
    same(torch.autograd.grad(3 * found.loss, leaves), wanted)
    assert found.teacher_cross_entropy.isnan()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_with_all_words_it_is_the_whole_divergence(kind: Any, chunk_size: Any) -> None:
    loss = DistillationLoss(2.5, 0.9, chunk_size, kind=kind)
    hidden, head, guide, guide_head, labels = networks(bias=True)
    leaves = [hidden, *head.parameters()]
    expected = loss(hidden, head, guide, guide_head, labels)
    found = loss.kept(hidden, head, kept(loss, guide, guide_head, WORDS), labels)
    same(found[:3], expected[:3])
    same(*(torch.autograd.grad(each.loss, leaves) for each in (found, expected)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [2, WORDS])
def test_logits_that_are_far_apart(kind: Any, k: int) -> None:
    loss = DistillationLoss(1.0, 1.0, 4, kind=kind)
    hidden, head, guide, guide_head, labels = networks(bias=False)
    scaled = (hidden.detach() * 200).requires_grad_()
    expected = summed(loss, k, head(scaled), guide_head(guide * 200), labels)[0]
    if k == WORDS:  # where an empty event has a log of -inf
        expected = whole(loss, head(scaled), guide_head(guide * 200), labels)[0]
    found = loss.kept(scaled, head, kept(loss, guide * 200, guide_head, k), labels).loss
    assert found > 40 or kind == "jsd"
    same([found], [expected])
    gradients = (torch.autograd.grad(x, [scaled])[0] for x in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_logs_are_a_distribution(dtype: torch.dtype) -> None:
    """A student that is the teacher is hardly told off, and never praised."""
    loss = DistillationLoss(2.0, 1.0, kind="reverse_kl")
    _, _, guide, head, labels = networks(bias=False, dtype=torch.float32)
    made = loss.targets(labels, guide, head, 4)
    rounded = made.parts["log_probs"].to(dtype).float()
    targets = made._replace(parts={**made.parts, "log_probs": rounded})
    found = loss.kept(guide, head, batch_of(targets), labels)
    assert 0 < found.divergence < 1e-3


def test_half_precision_and_no_labels() -> None:
    hidden, head, guide, guide_head, labels = networks(bias=True, dtype=torch.bfloat16)
    loss = DistillationLoss(2.0, 0.5, 4)
    targets = kept(loss, guide, guide_head, 3)
    found = loss.kept(hidden, head, targets, labels).loss
    expected = summed(loss, 3, head(hidden).float(), guide_head(guide).float(), labels)[0]
    torch.testing.assert_close(found, expected)
    assert loss.kept(hidden, head, targets, torch.full_like(labels, -100)).loss == 0


def test_no_precision_of_a_trainer_rounds_them() -> None:
    guide, head = networks(bias=True, dtype=torch.float32)[2:4]
    targets = kept(DistillationLoss(), guide, head, 3)
    found = HalfPrecision("bf16-true").convert_input(targets)
    assert found.keys() == targets.keys()
    assert all(torch.equal(found[key], targets[key]) for key in targets)
    assert HalfPrecision("bf16-true").convert_input(guide).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_size", [64, (128, 2000)])
def test_no_more_than_two_chunks_are_in_memory(kind: Any, chunk_size: Any) -> None:
    words, tokens, k = 20_000, 300, 8
    hidden, guide = torch.randn(1, tokens, 2, requires_grad=True), torch.randn(1, tokens, 2)
    head, guide_head = nn.Linear(2, words), nn.Linear(2, words)
    labels = torch.randint(words, (1, tokens))
    loss = DistillationLoss(2.0, 0.5, chunk_size, kind=kind)
    few, part = chunk_size if isinstance(chunk_size, tuple) else (chunk_size, words)
    gradients, logits = 4 * 3 * words, 4 * tokens * words
    rest = 2 * gradients + 100 * tokens * k  # and what is kept, and made of it
    made: list[Any] = []

    def keep() -> Tensor:
        made.append(kept(loss, guide, guide_head, k))
        return hidden.sum()

    assert most_bytes(keep) <= 2 * 4 * few * part + rest < logits
    most = most_bytes(lambda: loss.kept(hidden, head, made[0], labels).loss)
    assert most <= 2 * 4 * few * part + rest


def test_what_does_not_fit_is_refused() -> None:
    hidden, head, guide, guide_head, labels = networks(bias=False)
    loss = DistillationLoss(2.0)
    targets = kept(loss, guide, guide_head, 3)
    with pytest.raises(ConfigurationError, match=r"at temperature 2\.0.*need.*temperature 1\.0"):
        DistillationLoss(1.0).kept(hidden, head, targets, labels)
    with pytest.raises(ConfigurationError, match=f"of {WORDS} words.*need.*of {WORDS + 1} words"):
        loss.kept(hidden, nn.Linear(4, WORDS + 1), targets, labels)
    with pytest.raises(ConfigurationError, match="hidden states go where the teacher's"):
        loss.kept(hidden, head, guide, labels)
    with pytest.raises(ConfigurationError, match="leave out the same tokens"):
        loss.kept(hidden[:, 1:], head, targets, labels[:, 1:])
    for k, number in itertools.product((0, WORDS + 1), [WORDS]):
        with pytest.raises(ConfigurationError, match=f"from 1 to the {number} words"):
            loss.targets(labels, guide, guide_head, k)
    with pytest.raises(ConfigurationError, match=r"need \(samples, tokens\)"):
        loss.targets(labels[0], guide[0], guide_head)
