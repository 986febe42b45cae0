"""Small modules with a ``training_step`` for each way in which a step may use its networks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn

NUM_CLASSES = 4
MOMENTUM = 0.9


def make_norm(kind: str, channels: int) -> nn.Module:
    """``batch`` or ``group``; neither needs a bias in front."""
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(1, channels)


def encoder(norm: str, *heads: nn.Module) -> nn.Sequential:
    """Images (n, 3, h, w) to features (n, 6), for any h and w."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), make_norm(norm, 4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding=1, bias=False), make_norm(norm, 4), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6), *heads,
    )  # fmt: skip


class Residual(nn.Module):
    """A transformer's block without attention: cuts inside the MLP pass on two tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.mlp, self.out = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (n, t, width) to the same."""
        x = x + self.mix(self.norm1(x)).mean(1, keepdim=True)
        return x + self.out(F.gelu(self.mlp(self.norm2(x))))


class Tokens(nn.Module):
    """Images (n, 3, h, w) to features (n, 6), through LayerNorm only."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 2, stride=2)
        self.blocks = nn.Sequential(*(Residual(6) for _ in range(3)))

    def forward(self, x: Tensor) -> Any:
        """The mean token."""
        return self.blocks(self.patches(x).flatten(2).transpose(1, 2)).mean(1)


def frozen_copy(module: nn.Module) -> nn.Module:
    """A teacher that starts as its student."""
    return copy.deepcopy(module).requires_grad_(requires_grad=False)


@torch.no_grad()
def ema_by_hand(teacher: nn.Module, student: nn.Module) -> None:
    for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
        old.mul_(MOMENTUM).add_(new, alpha=1 - MOMENTUM)


try:
    from lightly.models.utils import update_momentum
except ImportError:  # a machine that only shows what a GPU does may lack it

    @torch.no_grad()
    def update_momentum(model: nn.Module, model_ema: nn.Module, m: float) -> None:
        for new, old in zip(model.parameters(), model_ema.parameters(), strict=True):
            old.mul_(m).add_(new, alpha=1 - m)


def lightly_ema(teacher: nn.Module, student: nn.Module) -> None:
    update_momentum(student, teacher, m=MOMENTUM)


EMAS: dict[str, Callable[[nn.Module, nn.Module], None]] = {
    "by hand": ema_by_hand,
    "lightly": lightly_ema,
}


def images(size: int, seed: int, side: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, side, side, generator=generator)


def labels(size: int, seed: int) -> Tensor:
    return torch.randint(NUM_CLASSES, (size,), generator=torch.Generator().manual_seed(seed))


class Trained(nn.Module):
    """A module as Lightning's: it has a step, and it can make batches for it."""

    student_names: tuple[str, ...] = ("student",)
    teacher_names: tuple[str, ...] = ("teacher",)
    unpaired = False  # whether the teacher is cut for itself

    def training_step(self, batch: Any, _index: int) -> Any:
        raise AssertionError

    def batch(self, size: int, seed: int) -> Any:
        raise AssertionError

    def after_step(self) -> None:
        """What a hook does after each optimizer step."""


class Byol(Trained):
    """Student with a predictor, teacher, one or two views, a loss over the whole batch."""

    def __init__(self, norm: str = "batch", num_views: int = 2, ema: str = "by hand") -> None:
        super().__init__()
        self.num_views, self.ema = num_views, ema
        base = Tokens() if norm == "layer" else encoder(norm)
        self.teacher = frozen_copy(base)
        self.student = nn.Sequential(base, nn.ReLU(), nn.Linear(6, 6))

    def training_step(self, batch: Any, _index: int) -> Any:
        if self.ema in EMAS:
            EMAS[self.ema](self.teacher, self.student[0])
        views = batch["views"]
        students = [self.student(view) for view in views]
        with torch.no_grad():
            teachers = [self.teacher(view) for view in views]
        pairs = zip(students, reversed(teachers), strict=True)
        loss = sum(-F.cosine_similarity(p, z).mean() for p, z in pairs)
        whole_batch = sum(p.mean(0).square().sum() for p in students)
        return loss + 0.1 * whole_batch + 0.01 * (batch["weight"] * students[0].mean(1)).sum()

    def batch(self, size: int, seed: int) -> Any:
        views = [images(size, seed + 100 * view) for view in range(self.num_views)]
        return {"views": views, "weight": labels(size, seed).to(views[0]), "name": "any string"}


class HookEma(Byol):
    """The EMA comes in a hook, after each optimizer step."""

    def __init__(self, norm: str = "batch", num_views: int = 2) -> None:
        super().__init__(norm, num_views, ema="hook")

    def after_step(self) -> None:
        ema_by_hand(self.teacher, self.student[0])


class Distillation(Trained):
    """A frozen teacher of another architecture, in eval mode; one view; labels."""

    unpaired = True

    def __init__(self, norm: str = "batch") -> None:
        super().__init__()
        self.student = encoder(norm, nn.ReLU(), nn.Linear(6, NUM_CLASSES))
        self.teacher = nn.Sequential(Tokens(), nn.ReLU(), nn.Linear(6, NUM_CLASSES)).eval()
        self.teacher.requires_grad_(requires_grad=False)

    def training_step(self, batch: Any, _index: int) -> Any:
        x, y = batch
        student, teacher = self.student(x), self.teacher(x)
        soft = F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="batchmean")
        return 0.7 * soft + 0.3 * F.cross_entropy(student, y)

    def batch(self, size: int, seed: int) -> Any:
        return images(size, seed), labels(size, seed)


class Classifier(Trained):
    """No teacher."""

    student_names = ("net",)
    teacher_names = ()

    def __init__(self, norm: str = "batch") -> None:
        super().__init__()
        self.net = encoder(norm, nn.ReLU(), nn.Linear(6, NUM_CLASSES))

    def training_step(self, batch: Any, _index: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def batch(self, size: int, seed: int) -> Any:
        return [images(size, seed), labels(size, seed)]


class Contrastive(Classifier):
    """In-batch negatives over two views (SimCLR), without a teacher."""

    def training_step(self, batch: Any, _index: int) -> Any:
        a, b = (F.normalize(self.net(view)) for view in batch)
        return F.cross_entropy(a @ b.T / 0.5, torch.arange(len(a), device=a.device))

    def batch(self, size: int, seed: int) -> Any:
        return images(size, seed), images(size, seed + 100)


class Moco(Trained):
    """Lightly style: declared blocks with glue, momentum copies, a queue with a pointer."""

    student_names = ("backbone", "head")
    teacher_names = ("backbone_momentum", "head_momentum")

    def __init__(self, norm: str = "batch") -> None:
        super().__init__()
        self.backbone = encoder(norm)[:7]  # up to the pooling
        self.head = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
        self.backbone_momentum = frozen_copy(self.backbone)
        self.head_momentum = frozen_copy(self.head)
        self.queue: Tensor
        self.pointer: Tensor
        self.register_buffer("queue", F.normalize(torch.randn(12, 4)))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, _index: int) -> Any:
        update_momentum(self.backbone, self.backbone_momentum, m=MOMENTUM)
        update_momentum(self.head, self.head_momentum, m=MOMENTUM)
        x_query, x_key = batch[0]
        query = F.normalize(self.head(self.backbone(x_query).flatten(start_dim=1)))
        with torch.no_grad():
            key = F.normalize(self.head_momentum(self.backbone_momentum(x_key).flatten(1)))
        positives = (query * key).sum(1, keepdim=True)
        logits = torch.cat([positives, query @ self.queue.clone().T], dim=1) / 0.2
        self._enqueue(key)
        own = torch.zeros(len(query), dtype=torch.long, device=query.device)
        return F.cross_entropy(logits, own)

    @torch.no_grad()
    def _enqueue(self, key: Tensor) -> None:
        start = int(self.pointer.item())
        places = torch.arange(start, start + len(key)) % len(self.queue)
        self.queue[places] = key
        self.pointer.fill_((start + len(key)) % len(self.queue))

    def batch(self, size: int, seed: int) -> Any:
        return (images(size, seed), images(size, seed + 100)), labels(size, seed), ["a.png"]


class Dino(Trained):
    """Multi-crop: the student sees small views too; the teacher's outputs are centred."""

    def __init__(self, norm: str = "batch") -> None:
        super().__init__()
        self.student = encoder(norm)
        self.teacher = frozen_copy(self.student)
        self.center: Tensor
        self.register_buffer("center", torch.zeros(1, 6))
        self.num_steps = 0

    def training_step(self, batch: Any, _index: int) -> Any:
        update_momentum(self.student, self.teacher, m=MOMENTUM)
        self.num_steps += 1  # as a schedule that lives in the module
        large, small = batch[:2], batch[2:]
        teachers = [self.teacher(view) for view in large]
        students = [self.student(view) for view in (*large, *small)]
        targets = [((t - self.center) / 0.5).softmax(1) for t in teachers]
        terms = [
            -(target * (s / 0.8).log_softmax(1)).sum(1).mean()
            for i, target in enumerate(targets)
            for k, s in enumerate(students)
            if i != k
        ]
        with torch.no_grad():
            self.center.mul_(0.9).add_(torch.cat(teachers).mean(0, keepdim=True), alpha=0.1)
        return torch.stack(terms).mean() * (1 + 0.1 * self.num_steps)

    def batch(self, size: int, seed: int) -> Any:
        return [images(size, seed + 100 * view, side) for view, side in enumerate((6, 6, 4, 3))]


class Tap(Trained):
    """A classifier on the loss rank that learns from a feature in the middle of the student."""

    student_names = ("backbone", "head", "predictor")
    teacher_names: tuple[str, ...] = ("backbone_momentum", "head_momentum")

    def __init__(self, norm: str = "batch", *, detach: bool = True) -> None:
        super().__init__()
        self.detach = detach
        self.backbone = encoder(norm)[:8]
        self.head = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5))
        self.predictor = nn.Linear(5, 5)
        self.classifier = nn.Linear(4, NUM_CLASSES)
        self.backbone_momentum = frozen_copy(self.backbone)
        self.head_momentum = frozen_copy(self.head)

    def training_step(self, batch: Any, _index: int) -> Any:
        update_momentum(self.backbone, self.backbone_momentum, m=MOMENTUM)
        update_momentum(self.head, self.head_momentum, m=MOMENTUM)
        x, y = batch
        features = self.backbone(x)
        projections = self.head(features)
        predictions = self.predictor(projections)
        with torch.no_grad():
            targets = self.head_momentum(self.backbone_momentum(x.flip(-1)))
        features = features.detach() if self.detach else features
        online = F.cross_entropy(self.classifier(features), y)
        return online - F.cosine_similarity(predictions, targets).mean()

    def batch(self, size: int, seed: int) -> Any:
        return images(size, seed), labels(size, seed)


class PartialCalls(Tap):
    """Some calls stop in the middle of the chain, one runs without gradients."""

    def training_step(self, batch: Any, _index: int) -> Any:
        x, y = batch
        predictions = self.predictor(self.head(self.backbone(x)))
        only_features = self.backbone(x.roll(1, -1))
        with torch.no_grad():
            quiet = self.head(self.backbone(x.flip(-2)))
        loss = F.cross_entropy(self.classifier(only_features), y)
        return loss + (predictions - quiet).square().mean()

    teacher_names = ()


class SimSiam(Trained):
    """No teacher; the projections are used twice, once detached."""

    student_names = ("encoder", "predictor")
    teacher_names = ()

    def __init__(self, norm: str = "batch") -> None:
        super().__init__()
        self.encoder = encoder(norm)
        self.predictor = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6))

    def training_step(self, batch: Any, _index: int) -> Any:
        z0, z1 = self.encoder(batch[0]), self.encoder(batch[1])
        p0, p1 = self.predictor(z0), self.predictor(z1)
        first = F.cosine_similarity(p0, z1.detach()).mean()
        return -(first + F.cosine_similarity(p1, z0.detach()).mean()) / 2

    def batch(self, size: int, seed: int) -> Any:
        return images(size, seed), images(size, seed + 100)


class TwoOutputs(nn.Module):
    """Returns (features, logits)."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.trunk = encoder(norm)
        self.neck = nn.Linear(6, 6)
        self.fc = nn.Linear(6, NUM_CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(x)
        return features, self.fc(self.neck(features).relu())


class TupleStudent(Trained):
    """Both networks return (features, logits), and the loss uses all four."""

    def __init__(self, norm: str = "batch") -> None:
        super().__init__()
        self.student = TwoOutputs(norm)
        self.teacher = frozen_copy(self.student)

    def training_step(self, batch: Any, _index: int) -> Any:
        ema_by_hand(self.teacher, self.student)
        x, y = batch
        features, logits = self.student(x)
        with torch.no_grad():
            teacher_features, teacher_logits = self.teacher(x)
        loss = F.mse_loss(features, teacher_features) + F.cross_entropy(logits, y)
        loss = loss + F.mse_loss(logits.softmax(1), teacher_logits.softmax(1))
        return {"loss": loss, "logits": logits.detach()}

    def batch(self, size: int, seed: int) -> Any:
        return images(size, seed), labels(size, seed)


class Words(nn.Module):
    """Takes tokens and a weight for each of them or for all, and returns inner values too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.fc = nn.Linear(6, NUM_CLASSES)

    def forward(
        self, tokens: Tensor, weight: Tensor | None = None, *, scale: float = 1.0
    ) -> dict[str, Any]:
        assert weight is not None
        weight = weight.reshape(tokens.shape[0], -1, 1)
        first = self.first(self.words(tokens) * weight).tanh()
        second = self.second(first * weight).tanh() * scale
        return {"logits": self.fc(second.mean(1)), "hidden": (first, second)}


class Keywords(Trained):
    """Calls with two tensors, one of them by keyword, and a constant; gradients in all outputs."""

    def __init__(self, weights: str = "of tokens") -> None:
        super().__init__()
        self.weights = weights
        self.student = Words()
        self.teacher = frozen_copy(self.student)

    def training_step(self, batch: Any, _index: int) -> Any:
        ema_by_hand(self.teacher, self.student)
        loss = torch.zeros(())
        for tokens, weight in batch[:-1]:
            student = self.student(tokens, weight=weight, scale=2.0)
            with torch.no_grad():
                teacher = self.teacher(tokens, weight=weight, scale=2.0)
            loss = loss + F.cross_entropy(student["logits"], batch[-1])
            for mine, theirs in zip(student["hidden"], teacher["hidden"], strict=True):
                loss = loss + F.mse_loss(mine, theirs + 0.1)
        return loss

    def batch(self, size: int, seed: int) -> Any:
        views = [self._view(size, seed, 4 + seed % 2), self._view(size, seed + 100, 4)]
        return *views, labels(size, seed)

    def _view(self, size: int, seed: int, length: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(9, (size, length), generator=generator)
        shape = (size, length) if self.weights == "of tokens" else (size,)
        return tokens, torch.rand(shape, generator=generator, dtype=torch.float64)


class ComputedInputs(Byol):
    """The step concatenates the views for the student and shuffles those of the teacher."""

    def training_step(self, batch: Any, _index: int) -> Any:
        ema_by_hand(self.teacher, self.student[0])
        first, second = batch["views"]
        students = self.student(torch.cat([first, second])).chunk(2)
        order = torch.arange(len(first)).roll(1)
        with torch.no_grad():
            shuffled = self.teacher((second * 0.5)[order])
        teacher = shuffled[order.argsort()]
        loss = -F.cosine_similarity(students[0], teacher).mean()
        return loss + (students[1] * batch["weight"].unsqueeze(1)).square().mean()


class RandomStep(Byol):
    """The step draws random numbers, before the calls and behind them."""

    def training_step(self, batch: Any, _index: int) -> Any:
        ema_by_hand(self.teacher, self.student[0])
        first, second = batch["views"]
        order = torch.randperm(len(first))
        student = self.student(first + 0.1 * torch.rand_like(first))
        with torch.no_grad():
            teacher = self.teacher(second[order])[order.argsort()]
        kept = (torch.rand(student.shape) < 0.8).to(student.device)
        return (F.normalize(student) * kept - F.normalize(teacher)).square().mean()


@dataclass(frozen=True)
class Case:
    """A module to train, and what it needs."""

    make: Callable[..., Trained]
    kwargs: dict[str, Any]
    min_size: int = 1

    def build(self, seed: int = 0) -> Trained:
        torch.manual_seed(seed)
        return self.make(**self.kwargs)


def _both(make: Callable[..., Trained], **kwargs: Any) -> list[Case]:
    return [Case(make, {"norm": norm, **kwargs}) for norm in ("batch", "group")]


CASES: dict[str, Case] = {
    f"{case.make.__name__}-{'-'.join(map(str, case.kwargs.values()))}": case
    for case in (
        *(Case(Byol, {"norm": n, "num_views": v, "ema": e})
          for n in ("batch", "group", "layer") for v in (1, 2) for e in ("by hand", "lightly")
          if e == "by hand" or n == "layer"),
        *_both(HookEma, num_views=1), *_both(HookEma, num_views=2), *_both(Distillation),
        *_both(Classifier), *_both(Contrastive), *_both(Moco), *_both(Dino),
        *_both(Tap, detach=True), *_both(Tap, detach=False), *_both(PartialCalls),
        *_both(SimSiam), *_both(TupleStudent), *_both(ComputedInputs),
        Case(Keywords, {"weights": "of tokens"}), Case(Keywords, {"weights": "of sentences"}),
    )
}  # fmt: skip
# Threads share the random generators, so that these need processes, or one rank.
RANDOM_CASE = "RandomStep"
ALL_CASES = CASES | {RANDOM_CASE: Case(RandomStep, {})}


def make_epochs(module: Trained, sizes: Sequence[Sequence[int]]) -> list[list[Any]]:
    """Batches of the given sizes, the same whenever the module is asked."""
    seeds = iter(range(10_000))
    return [[module.batch(size, next(seeds)) for size in epoch] for epoch in sizes]
