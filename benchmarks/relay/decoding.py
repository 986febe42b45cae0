"""What one core of this machine decodes and augments: photographs, and CIFAR's small pictures."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision.transforms import v2

NUM_WORKERS = 16
"""Loader processes, four for each device, of which each has a core."""
_SECONDS = 1.0


def measured_rates() -> dict[str, float]:
    """Images per second of so many such cores, for each dataset.

    A photograph of ImageNet's usual size is a JPEG file that is decoded, cropped and resized; a
    picture of CIFAR is an array that is cropped. Both are flipped and normalised.
    """
    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    large = [_encoded(image.resize((500, 375))) for image in photographs]
    small = photographs[0].resize((32, 32))
    from_file, from_array = _transform(v2.RandomResizedCrop(224)), _transform(v2.RandomCrop(32, 4))

    def decode() -> None:
        for data in large:
            from_file(Image.open(io.BytesIO(data)).convert("RGB"))

    return {
        "cifar": NUM_WORKERS * _rate(lambda: from_array(small)),
        "imagenet": NUM_WORKERS * len(large) * _rate(decode),
    }


def _encoded(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def _transform(crop: v2.Transform) -> v2.Transform:
    steps = [
        crop,
        v2.RandomHorizontalFlip(),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize((0.5,) * 3, (0.5,) * 3),
    ]
    return v2.Compose(steps)


def _rate(run: Callable[[], Any]) -> float:
    run()
    number, started = 0, time.perf_counter()
    while time.perf_counter() - started < _SECONDS:
        run()
        number += 1
    return number / (time.perf_counter() - started)
