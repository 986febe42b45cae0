"""Callbacks for ordinary and pipelining strategies, for either copy of Lightning."""

from __future__ import annotations

from lightning_tspipe.callbacks.auto_cache import AutoCache
from lightning_tspipe.callbacks.auto_resume import AutoResume
from lightning_tspipe.callbacks.blockwise import BlockwiseDistillation, BlockwiseRelay
from lightning_tspipe.callbacks.delayed_teacher import DelayedTeacherUpdate, WeightPrediction
from lightning_tspipe.callbacks.freeze_and_repack import FreezeAndRepack
from lightning_tspipe.callbacks.freezing import GradientNormFreeze, ScheduledFreeze
from lightning_tspipe.callbacks.heads import HeadCheckpoint, HeadEarlyStopping
from lightning_tspipe.callbacks.momentum_ema import MomentumEMA
from lightning_tspipe.callbacks.quality import KNNEvaluator, OnlineLinearProbe
from lightning_tspipe.callbacks.report import RunReport
from lightning_tspipe.callbacks.target_writer import TargetWriter
from lightning_tspipe.callbacks.throughput import PipelineThroughputMonitor
from lightning_tspipe.callbacks.timeline import PipelineTimeline

__all__ = [
    "AutoCache",
    "AutoResume",
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
    "RunReport",
    "ScheduledFreeze",
    "TargetWriter",
    "WeightPrediction",
]
