"""Pipeline parallelism for teacher/student models in PyTorch Lightning.

Importing the package registers the strategies ``tspipe``, ``tspipe_gpipe``, ``tspipe_sequential``,
``tspipe_pipeoptim``, ``tspipe_pipedream``, ``tspipe_2bw`` and ``tspipe_spectrain``.
"""

from __future__ import annotations

from lightning_tspipe import callbacks, errors, evaluation, heads, language
from lightning_tspipe.callbacks import *  # noqa: F403 - the public names of each are in its __all__
from lightning_tspipe.errors import *  # noqa: F403
from lightning_tspipe.evaluation import *  # noqa: F403
from lightning_tspipe.heads import *  # noqa: F403
from lightning_tspipe.language import *  # noqa: F403
from lightning_tspipe.runtime.weights.prediction import PredictsUpdate
from lightning_tspipe.strategy.lightning.namespaces import installed_namespaces
from lightning_tspipe.strategy.strategy import TSPipeStrategy

__all__ = ["PredictsUpdate", "TSPipeStrategy"]
__all__ += callbacks.__all__
__all__ += errors.__all__
__all__ += evaluation.__all__
__all__ += heads.__all__
__all__ += language.__all__

for _namespace in installed_namespaces():
    _registry = _namespace.strategies.StrategyRegistry
    if "tspipe" not in _registry:
        TSPipeStrategy.register_strategies(_registry)
