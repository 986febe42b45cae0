"""Pipeline parallelism for teacher/student models in PyTorch Lightning.

Importing the package registers the strategies ``tspipe``, ``tspipe_gpipe``, ``tspipe_sequential``,
``tspipe_pipeoptim``, ``tspipe_pipedream``, ``tspipe_2bw`` and ``tspipe_spectrain``.
"""

from __future__ import annotations

from lightning_tspipe.callbacks import (
    AutoCache,
    BlockwiseDistillation,
    BlockwiseRelay,
    DelayedTeacherUpdate,
    FreezeAndRepack,
    GradientNormFreeze,
    HeadCheckpoint,
    HeadEarlyStopping,
    KNNEvaluator,
    MomentumEMA,
    OnlineLinearProbe,
    PipelineThroughputMonitor,
    PipelineTimeline,
    ScheduledFreeze,
    WeightPrediction,
)
from lightning_tspipe.errors import (
    CaptureError,
    CheckpointError,
    ConfigurationError,
    PartitionError,
    ScheduleError,
    TransportError,
    TSPipeError,
)
from lightning_tspipe.evaluation import knn_evaluation, linear_evaluation
from lightning_tspipe.heads import FanoutTraining, HeadOptimizers, StudentFanout
from lightning_tspipe.runtime.weights.prediction import PredictsUpdate
from lightning_tspipe.strategy.lightning.namespaces import installed_namespaces
from lightning_tspipe.strategy.strategy import TSPipeStrategy

__all__ = [
    "AutoCache",
    "BlockwiseDistillation",
    "BlockwiseRelay",
    "CaptureError",
    "CheckpointError",
    "ConfigurationError",
    "DelayedTeacherUpdate",
    "FanoutTraining",
    "FreezeAndRepack",
    "GradientNormFreeze",
    "HeadCheckpoint",
    "HeadEarlyStopping",
    "HeadOptimizers",
    "KNNEvaluator",
    "MomentumEMA",
    "OnlineLinearProbe",
    "PartitionError",
    "PipelineThroughputMonitor",
    "PipelineTimeline",
    "PredictsUpdate",
    "ScheduleError",
    "ScheduledFreeze",
    "StudentFanout",
    "TSPipeError",
    "TSPipeStrategy",
    "TransportError",
    "WeightPrediction",
    "knn_evaluation",
    "linear_evaluation",
]

for _namespace in installed_namespaces():
    _registry = _namespace.strategies.StrategyRegistry
    if "tspipe" not in _registry:
        TSPipeStrategy.register_strategies(_registry)
