"""Callbacks for ordinary and pipelining strategies, for either copy of Lightning."""

from __future__ import annotations

from lightning_tspipe.callbacks.auto_cache import AutoCache
from lightning_tspipe.callbacks.blockwise import BlockwiseDistillation
from lightning_tspipe.callbacks.blockwise_relay import BlockwiseRelay
from lightning_tspipe.callbacks.delayed_teacher import DelayedTeacherUpdate
from lightning_tspipe.callbacks.freeze_and_repack import FreezeAndRepack
from lightning_tspipe.callbacks.freeze_policies import GradientNormFreeze, ScheduledFreeze
from lightning_tspipe.callbacks.heads import HeadCheckpoint, HeadEarlyStopping
from lightning_tspipe.callbacks.knn import KNNEvaluator
from lightning_tspipe.callbacks.momentum_ema import MomentumEMA
from lightning_tspipe.callbacks.probe import OnlineLinearProbe
from lightning_tspipe.callbacks.throughput import PipelineThroughputMonitor
from lightning_tspipe.callbacks.timeline import PipelineTimeline
from lightning_tspipe.callbacks.weight_prediction import WeightPrediction

__all__ = [
    "AutoCache",
    "BlockwiseDistillation",
    "BlockwiseRelay",
    "DelayedTeacherUpdate",
    "FreezeAndRepack",
    "GradientNormFreeze",
    "HeadCheckpoint",
    "HeadEarlyStopping",
    "KNNEvaluator",
    "MomentumEMA",
    "OnlineLinearProbe",
    "PipelineThroughputMonitor",
    "PipelineTimeline",
    "ScheduledFreeze",
    "WeightPrediction",
]
