"""Steps whose losses read what forward hooks in the networks keep."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from tests.exactness.modules import NUM_CLASSES, Tokens, ema_by_hand, encoder, frozen_copy
from tests.exactness.several import Classifying


class Hooked(Classifying):
    """Features of two layers of the student follow those of its average."""

    layers: tuple[str, ...] = ("3", "6")

    def __init__(self) -> None:
        super().__init__()
        self.student: Any = self.network()
        self.teacher: Any = frozen_copy(self.student)
        self.features: dict[str, dict[str, list[Any]]] = {"student": {}, "teacher": {}}
        for name, kept in self.features.items():
            for layer in self.layers:
                part = getattr(self, name).get_submodule(layer)
                part.register_forward_hook(self.keeping(kept.setdefault(layer, [])))

    def network(self) -> nn.Module:
        return encoder("batch", nn.ReLU(), nn.Linear(6, NUM_CLASSES))

    def keeping(self, kept: list[Any]) -> Any:
        return lambda _module, _args, output: kept.append(output)

    def kept(self, name: str, layer: str) -> Tensor:
        """What was kept of a layer: one tensor, or in the reference one per micro-batch."""
        found = torch.cat(self.features[name][layer])
        self.features[name][layer].clear()
        return found

    def training_step(self, batch: Any, _index: int) -> Any:
        x, y = batch
        ema_by_hand(self.teacher, self.student)
        logits, quiet = self.student(x), self.teacher(x)
        loss = F.cross_entropy(logits, y) + F.mse_loss(logits, quiet)
        for layer in self.layers:
            loss = loss + F.mse_loss(self.kept("student", layer), self.kept("teacher", layer))
        return loss


class HookedInputs(Hooked):
    """Hooks that keep what a layer is given, in the middle of blocks, by name too."""

    layers = ("0.blocks.1.mlp", "0.blocks.2")

    def network(self) -> nn.Module:
        return nn.Sequential(Tokens(), nn.Linear(6, NUM_CLASSES))

    def keeping(self, kept: list[Any]) -> Any:
        return lambda _module, args, output: kept.append(
            args[0] * output.mean((1, 2), keepdim=True)
        )


class HookedNorms(Hooked):
    """A hook on a BatchNorm, whose statistics are written once per call all the same."""

    layers = ("4",)

    def keeping(self, kept: list[Any]) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Tensor) -> None:
            if torch.is_grad_enabled():  # not where the reference updates the statistics
                kept.append(output)

        return keep


class HookedInStep(Hooked):
    """The step hangs its hooks itself, as OnlineLinearProbe does."""

    def __init__(self) -> None:
        super().__init__()
        for network in (self.student, self.teacher):
            network[3]._forward_hooks.clear()
            network[6]._forward_hooks.clear()

    def training_step(self, batch: Any, index: int) -> Any:
        with ExitStack() as stack:
            for name, kept in self.features.items():
                for layer in self.layers:
                    part = getattr(self, name).get_submodule(layer)
                    hook = part.register_forward_hook(self.keeping(kept[layer]))
                    stack.enter_context(hook)
            return super().training_step(batch, index)


class HookedFeeds(Hooked):
    """What a hook keeps goes into another head of the network."""

    student_names = ("student", "head")
    teacher_names: tuple[str, ...] = ()
    layers = ("3",)

    def __init__(self) -> None:
        super().__init__()
        del self.teacher
        self.head = nn.Linear(4, NUM_CLASSES)

    def training_step(self, batch: Any, _index: int) -> Any:
        x, y = batch
        made = self.student(x)
        feature = self.kept("student", "3")
        return F.cross_entropy(self.head(feature.flatten(2).mean(2)), y) + F.cross_entropy(made, y)


class HookedFed(Hooked):
    """The student reads what its teacher gives, and what a hook of the teacher keeps."""

    def training_step(self, batch: Any, _index: int) -> Any:
        x, y = batch
        ema_by_hand(self.teacher, self.student)
        quiet, early = self.teacher(x), self.kept("teacher", "3")
        mask = early.mean((1, 2, 3)).argsort().argsort() / len(x)
        logits = self.student(x * mask[:, None, None, None] + quiet.softmax(0).mean())
        loss = F.cross_entropy(logits, y) + F.mse_loss(self.kept("student", "3"), early)
        return loss + F.mse_loss(self.kept("student", "6"), self.kept("teacher", "6"))


class HookThatChanges(Hooked):
    """One hook keeps, another one doubles what its layer returns, within the network."""

    def __init__(self) -> None:
        super().__init__()
        for network in (self.student, self.teacher):
            network[8].register_forward_hook(lambda _module, _args, output: 2 * output)


class Keeper:
    """Keeps outputs by name."""

    def __init__(self) -> None:
        self.outputs: dict[str, Tensor] = {}

    def keep(self, name: str, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self.outputs[name] = output


class OfItself(nn.Module):
    """Returns what hooks in it have kept, as some of timm's feature extractors."""

    def __init__(self) -> None:
        super().__init__()
        self.net = encoder("batch", nn.ReLU(), nn.Linear(6, NUM_CLASSES))
        self.keeper = Keeper()
        for name in ("3", "6"):
            self.net.get_submodule(name).register_forward_hook(partial(self.keeper.keep, name))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """The logits, and what was kept."""
        return self.net(x), *self.keeper.outputs.values()


class HooksOfItself(Classifying):
    """A network that reads its own hooks."""

    teacher_names: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.student = OfItself()

    def training_step(self, batch: Any, _index: int) -> Any:
        x, y = batch
        logits, early, late = self.student(x)
        return F.cross_entropy(logits, y) + early.square().mean() + late.square().mean()


class Extracted(Classifying):
    """torchvision's feature extractors of both networks."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models.feature_extraction import create_feature_extractor  # noqa: PLC0415

        network = encoder("batch", nn.ReLU(), nn.Linear(6, NUM_CLASSES))
        self.student = create_feature_extractor(network, {"3": "early", "10": "late"})
        self.teacher = frozen_copy(self.student)

    def training_step(self, batch: Any, _index: int) -> Any:
        x, y = batch
        ema_by_hand(self.teacher, self.student)
        own, other = self.student(x), self.teacher(x)
        loss: Tensor = F.mse_loss(own["early"], other["early"])
        return loss + F.cross_entropy(own["late"], y)


HOOKED: dict[str, type[Classifying]] = {
    kind.__name__: kind
    for kind in (
        Hooked, HookedInputs, HookedNorms, HookedInStep, HookedFeeds, HookedFed,
        HookThatChanges, HooksOfItself, Extracted,
    )
}  # fmt: skip


class Written(Hooked):
    """The layer's output is overwritten by the one behind it."""

    layers = ("1",)


class KeepsAndChanges(Hooked):
    """A hook that keeps what it gets, and changes it."""

    def keeping(self, kept: list[Any]) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
            kept.append(output)
            return 2 * output

        return keep


class WritesOutputs(Hooked):
    """The step writes into what a hook kept."""

    def keeping(self, kept: list[Any]) -> Any:
        return lambda _module, _args, output: kept.append(output.mul_(2))


class Leaves(Hooked):
    """A hook leaves the network in the middle."""

    def keeping(self, kept: list[Any]) -> Any:
        def leave(_module: nn.Module, _args: Any, output: Tensor) -> None:
            kept.append(output)
            raise StopIteration

        return leave


REFUSED: dict[type[Hooked], str] = {
    Written: "writes into afterwards",
    KeepsAndChanges: "a forward hook that changes what a part returns",
    WritesOutputs: "writes into what a pipelined network returned",
    Leaves: "leaves the network",
}


def case(name: str) -> Classifying:
    torch.manual_seed(0)
    return HOOKED[name]()
