"""The peer: ``torch.distributed.pipelining``'s GPipe with a teacher pass written by hand.

Two ranks, one stage each. Its loss is per micro-batch, so the loss rank closes over the teacher's
outputs of the whole batch: every loss here is a mean over rows, and comes out exactly.

    rank 0   T T T T  F F F F ........ B B B B
    rank 1    . T T T T  F F F F B B B B
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from lightly.models.utils import update_momentum
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional
from torch.optim import Optimizer
from torchvision.models import ResNet, VisionTransformer
from typing_extensions import override

from benchmarks.crews.gate import Batch, GatedLoader
from benchmarks.crews.job import Job
from benchmarks.throughput.memory import count_at_step
from benchmarks.throughput.workloads import (
    WORKLOADS,
    byol_loss,
    contrastive_loss,
    distillation_loss,
)


class Targets(NamedTuple):
    """What the losses of one batch compare with: teacher outputs of all rows, and labels."""

    teacher: Tensor
    labels: Tensor


RowLoss = Callable[[Tensor, Tensor, Targets], Tensor]
"""The loss of (student outputs of some rows, those rows, what there is to compare with)."""


class PatchEmbedding(nn.Module):
    """A ViT up to its first layer: ``(batch, 3, 64, 64)`` to ``(batch, tokens, width)``."""

    def __init__(self, network: VisionTransformer) -> None:
        super().__init__()
        self.conv_proj = network.conv_proj
        self.class_token = network.class_token
        self.pos_embedding = network.encoder.pos_embedding

    @override
    def forward(self, images: Tensor) -> Tensor:
        patches = self.conv_proj(images).flatten(2).transpose(1, 2)
        class_tokens = self.class_token.expand(len(images), -1, -1)
        tokens: Tensor = torch.cat([class_tokens, patches], dim=1) + self.pos_embedding
        return tokens


class Contiguous(nn.Module):
    """What is sent must be contiguous; what an attention layer returns isn't."""

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.contiguous()


class ClassToken(nn.Module):
    """A ViT after its last layer: ``(batch, tokens, width)`` to the head's output."""

    def __init__(self, network: VisionTransformer) -> None:
        super().__init__()
        self.ln, self.heads = network.encoder.ln, network.heads

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.heads(self.ln(tokens)[:, 0])
        return logits


def halves(network: nn.Module) -> tuple[nn.Sequential, nn.Sequential]:
    """A network by hand in two: the backbone cut at its middle, the heads in the second half.

    By measured cost: a ResNet-18 at 64 px is halved before ``layer3``, a ViT after half its layers.
    """
    if isinstance(network, nn.Sequential):
        backbone, *heads = network.children()
        first, second = halves(backbone)
        return first, second.extend(heads)
    if isinstance(network, ResNet):
        stem = [network.conv1, network.bn1, network.relu, network.maxpool]
        first = nn.Sequential(*stem, network.layer1, network.layer2)
        second = nn.Sequential(network.layer3, network.layer4, network.avgpool, nn.Flatten())
        return first, second.append(network.fc)
    if isinstance(network, VisionTransformer):
        layers = list(network.encoder.layers)
        middle = len(layers) // 2
        first = nn.Sequential(PatchEmbedding(network), *layers[:middle], Contiguous())
        return first, nn.Sequential(*layers[middle:], ClassToken(network))
    raise TypeError(f"no cut is written down for a {type(network).__name__}")


def _byol(outputs: Tensor, rows: Tensor, targets: Targets) -> Tensor:
    num_rows = len(targets.teacher)
    other_view = (rows + num_rows // 2) % num_rows
    return byol_loss(outputs, targets.teacher[other_view])


def _moco(outputs: Tensor, rows: Tensor, targets: Targets) -> Tensor:
    # A micro-batch lies within one view; its keys are all rows of the other one.
    batch_size = len(targets.teacher) // 2
    keys0, keys1 = targets.teacher.chunk(2)
    keys = keys1 if int(rows[0]) < batch_size else keys0
    return 2 * contrastive_loss(outputs, keys, rows % batch_size)  # the views' losses add up


def _kd(outputs: Tensor, rows: Tensor, targets: Targets) -> Tensor:
    return distillation_loss(outputs, targets.teacher[rows], targets.labels[rows])


LOSSES: dict[str, RowLoss] = {"byol": _byol, "moco": _moco, "kd": _kd}


TEACHER_TAG = 1
"""Keeps the teacher's messages apart from the schedule's own."""


def train_torch_gpipe(job: Job, module: LightningModule, loader: GatedLoader) -> None:
    """Train as one rank of two, with ``job.num_microbatches`` micro-batches per view."""
    dist.init_process_group("gloo", rank=job.rank, world_size=job.num_ranks)
    student = halves(module.get_submodule("student"))[job.rank]
    teacher_halves = halves(module.get_submodule("teacher"))
    teacher = teacher_halves[job.rank]
    optimizer = _optimizer_of(module, student)
    mine = nn.ModuleList([student, teacher])
    count_at_step(mine, lambda held: setattr(loader.gate, "held", held))
    num_views = WORKLOADS[job.workload].num_views
    step: Callable[[Batch], None]
    if job.rank == 0:
        step = _First(job, student, teacher, num_views)
    else:
        with torch.no_grad():
            boundary = teacher_halves[0](torch.cat(loader.batches[0][:num_views]))
        step = _Second(job, student, teacher, boundary)
    del module, teacher_halves  # the other half's weights are the other rank's
    for batch in loader:
        if job.workload != "kd":
            update_momentum(student[: len(teacher)], teacher, m=0.99)  # all but the predictor
        optimizer.zero_grad()
        step(batch)
        optimizer.step()


class _First:
    """A step of the rank with the images."""

    def __init__(self, job: Job, student: nn.Module, teacher: nn.Module, num_views: int) -> None:
        self.teacher, self.num_views = teacher, num_views
        self.num_units = num_views * job.num_microbatches
        stage = PipelineStage(student, job.rank, job.num_ranks, torch.device("cpu"))
        # Never called here; without it this rank's schedule would have no backward.
        self.schedule = ScheduleGPipe(stage, self.num_units, loss_fn=functional.mse_loss)

    def __call__(self, batch: Batch) -> None:
        images = torch.cat(batch[: self.num_views])
        sends = [self._send_teacher(chunk) for chunk in images.chunk(self.num_units)]
        self.schedule.step(images)
        for work, _ in sends:
            work.wait()

    @torch.no_grad()
    def _send_teacher(self, chunk: Tensor) -> tuple[dist.Work, Tensor]:
        output = self.teacher(chunk)
        work = dist.isend(output, dst=1, tag=TEACHER_TAG)
        assert work is not None
        return work, output  # a message is lost when its tensor goes


class _Second:
    """A step of the rank with the losses."""

    def __init__(self, job: Job, student: nn.Module, teacher: nn.Module, boundary: Tensor) -> None:
        self.teacher = teacher
        self.rows = torch.arange(len(boundary))
        num_units = len(boundary) // job.batch_size * job.num_microbatches
        self.buffers = [torch.empty(part.shape) for part in boundary.chunk(num_units)]
        self.loss = LOSSES[job.workload]
        self.targets = Targets(torch.empty(0), torch.empty(0))
        stage = PipelineStage(student, job.rank, job.num_ranks, torch.device("cpu"))
        self.schedule = ScheduleGPipe(stage, num_units, loss_fn=self._loss)

    def __call__(self, batch: Batch) -> None:
        self.targets = Targets(self._receive_teacher(), labels=batch[-1])
        self.schedule.step(target=self.rows, losses=[])

    def _loss(self, outputs: Tensor, rows: Tensor) -> Tensor:
        return self.loss(outputs, rows, self.targets)

    @torch.no_grad()
    def _receive_teacher(self) -> Tensor:
        works = [dist.irecv(buffer, src=0, tag=TEACHER_TAG) for buffer in self.buffers]
        outputs: list[Tensor] = []
        for work, buffer in zip(works, self.buffers, strict=True):
            assert work is not None
            work.wait()
            outputs.append(self.teacher(buffer))
        return torch.cat(outputs)


def _optimizer_of(module: LightningModule, part: nn.Module) -> Optimizer:
    """The module's optimizer, for one rank's part of the parameters."""
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, Optimizer)
    owned = set(part.parameters())
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in owned]
    return optimizer
