"""Everything that a job imports, imported once before jobs are forked."""

from __future__ import annotations

import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.elastic.agent.server.local_elastic_agent
import torch.distributed.elastic.rendezvous.c10d_rendezvous_backend
import torch.distributed.launcher.api
import torch.fx
import torch.optim._multi_tensor

from tests.faults.lab import running, striking, training
from tests.integration import preloaded

__all__ = ["preloaded", "running", "striking", "torch", "training"]
