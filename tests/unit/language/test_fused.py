from __future__ import annotations

import os
import subprocess
import sys
import warnings
from itertools import product
from typing import Any

import pytest
import torch

from lightning_tspipe import ConfigurationError, DistillationLoss
from tests.unit.language.test_distillation import IGNORED, networks


def compare() -> None:
    """Both kernels, on the same numbers."""
    warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, where a kernel masks its block
    for kind, alpha in product(("forward_kl", "reverse_kl", "jsd"), (0.4, 1.0)):
        hidden, head, guide, teacher, labels = networks(bias=False, dtype=torch.float32)
        found = []
        for kernel in ("torch", "liger"):
            loss = DistillationLoss(2.0, alpha, kind=kind, kernel=kernel)  # type: ignore[arg-type]
            hidden.grad = head.weight.grad = None
            out = loss(hidden, head, guide, teacher, labels)
            (3 * out.loss).backward()
            assert not any(part.requires_grad for part in out[1:])
            found.append([*out, hidden.grad, head.weight.grad])
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
        assert teacher.weight.grad is None
        none = torch.full_like(labels, IGNORED)
        assert DistillationLoss(kernel="liger")(hidden, head, guide, teacher, none).loss == 0
        sys.stdout.write(f"{kind} {alpha}\n")


@pytest.mark.slow
def test_liger_s_kernels_compute_the_same() -> None:
    # On a CPU its kernels run in Triton's interpreter, which has to be chosen before any import.
    found = subprocess.run(  # noqa: S603
        [sys.executable, "-c", f"from {__name__} import compare; compare()"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert len(found.stdout.splitlines()) == 6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "needs a GPU, but hidden states are on cpu"),
        ({"bias": True}, "takes heads without bias"),
        ({"dtype": torch.float64}, "computes in float32 at most"),
    ],
)
def test_what_they_cannot_do_is_refused(wrong: Any, message: str) -> None:
    given = {"bias": False, "dtype": torch.float32} | wrong
    with pytest.raises(ConfigurationError, match=f'{message}.*use kernel="torch"'):
        DistillationLoss(kernel="liger")(*networks(**given))


def test_missing_kernels_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_tspipe.language.fused.find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"pip install .lightning-tspipe\[liger\]"):
        DistillationLoss(kernel="liger")
