"""Steps as lightly's examples write them, unmodified."""

from __future__ import annotations

import copy
from typing import Any

import lightly.loss
import lightly.models.modules as heads
import pytest
import pytorch_lightning
import torch
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils.scheduler import cosine_schedule
from torch import Tensor, nn

from lightning_tspipe.capture.plan import Glue, StepPlan, ValueRef
from lightning_tspipe.capture.trace import Networks, Tracer

WIDTH = 8


def make_backbone() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, stride=2), nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    )


def views(count: int, size: int = 4, side: int = 9) -> list[Tensor]:
    return [torch.randn(size, 3, side, side) for _ in range(count)]


class BYOL(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = make_backbone()
        self.projection_head = heads.BYOLProjectionHead(WIDTH, 16, 4)
        self.prediction_head = heads.BYOLPredictionHead(4, 16, 4)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = lightly.loss.NegativeCosineSimilarity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.backbone(x).flatten(start_dim=1)
        z = self.projection_head(y)
        return self.prediction_head(z)  # type: ignore[no-any-return]

    def forward_momentum(self, x: Tensor) -> Tensor:
        y = self.backbone_momentum(x).flatten(start_dim=1)
        z = self.projection_head_momentum(y)
        return z.detach()  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        momentum = cosine_schedule(batch_idx, 10, 0.996, 1)
        update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
        x0, x1 = batch[0]
        p0 = self.forward(x0)
        z0 = self.forward_momentum(x0)
        p1 = self.forward(x1)
        z1 = self.forward_momentum(x1)
        loss = 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))
        self.log("train_loss", loss)
        return loss  # type: ignore[no-any-return]


class MoCo(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = make_backbone()
        self.projection_head = heads.MoCoProjectionHead(WIDTH, 16, 4)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = lightly.loss.NTXentLoss(memory_bank_size=(16, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        update_momentum(self.backbone, self.backbone_momentum, m=0.99)
        update_momentum(self.projection_head, self.projection_head_momentum, m=0.99)
        x_query, x_key = batch[0]
        query = self.projection_head(self.backbone(x_query).flatten(start_dim=1))
        key = self.projection_head_momentum(self.backbone_momentum(x_key).squeeze())
        return self.criterion(query, key.detach())  # type: ignore[no-any-return]


class SimSiam(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = make_backbone()
        self.projection_head = heads.SimSiamProjectionHead(WIDTH, 8, 4)
        self.prediction_head = heads.SimSiamPredictionHead(4, 3, 4)
        self.criterion = lightly.loss.NegativeCosineSimilarity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f = self.backbone(x).flatten(start_dim=1)
        z = self.projection_head(f)
        p = self.prediction_head(z)
        return z.detach(), p

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x0, x1 = batch[0]
        z0, p0 = self.forward(x0)
        z1, p1 = self.forward(x1)
        return 0.5 * (self.criterion(z0, p1) + self.criterion(z1, p0))  # type: ignore[no-any-return]


class TiCo(BYOL):
    def __init__(self) -> None:
        super().__init__()
        del self.prediction_head
        self.criterion = lightly.loss.TiCoLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        update_momentum(self.backbone, self.backbone_momentum, m=0.9)
        update_momentum(self.projection_head, self.projection_head_momentum, m=0.9)
        x0, x1 = batch[0]
        z0 = self.projection_head(self.backbone(x0).flatten(start_dim=1))
        z1 = self.forward_momentum(x1)
        return self.criterion(z0, z1)  # type: ignore[no-any-return]


class DINO(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.student_backbone = make_backbone()
        self.student_head = heads.DINOProjectionHead(WIDTH, 8, 4, 6, freeze_last_layer=1)
        self.teacher_backbone = copy.deepcopy(self.student_backbone)
        self.teacher_head = heads.DINOProjectionHead(WIDTH, 8, 4, 6)
        deactivate_requires_grad(self.teacher_backbone)
        deactivate_requires_grad(self.teacher_head)
        self.criterion = lightly.loss.DINOLoss(output_dim=6, warmup_teacher_temp_epochs=5)

    def forward(self, x: Tensor) -> Tensor:
        return self.student_head(self.student_backbone(x).flatten(start_dim=1))  # type: ignore[no-any-return]

    def forward_teacher(self, x: Tensor) -> Tensor:
        return self.teacher_head(self.teacher_backbone(x).flatten(start_dim=1))  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        update_momentum(self.student_backbone, self.teacher_backbone, m=0.99)
        update_momentum(self.student_head, self.teacher_head, m=0.99)
        crops = [view.to(self.device) for view in batch[0]]
        teacher_out = [self.forward_teacher(view) for view in crops[:2]]
        student_out = [self.forward(view) for view in crops]
        return self.criterion(teacher_out, student_out, epoch=self.current_epoch)  # type: ignore[no-any-return]


BLOCKS = ("backbone", "projection_head", "prediction_head")
TEACHER = ("backbone_momentum", "projection_head_momentum")


def trace(module: nn.Module, networks: Networks, batch: Any) -> StepPlan:
    tracer = Tracer(module, networks, torch.device("cpu"))
    return tracer.trace(lambda b: module.training_step(b, 0), batch, seed=0)  # type: ignore[operator]


def chain(plan: StepPlan, network: str) -> str:
    """What the calls of a network go through, with the operations between."""
    (route,) = plan.routes[network]  # type: ignore[index]
    words = []
    for entry in route.entries:
        (value,) = entry.values
        while isinstance(value, Glue):
            words.append(str(value.function).partition("(")[0])
            (value,) = value.values
        words.append(entry.title)
    return " ".join(words)


def used(plan: StepPlan) -> dict[str, tuple[ValueRef, ...]]:
    return {name: ref for name, (route,) in plan.routes.items() for ref in [route.used]}


def batch_of(count: int) -> Any:
    return views(count), torch.zeros(4, dtype=torch.long), ["a.png", "b.png"]


def test_byol() -> None:
    plan = trace(BYOL(), Networks(BLOCKS, TEACHER), batch_of(2))
    assert [call.network for call in plan.calls] == ["student", "teacher"] * 2
    assert len(plan.interceptions) == 10
    assert chain(plan, "student") == (
        "backbone torch.Tensor.flatten projection_head prediction_head"
    )
    assert chain(plan, "teacher") == (
        "backbone_momentum torch.Tensor.flatten projection_head_momentum"
    )
    assert used(plan) == {"student": (ValueRef(2, 0),), "teacher": (ValueRef(1, 0),)}
    assert plan.batch_fields == ()  # views feed calls only; labels and names are not read
    assert plan.has_effects
    assert [call.grad for call in plan.calls] == [True, False] * 2
    assert all(call.inputs[0].shape == (4, 3, 9, 9) for call in plan.calls)


def test_moco_with_a_memory_bank() -> None:
    plan = trace(MoCo(), Networks(BLOCKS[:2], TEACHER), batch_of(2))
    assert [call.network for call in plan.calls] == ["student", "teacher"]
    assert len(plan.interceptions) == 4
    assert chain(plan, "teacher") == (
        "backbone_momentum torch.Tensor.squeeze projection_head_momentum"
    )
    assert used(plan) == {"student": (ValueRef(1, 0),), "teacher": (ValueRef(1, 0),)}
    assert plan.has_effects


def test_simsiam_without_a_teacher() -> None:
    plan = trace(SimSiam(), Networks(BLOCKS), batch_of(2))
    assert [call.network for call in plan.calls] == ["student"] * 2
    # The projection is a tap: the loss reads it, detached, while it feeds the predictor.
    assert used(plan) == {"student": (ValueRef(1, 0), ValueRef(2, 0))}
    assert not plan.has_effects


def test_tico() -> None:
    plan = trace(TiCo(), Networks(BLOCKS[:2], TEACHER), batch_of(2))
    assert [call.network for call in plan.calls] == ["student", "teacher"]
    assert len(plan.interceptions) == 4
    assert plan.batch_fields == ()


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_dino_with_crops_of_two_sizes() -> None:
    student, teacher = ("student_backbone", "student_head"), ("teacher_backbone", "teacher_head")
    crops = [*views(2), *views(2, side=7)], torch.zeros(4)
    plan = trace(DINO(), Networks(student, teacher), crops)
    assert [call.network for call in plan.calls] == ["teacher"] * 2 + ["student"] * 4
    assert [call.inputs[0].shape[-1] for call in plan.calls] == [9, 9, 9, 9, 7, 7]
    assert plan.batch_fields == ()


@pytest.mark.parametrize("make", [BYOL, MoCo, SimSiam, TiCo])
def test_a_trace_leaves_no_trace(make: type[pytorch_lightning.LightningModule]) -> None:
    module = make()
    logged: list[str] = []
    module.log = lambda name, *_args, **_kwargs: logged.append(name)  # type: ignore[method-assign]
    before = copy.deepcopy(module.state_dict())
    attributes = {name: dict(vars(m)) for name, m in module.named_modules()}
    batch = batch_of(2)
    random_state = torch.random.get_rng_state()
    teacher = TEACHER if hasattr(module, "backbone_momentum") else ()
    blocks = tuple(name for name in BLOCKS if hasattr(module, name))
    trace(module, Networks(blocks, teacher), batch)
    assert torch.equal(random_state, torch.random.get_rng_state())
    assert not logged
    torch.testing.assert_close(dict(module.state_dict()), dict(before), rtol=0, atol=0)
    for name, child in module.named_modules():
        # Same names, same objects; in containers too.
        assert vars(child).keys() == attributes[name].keys()
        assert all(vars(child)[key] is value for key, value in attributes[name].items())
        assert all(p.grad is None for p in child.parameters(recurse=False))
