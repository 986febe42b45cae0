from __future__ import annotations

import io
import random

import numpy as np
import torch

from lightning_tspipe.random_states import RandomStates


def draw() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.rand()), random.gauss(0, 1)]  # noqa: NPY002, S311 - the global generators are the subject


def test_the_generators_are_as_they_were() -> None:
    draw()
    states = RandomStates.now()
    expected = draw()
    draw()
    states.restore()
    assert draw() == expected


def test_a_checkpoint_keeps_them() -> None:
    draw()
    file = io.BytesIO()
    torch.save(RandomStates.now().written, file)
    expected = draw()
    file.seek(0)
    RandomStates.read(torch.load(file, weights_only=True)).restore()
    assert draw() == expected
