"""A logger that keeps what the others are told, for the report of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

_MOST_POINTS = 2000

Points = dict[str, list[tuple[float, float]]]
"""Steps and values, by metric."""


class MetricHistory(DummyLogger):
    """Keeps the metrics of a run; whatever else a logger is asked for does nothing.

    Of a metric with very many values every second one is dropped again and again, the older the
    more, so that a long run costs no more than a short one.

    Args:
        folder: What Lightning takes for the folder of a logger; nothing is written there.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.points: Points = {}
        self._folder = folder
        self._step = 0.0

    @property
    @override
    def save_dir(self) -> str:
        return self._folder

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self._step = self._step if step is None else float(step)
        for name, value in metrics.items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                continue  # a text or a picture, which users give to all loggers at once
            points = self.points.setdefault(name, [])
            points.append((self._step, number))
            if len(points) > _MOST_POINTS:
                del points[1:-1:2]
