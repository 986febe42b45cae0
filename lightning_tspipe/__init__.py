"""Pipeline parallelism for teacher/student models in PyTorch Lightning.

Importing the package registers the strategies ``tspipe``, ``tspipe_gpipe``, ``tspipe_sequential``,
``tspipe_pipeoptim``, ``tspipe_pipedream``, ``tspipe_2bw`` and ``tspipe_spectrain``.
"""

import lazy_loader

from lightning_tspipe import callbacks, errors, heads, language  # noqa: F401 - as attributes
from lightning_tspipe.strategy.lightning.registration import register_all

# What is used is imported when it is used: names, and where they are, stand in __init__.pyi.
__getattr__, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = [name for name in _names if name != "evaluation"]  # an attribute, as the other modules

register_all()
