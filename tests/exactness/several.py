"""Steps with several networks, or with ways through one: what the pipeline has to train exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.utils.checkpoint import checkpoint

from tests.exactness.modules import (
    NUM_CLASSES,
    Residual,
    Trained,
    TwoOutputs,
    ema_by_hand,
    encoder,
    frozen_copy,
    images,
    labels,
)


class Classifying(Trained):
    """Labelled images."""

    def batch(self, size: int, seed: int) -> Any:
        return images(size, seed), labels(size, seed)


class Ensemble(Classifying):
    """Two frozen teachers of different sizes, called on different views."""

    teacher_names = ("first", "second")
    unpaired = True

    def __init__(self) -> None:
        super().__init__()
        self.student = encoder("batch", nn.ReLU(), nn.Linear(6, NUM_CLASSES))
        self.first = frozen_copy(encoder("group", nn.ReLU(), nn.Linear(6, NUM_CLASSES)))
        self.second = frozen_copy(
            nn.Sequential(nn.Flatten(), nn.Linear(75, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))
        )

    def training_step(self, batch: Any, _index: int) -> Any:
        x, y = batch
        logits = self.student(x)
        late = (self.second(x.flip(-1)) + self.first(x)).softmax(1) + self.second(x).softmax(1)
        return F.cross_entropy(logits, y) + (logits.softmax(1) - late / 2).square().mean()


class Mutual(Classifying):
    """Two students that learn from each other, no teacher."""

    student_names = ("left", "right")
    teacher_names: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.left = encoder("batch", nn.ReLU(), nn.Linear(6, NUM_CLASSES))
        self.right = nn.Sequential(nn.Flatten(), nn.Linear(75, 8), nn.Tanh(), nn.Linear(8, 4))

    def training_step(self, batch: Any, _index: int) -> Any:
        x, y = batch
        one, other = self.left(x), self.right(x.flip(-1))
        loss = F.cross_entropy(one, y) + F.cross_entropy(other, y)
        return loss + (one.softmax(1) - other.softmax(1)).square().mean()


class MeanTeachers(Mutual):
    """Two students, and an average of each that teaches the other."""

    teacher_names = ("late_left", "late_right")

    def __init__(self) -> None:
        super().__init__()
        self.late_left, self.late_right = frozen_copy(self.left), frozen_copy(self.right)

    def training_step(self, batch: Any, index: int) -> Any:
        ema_by_hand(self.late_left, self.left)
        ema_by_hand(self.late_right, self.right)
        x, _ = batch
        quiet = self.late_right(x).softmax(1), self.late_left(x).softmax(1)
        one, other = self.left(x).softmax(1), self.right(x).softmax(1)
        loss = (one - quiet[0]).square().mean() + (other - quiet[1]).square().mean()
        return loss + super().training_step(batch, index)


class TwoHeads(Classifying):
    """Two heads on one backbone, in one call; the teacher has one of them."""

    student_names = ("backbone", "head", "other")
    teacher_names = ("backbone_momentum", "head_momentum")

    def __init__(self) -> None:
        super().__init__()
        self.backbone = encoder("batch")
        self.head = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4))
        self.other = nn.Linear(6, NUM_CLASSES)
        self.backbone_momentum = frozen_copy(self.backbone)
        self.head_momentum = frozen_copy(self.head)

    def training_step(self, batch: Any, _index: int) -> Any:
        ema_by_hand(self.backbone_momentum, self.backbone)
        ema_by_hand(self.head_momentum, self.head)
        x, y = batch
        features = self.backbone(x)
        made, classes = self.head(features), self.other(F.relu(features))
        small = self.head(self.backbone(x[..., :4, :4]).tanh())
        with torch.no_grad():
            wanted = self.head_momentum(self.backbone_momentum(x.flip(-1)))
        loss = (made - wanted).square().mean() + (small - wanted).square().mean()
        return loss + F.cross_entropy(classes, y) + 0.1 * features.square().mean()


class Towers(Classifying):
    """Two backbones whose features go into one head, as of texts and pictures; so of a teacher."""

    student_names = ("left", "right", "head")
    teacher_names = ("late_left", "late_right", "late_head")

    def __init__(self) -> None:
        super().__init__()
        self.left = encoder("batch")
        self.right = nn.Sequential(nn.Flatten(), nn.Linear(75, 8), nn.Tanh(), nn.Linear(8, 6))
        self.head = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, NUM_CLASSES))
        for name in self.student_names:
            self.add_module(f"late_{name}", frozen_copy(self.get_submodule(name)))

    def training_step(self, batch: Any, _index: int) -> Any:
        for name in self.student_names:
            ema_by_hand(self.get_submodule(f"late_{name}"), self.get_submodule(name))
        x, y = batch
        one = self.left(x)
        with torch.no_grad():
            pair = self.late_left(x.flip(-1)), self.late_right(x)
            late = self.late_head(torch.cat(pair, 1))
        made = self.head(torch.cat([one, self.right(x.flip(-1)).tanh()], 1))
        both = self.head(torch.cat([one, self.right(x)], 1))
        loss = F.cross_entropy(made, y) + (both - late).square().mean()
        return loss + 0.1 * one.square().mean()


class Joined(Classifying):
    """A head gets what a backbone returns together with a field of the batch, and constants."""

    student_names = ("backbone", "head")
    teacher_names = ("late_backbone", "late_head")

    def __init__(self) -> None:
        super().__init__()
        self.backbone = encoder("batch", nn.ReLU())
        self.head = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))
        for name in self.student_names:
            self.add_module(f"late_{name}", frozen_copy(self.get_submodule(name)))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))

    def training_step(self, batch: Any, _index: int) -> Any:
        for name in self.student_names:
            ema_by_hand(self.get_submodule(f"late_{name}"), self.get_submodule(name))
        x, y = batch
        conditions = F.one_hot(y, NUM_CLASSES).to(x.dtype)[:, :3]
        with torch.no_grad():
            late = self.late_head(torch.cat([self.late_backbone(x.flip(-1)), conditions], 1))
        z = self.backbone(x).view(len(x), 2, -1)[: x.shape[0]].flatten(1)
        made = self.head(torch.cat([z * self.scale, conditions.cos()], 1))
        other = self.head(torch.cat([(z + conditions.mean(1, keepdim=True)).tanh(), conditions], 1))
        return F.cross_entropy(made, y) + (other - late).square().mean()


class Masked(nn.Module):
    """As a masked vision transformer: several methods, tokens that are replaced, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 6, 1)
        self.token = nn.Parameter(torch.randn(6))
        self.positions = nn.Parameter(torch.randn(25, 6))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(3))
        self.head = nn.Linear(6, NUM_CLASSES)
        self.calls = 0

    def encode(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Any:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        if mask is not None:
            tokens = torch.where(mask[..., None], self.token, tokens)
        tokens = tokens * scale + self.positions
        for layer, norm in zip(self.layers, self.norms, strict=True):
            tokens = tokens + layer(norm(tokens)).tanh()
        return {"all": tokens, "mean": (tokens.mean(1), None)}

    def num_tokens(self) -> int:
        return len(self.positions)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x)["mean"][0])  # type: ignore[no-any-return]


class Entries(Classifying):
    """The step calls methods and parts of its networks."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Masked()
        self.teacher = frozen_copy(self.student)

    def training_step(self, batch: Any, _index: int) -> Any:
        ema_by_hand(self.teacher, self.student)
        x, y = batch
        mask = x.mean(1).flatten(1)[:, : self.student.num_tokens()] > 0
        masked = self.student.encode(x, mask=mask, scale=0.5)
        whole = self.student.encode(x=x)["mean"][0]
        with torch.no_grad():
            wanted = self.teacher.encode(x)["all"]
        loss = ((masked["all"] - wanted) * mask[..., None]).square().mean()
        loss = loss + F.cross_entropy(self.student.head(masked["mean"][0] * 2), y)
        return loss + whole.square().mean()


class InOtherModes(Classifying):
    """Labels of its own, in evaluation mode, and a call in which a layer is not trained."""

    teacher_names: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.student = encoder("batch", nn.ReLU(), nn.Linear(6, NUM_CLASSES))

    def training_step(self, batch: Any, _index: int) -> Any:
        x, y = batch
        self.student.eval()
        with torch.no_grad():
            sure = self.student(x.flip(-1)).argmax(1)
        self.student.train()
        made = self.student(x)
        self.student[0].requires_grad_(requires_grad=False)
        other = self.student(x.flip(-1))
        self.student[0].requires_grad_(requires_grad=True)
        return F.cross_entropy(made, y) + F.cross_entropy(other, sure)


class GramTeacher(Classifying):
    """An averaged teacher, and a frozen one of another size beside it."""

    teacher_names = ("teacher", "gram")

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(encoder("batch"), nn.ReLU(), nn.Linear(6, 6))
        self.teacher = frozen_copy(self.student[0])
        self.gram = frozen_copy(
            nn.Sequential(nn.Flatten(), nn.Linear(75, 8), nn.Tanh(), nn.Linear(8, 6))
        )

    def training_step(self, batch: Any, _index: int) -> Any:
        ema_by_hand(self.teacher, self.student[0])
        x, y = batch
        made, quiet = self.student(x), self.gram(x)
        loss = (made - self.teacher(x.flip(-1))).square().mean() + 0.1 * made[:, y].mean()
        return loss + (made @ made.T - quiet @ quiet.T).square().mean()


class Reused(Classifying):
    """The step changes a tensor in place that it has given to a network."""

    def __init__(self) -> None:
        super().__init__()
        self.student = encoder("group", nn.ReLU(), nn.Linear(6, NUM_CLASSES))
        self.teacher = frozen_copy(self.student)

    def training_step(self, batch: Any, _index: int) -> Any:
        ema_by_hand(self.teacher, self.student)
        x, y = batch[0] + 0.1, batch[1]
        quiet = self.teacher(x)
        made = self.student(x.mul_(0.5))
        return F.cross_entropy(made, y) + (made - quiet).square().mean()


class NormApart(Classifying):
    """BatchNorm is one of the networks that the step calls."""

    student_names = ("conv", "norm", "linear")
    teacher_names: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.linear = nn.Linear(4, NUM_CLASSES)

    def training_step(self, batch: Any, _index: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.linear(self.norm(self.conv(x)).relu().mean((2, 3))), y)


class Rewritten(TwoHeads):
    """The step changes in place what networks returned, before it gives it to others."""

    def training_step(self, batch: Any, _index: int) -> Any:
        with torch.no_grad():
            for old, new in zip(
                self.backbone_momentum.parameters(), self.backbone.parameters(), strict=True
            ):
                torch.lerp(old, new, 0.1, out=old)
        x, y = batch
        features = self.backbone(x)
        F.leaky_relu(features, 0.5, inplace=True)
        scaled = features.clone()
        scaled.mul_(1.5)
        made, classes = self.head(scaled), self.other(scaled)
        made[:, 0] = 0.0
        with torch.no_grad():
            wanted = self.head_momentum(self.backbone_momentum(x.flip(-1)))
        loss = (made - wanted).square().mean() + 0.1 * features.square().mean()
        return loss + F.cross_entropy(classes, y)


class Hinted(nn.Module):
    """A head that reads a hint, in its last layer only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, NUM_CLASSES)

    def forward(self, features: Tensor, *, hint: Tensor) -> Tensor:
        return self.last(self.first(features).tanh() + hint)  # type: ignore[no-any-return]


class FedByAverage(Classifying):
    """The head reads the average, by way of the whole batch, and so does the loss."""

    student_names = ("backbone", "head")
    teacher_names = ("late",)

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = encoder("batch"), Hinted()
        self.late = frozen_copy(self.backbone)

    def training_step(self, batch: Any, _index: int) -> Any:
        ema_by_hand(self.late, self.backbone)
        x, y = batch
        late = self.late(x.flip(-1))
        features = self.backbone(x)
        made = self.head(features, hint=late.softmax(0))
        return F.cross_entropy(made, y) + (features - late).square().mean()


class FedByFrozen(Classifying):
    """The student reads nothing but what a frozen network gives, and the loss not even that."""

    student_names = ("net",)
    teacher_names = ("frozen",)
    unpaired = True

    def __init__(self) -> None:
        super().__init__()
        self.frozen = frozen_copy(encoder("group"))
        self.net = nn.Sequential(
            nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(),
            nn.Linear(8, NUM_CLASSES),
        )  # fmt: skip

    def training_step(self, batch: Any, _index: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.net(self.frozen(x)), y)


class FedByBoth(Classifying):
    """One view is given with what the average says of it, and one with what a frozen guide says."""

    teacher_names = ("teacher", "guide")

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(
            nn.Linear(75 + NUM_CLASSES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(),
            nn.Linear(8, NUM_CLASSES),
        )  # fmt: skip
        self.teacher = frozen_copy(self.student)
        self.guide = frozen_copy(nn.Sequential(nn.Flatten(), nn.Linear(75, 8), nn.Linear(8, 4)))

    def training_step(self, batch: Any, _index: int) -> Any:
        ema_by_hand(self.teacher, self.student)
        (x, y), guide = batch, self.guide(batch[0])
        plain = F.pad(x.flatten(1), (0, NUM_CLASSES))
        late = self.teacher(plain)
        one = self.student(plain)
        two = self.student(torch.cat([x.flatten(1), guide.softmax(1)], 1))
        mixed = plain.flip(0)
        mixed[:, 75:] = late - late.mean(0)
        three = self.student(mixed)
        loss = F.cross_entropy(two, y) + F.cross_entropy(three, y)
        return loss + (one - late).square().mean()


class Centered(nn.Module):
    """Takes a mean away that it updates, and reads whether gradients are on."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = encoder("batch"), nn.Linear(6, NUM_CLASSES)
        self.center = nn.Buffer(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        if self.training:
            self.center.mul_(0.9).add_(features.detach().mean(0), alpha=0.1)
        scale = 2.0 if torch.is_grad_enabled() else 0.5
        return self.head((features - self.center) * scale)  # type: ignore[no-any-return]


class Compared(nn.Module):
    """Compares features with some of the batch, and projects them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = encoder("batch", nn.ReLU())
        self.probe = encoder("group")
        self.last = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor, examples: Tensor, basis: Tensor) -> Tensor:
        features = self.body(x)
        near = (features @ self.probe(examples).T).mean(1, keepdim=True)
        return self.last(torch.cat([features @ basis.T, near, near.exp(), near * near], 1))


class WholeTensors(Classifying):
    """A network gets some samples for all, and a table with as many rows as there are samples."""

    teacher_names: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.student = Compared()
        self.register_buffer("basis", torch.linspace(-1, 1, 30).view(5, 6).cos())

    def training_step(self, batch: Any, _index: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.student(x, x[:2].flip(-1), self.basis), y)


class WritesBuffers(Classifying):
    """The forward writes a buffer, once in each call; one call is without gradients."""

    teacher_names: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.student = Centered()

    def training_step(self, batch: Any, _index: int) -> Any:
        x, y = batch
        with torch.no_grad():
            wanted = self.student(x.flip(-1))
        made = self.student(x)
        return F.cross_entropy(made, y) + (made - wanted).square().mean()


class Checkpointed(nn.Module):
    """Its blocks run again in the backward; the second reads what was made before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 6, 1), nn.Linear(6, NUM_CLASSES)
        self.blocks = nn.ModuleList(Residual(6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first = tokens = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:

            def run(y: Tensor, block: nn.Module = block, first: Tensor = first) -> Any:
                made = block(y)
                return made * first.tanh(), made.mean(1)

            tokens, mean = checkpoint(run, tokens, use_reentrant=False)
            first = first + mean[:, None]
        return self.head(tokens.mean(1) + first.mean(1))  # type: ignore[no-any-return]


class Recomputing(Classifying):
    """Both networks have checkpointed regions."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Checkpointed()
        self.teacher = frozen_copy(self.student)

    def training_step(self, batch: Any, _index: int) -> Any:
        ema_by_hand(self.teacher, self.student)
        (x, y), quiet = batch, self.teacher(batch[0])
        made = self.student(x)
        return F.cross_entropy(made, y) + (made - quiet).square().mean()


class Tempered(nn.Module):
    """Reads attributes and modes that a hook changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = encoder("batch")
        self.head = nn.Linear(6, NUM_CLASSES)
        self.temperature, self.has_skip = 1.0, False

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        features = features + F.relu(features) if self.has_skip else features
        return self.head(features) / self.temperature  # type: ignore[no-any-return]


class Scheduled(Classifying):
    """Thaws layers, changes a temperature and a branch, toggles a mode; images change size."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Tempered()
        self.student.body[:4].requires_grad_(requires_grad=False)
        self.teacher = frozen_copy(self.student)
        self.num_steps = 0

    def batch(self, size: int, seed: int) -> Any:
        return images(size, seed, 4 + seed % 2), labels(size, seed)

    def training_step(self, batch: Any, _index: int) -> Any:
        (x, y), teacher = batch, self.teacher(batch[0])
        made = self.student(x)
        return F.cross_entropy(made, y) + (made - teacher).square().mean()

    def after_step(self) -> None:
        self.num_steps += 1
        student: Any = self.student
        student.temperature = 1 / (1 + self.num_steps % 3)
        student.has_skip = self.num_steps > 3
        student.body[1].train(self.num_steps != 2)
        student.body[:4].requires_grad_(self.num_steps > 2)


class Joining(nn.Module):
    """A head that takes tensors in a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.last = nn.Linear(NUM_CLASSES, 6), nn.Linear(6, NUM_CLASSES)

    def forward(self, given: dict[str, Any], *, scale: float) -> dict[str, Any]:
        features, logits = given["made"]
        mixed = (
            features.tanh() * self.gate(logits).sigmoid() + given["image"].mean((1, 2, 3))[:, None]
        )
        return {"classes": self.last(mixed) * scale, "more": (mixed, [None, "constant"])}


class ManyInputs(Classifying):
    """A head takes an image, and both outputs of its backbone, which have gradients."""

    student_names = ("backbone", "head")
    teacher_names: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = TwoOutputs("group"), Joining()

    def training_step(self, batch: Any, _index: int) -> Any:
        x, y = batch
        made = self.head({"made": list(self.backbone(x)), "image": x}, scale=2.0)
        mixed, (_, constant) = made["more"]
        return F.cross_entropy(made["classes"], y) + mixed.square().mean() * len(constant)


class Positioned(nn.Module):
    """Takes a table for all samples, and a factor, beside images."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 1)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, NUM_CLASSES))

    def forward(self, table: Tensor, x: Tensor, *, factor: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + table[: x.shape[2] * x.shape[3]]
        return self.layers(tokens * factor).mean(1)  # type: ignore[no-any-return]


class Constants(Classifying):
    """Inputs that have no row for each sample: a buffer, and a number that the step makes."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Positioned()
        self.teacher = frozen_copy(self.student)
        self.table = nn.Buffer(torch.randn(30, 6))

    def training_step(self, batch: Any, _index: int) -> Any:
        x, y = batch
        ema_by_hand(self.teacher, self.student)
        made = self.student(self.table, x, factor=torch.tensor(0.5))
        small = self.student(self.table, x[..., :4, :4], factor=torch.tensor(2.0))
        quiet = self.teacher(self.table, x, factor=torch.tensor(0.5))
        return F.cross_entropy(made, y) + (made - quiet).square().mean() + small.square().mean()


class FedByBuffer(FedByFrozen):
    """What a frozen network gives is written into a buffer, which the student reads."""

    def __init__(self) -> None:
        super().__init__()
        self.center = nn.Buffer(torch.zeros(6))

    def training_step(self, batch: Any, _index: int) -> Any:
        (x, y), late = batch, self.frozen(batch[0])
        self.center.data = 0.5 * self.center + late.mean(0)
        return F.cross_entropy(self.net(x.mean((2, 3)).repeat(1, 2) - self.center), y)


class FedByState(FedByFrozen):
    """What the step leaves behind, it reads in the next one; and it draws random numbers."""

    seen = 0

    def training_step(self, batch: Any, _index: int) -> Any:
        x, y = batch
        self.seen += 1
        made = self.frozen(x) / self.seen + 0.1 * torch.randn(len(x), 6)
        return F.cross_entropy(self.net(made), y)


class Again(Classifying):
    """Networks are called again on what others have made of their outputs, in no one order."""

    student_names = ("stem", "left", "right")
    teacher_names: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.stem = encoder("group")
        self.left = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.right = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))

    def training_step(self, batch: Any, _index: int) -> Any:
        x, y = batch
        made = self.left(self.right(self.left(self.stem(x))).tanh())
        other = self.right(self.left(self.stem(x.flip(-1))) * 2)
        return F.cross_entropy(made, y) + other.square().mean()


class FedOnTheWay(Classifying):
    """What an average says goes into the student's second part, with what the first one returns."""

    student_names = ("backbone", "head")
    teacher_names = ("late_backbone",)

    def __init__(self) -> None:
        super().__init__()
        self.backbone = encoder("group", nn.ReLU())
        self.head = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))
        self.late_backbone = frozen_copy(self.backbone)

    def training_step(self, batch: Any, _index: int) -> Any:
        ema_by_hand(self.late_backbone, self.backbone)
        x, y = batch
        late = self.late_backbone(x.flip(-1))
        z = self.backbone(x)
        made = self.head(torch.cat([z - late, late.tanh() - late.mean(0)], 1))
        return F.cross_entropy(made, y)


FED = {
    kind.__name__: kind for kind in (FedByAverage, FedByFrozen, FedByBoth, FedByBuffer, FedOnTheWay)
}
SEVERAL = {
    kind.__name__: kind
    for kind in (
        Ensemble, Mutual, MeanTeachers, TwoHeads, Towers, Joined, Entries, GramTeacher, Reused,
        NormApart, Rewritten, Again, ManyInputs, Constants,
        Scheduled, Recomputing, *FED.values(), InOtherModes,
    )
}  # fmt: skip
