"""Steps whose networks read one parameter in several places: what the pipeline has to tie."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from tests.exactness.modules import NUM_CLASSES, Residual, Trained, ema_by_hand, frozen_copy

WORDS, WIDTH, LENGTH = 9, 6, 4


class Trunk(nn.Module):
    """Token numbers (n, t) to features (n, t, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(*(Residual(WIDTH) for _ in range(3)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.layers(self.words(tokens)))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """Token numbers (n, t) to logits (n, t, words), by one table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.trunk.words.weight
        self.kind = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.trunk(tokens))  # type: ignore[no-any-return]


def next_words(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Tied(Trained):
    """A language model whose embedding and head share their weight."""

    teacher_names: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.student: Any = LanguageModel()
        del self.student.kind

    def training_step(self, batch: Any, _index: int) -> Any:
        return next_words(self.student(batch), batch)

    def batch(self, size: int, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(WORDS, (size, LENGTH), generator=generator)


class TiedBesideTheLoss(Tied):
    """The head is where the loss is, and the embedding at the beginning of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.head = self.student.head
        self.student = self.student.trunk

    def training_step(self, batch: Any, _index: int) -> Any:
        return next_words(self.head(self.student(batch).tanh()), batch)


class TiedFirst(TiedBesideTheLoss):
    """The same, where the parameter goes by the head's name."""

    def __init__(self) -> None:
        super().__init__()
        self.student = self._modules.pop("student")


class TiedAverage(Tied):
    """Distilled from its average, whose weights are tied too."""

    teacher_names = ("teacher",)

    def __init__(self) -> None:
        super().__init__()
        self.teacher = frozen_copy(self.student)

    def training_step(self, batch: Any, index: int) -> Any:
        ema_by_hand(self.teacher, self.student)
        quiet = self.teacher(batch).softmax(-1)
        made = self.student(batch)
        return next_words(made, batch) + (made.softmax(-1) - quiet).square().mean()


class Penalised(TiedAverage):
    """The loss has a hand-written penalty for all weights."""

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        return loss + 0.01 * sum(weight.abs().sum() for weight in self.student.parameters())


class TiedWithTwoHeads(Tied):
    """Two ways through one trunk, of which one ends in its first parameter."""

    student_names = ("trunk", "head", "kind")

    def __init__(self) -> None:
        super().__init__()
        whole = LanguageModel()
        del self.student
        self.trunk, self.head, self.kind = whole.trunk, whole.head, whole.kind

    def training_step(self, batch: Any, _index: int) -> Any:
        loss = next_words(self.head(self.trunk(batch)), batch)
        return loss + F.cross_entropy(self.kind(self.trunk(batch.flip(1))).mean(1), batch[:, 0] % 4)


class SharedLayers(Tied):
    """One layer runs three times, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        layer = Residual(WIDTH)
        self.student.trunk.layers = nn.Sequential(layer, layer, layer)
        self.student.head.weight = nn.Parameter(torch.randn(WORDS, WIDTH))


class OfTransformers(Tied):
    """Llama, as Hugging Face's transformers has it; needs that."""

    def __init__(self) -> None:
        super().__init__()
        transformers = importlib.import_module("transformers")
        sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
        config = transformers.LlamaConfig(
            **sizes, vocab_size=WORDS, intermediate_size=16, max_position_embeddings=8,
            pad_token_id=None, tie_word_embeddings=True, use_cache=False,
        )  # fmt: skip
        self.student = transformers.LlamaForCausalLM(config)
        assert self.student.lm_head.weight is self.student.model.embed_tokens.weight

    def training_step(self, batch: Any, _index: int) -> Any:
        return next_words(self.student(batch).logits, batch)


TIED = {
    kind.__name__: kind
    for kind in (
        Tied, TiedBesideTheLoss, TiedFirst, TiedAverage, TiedWithTwoHeads, SharedLayers,
        Penalised
    )
}  # fmt: skip
