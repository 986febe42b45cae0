"""Perplexity over batches of different numbers of tokens."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from lightning_tspipe import Perplexity


def test_all_tokens_count_alike() -> None:
    perplexity = Perplexity()
    own = perplexity(torch.tensor(3.0), torch.tensor(1))
    assert own.item() == pytest.approx(math.exp(3.0))
    perplexity.update(torch.tensor(1.0), torch.tensor(7))
    assert perplexity.compute().item() == pytest.approx(math.exp((3 + 7) / 8))
    perplexity.reset()
    perplexity.update(torch.tensor(2.0), 5)
    assert perplexity.compute().item() == pytest.approx(math.exp(2.0))


def test_a_batch_without_tokens() -> None:
    perplexity = Perplexity()
    perplexity.update(torch.tensor(math.nan), 0)  # as torch's cross entropy of no labels
    assert perplexity.compute().isnan()
    perplexity.update(torch.tensor(1.0), 2)
    assert perplexity.compute().item() == pytest.approx(math.e)


def test_a_loss_that_is_not_a_number_is_seen() -> None:
    perplexity = Perplexity()
    perplexity.update(torch.tensor(1.0), 2)
    perplexity.update(torch.tensor(math.nan), 2)
    assert perplexity.compute().isnan()


def test_it_goes_on() -> None:
    first = Perplexity()
    first.persistent(mode=True)
    first.update(torch.tensor(3.0), 1)
    second = pickle.loads(pickle.dumps(Perplexity()))  # noqa: S301 - our own
    second.load_state_dict(first.state_dict(), strict=False)
    second.persistent(mode=True)
    second.load_state_dict(first.state_dict())
    second.update(torch.tensor(1.0), 7)
    assert second.compute().item() == pytest.approx(math.exp(10 / 8))


def test_sums_are_not_in_half_precision() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        perplexity = Perplexity()
    finally:
        torch.set_default_dtype(before)
    for _ in range(1000):
        perplexity.update(torch.tensor(1.0, dtype=torch.bfloat16), 1)
    assert perplexity.compute().item() == pytest.approx(math.e)
