from .auto_cache import AutoCache as AutoCache
from .auto_resume import AutoResume as AutoResume
from .blockwise import (
    BlockwiseDistillation as BlockwiseDistillation,
)
from .blockwise import (
    BlockwiseRelay as BlockwiseRelay,
)
from .delayed_teacher import (
    DelayedTeacherUpdate as DelayedTeacherUpdate,
)
from .delayed_teacher import (
    WeightPrediction as WeightPrediction,
)
from .freeze_and_repack import FreezeAndRepack as FreezeAndRepack
from .freezing import GradientNormFreeze as GradientNormFreeze
from .freezing import ScheduledFreeze as ScheduledFreeze
from .heads import HeadCheckpoint as HeadCheckpoint
from .heads import HeadEarlyStopping as HeadEarlyStopping
from .momentum_ema import MomentumEMA as MomentumEMA
from .quality import KNNEvaluator as KNNEvaluator
from .quality import OnlineLinearProbe as OnlineLinearProbe
from .report import RunReport as RunReport
from .target_writer import TargetWriter as TargetWriter
from .throughput import PipelineThroughputMonitor as PipelineThroughputMonitor
from .timeline import PipelineTimeline as PipelineTimeline
