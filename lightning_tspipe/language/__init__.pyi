from .distillation import DistillationLoss as DistillationLoss
from .distillation import DistillationOutput as DistillationOutput
from .kept import KeptTargets as KeptTargets
from .kept import WithTargets as WithTargets
from .perplexity import Perplexity as Perplexity
from .pretrained import load_pretrained as load_pretrained
from .pretrained import pretrained as pretrained
from .targets import Targets as Targets
