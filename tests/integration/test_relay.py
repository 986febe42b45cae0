"""Blockwise relaying by a real Trainer: every mode gives what one device gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.jobs import run
from tests.integration.relayed import Relay, Relayed, reference, train_all

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def check(relay: Relay, found: list[Relayed]) -> None:
    """Weights of all ranks together, and the losses that rank 0 logged."""
    weights, means = reference(relay)
    together = {k: v for rank in reversed(found) for k, v in rank.weights.items()}
    assert together.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(together[name], value, **CLOSE, msg=name)
    for rank in found:
        for block, mean in enumerate(means[-1]):
            assert rank.metrics[f"train_loss/block_{block}"] == pytest.approx(mean, rel=1e-9)
        assert rank.metrics["train_loss"] == pytest.approx(sum(means[-1]), rel=1e-9)


def test_modes_on_two_ranks(tmp_path: Path) -> None:
    relays = [
        Relay(options={"mode": "dpu"}),
        Relay(options={"mode": "tr"}, module={"labelled": True}),
        Relay(options={"mode": "ir"}, module={"labelled": True}),
        Relay(options={"mode": "dp"}),
        Relay(options={"mode": "ls"}),
        Relay(module={"optimizer": "per block", "as_list": True}),
    ]
    found = list(zip(*run(train_all, relays, folder=tmp_path, num_ranks=2), strict=True))
    for relay, ranks in zip(relays, found, strict=True):
        check(relay, ranks)
