"""Several heads on one frozen trunk: fan-out transfer learning."""

from __future__ import annotations

from lightning_tspipe.heads.student import StudentFanout
from lightning_tspipe.heads.training import FanoutTraining, HeadOptimizers

__all__ = ["FanoutTraining", "HeadOptimizers", "StudentFanout"]
