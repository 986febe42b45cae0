"""The loss of a language model that learns from another one, without all of their logits at once.

Logits have as many numbers as there are tokens times words: 8,192 tokens of 128,256 words take
4.2 GB in float32, for each of the two networks, and as much for each gradient. Here the heads of
both networks are part of the loss. It works on a *chunk* of logits at a time: for the sums over the
vocabulary, for the divergence, and for gradients. A chunk of the whole vocabulary is made once::

    hidden states of a few tokens ─► logits over a part of the vocabulary ─► sums, loss, gradients

Gradients are computed along with the loss (Hsu et al., *Liger Kernel*, 2024, section 3.2), so that
a backward has nothing to repeat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812 - as everywhere
from typing_extensions import override

from lightning_tspipe.errors import ConfigurationError

Kind = Literal["forward_kl", "reverse_kl", "jsd"]

_WORKING = 5
"""Arrays in work at once, of logits and of what is made of them: so a chunk's tokens are divided,
that together they take as much memory as two chunks."""


class DistillationOutput(NamedTuple):
    """What :class:`DistillationLoss` returns: scalars, means over the tokens that have a label.

    Attributes:
        loss: What is to be minimized.
        divergence: Of the two distributions, at the temperature (in nats); without a gradient.
        cross_entropy: Of the student and the labels; its ``exp`` is the perplexity.
        teacher_cross_entropy: Of the teacher and the labels.
    """

    loss: Tensor
    divergence: Tensor
    cross_entropy: Tensor
    teacher_cross_entropy: Tensor


class DistillationLoss(nn.Module):
    """Cross entropy, and the divergence from a teacher's distribution over the next word.

    ``alpha * T**2 * D(teacher, student) + (1 - alpha) * cross entropy`` (Hinton et al.,
    *Distilling the Knowledge in a Neural Network*, 2015, section 2), means over the tokens whose
    label isn't ``ignore_index``. With p of the teacher and q of the student, both at the
    temperature T, D is

    * ``forward_kl``: KL(p || q), which covers all that the teacher finds likely;
    * ``reverse_kl``: KL(q || p), which keeps to what it finds most likely (Gu et al., *MiniLLM*,
      ICLR 2024, section 2.1);
    * ``jsd``: (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2 (Agarwal et al., *GKD*, ICLR 2024,
      section 2).

    Args:
        temperature: T, above 0.
        alpha: Weight of the divergence, from 0 to 1.
        chunk_size: Tokens of a chunk of logits; or tokens and words, which takes less memory and
            more time. All logits that are in memory at a time, and what is made of them, take no
            more than two chunks.
        ignore_index: Label of tokens that don't count.
        kind: Which divergence.

    Raises:
        ConfigurationError: An argument is out of range.

    Example:
        >>> student, teacher = torch.nn.Linear(8, 50), torch.nn.Linear(16, 50)
        >>> loss = DistillationLoss(temperature=2.0)
        >>> hidden, guide = torch.randn(3, 7, 8), torch.randn(3, 7, 16)
        >>> labels = torch.randint(50, (3, 7))
        >>> loss(hidden, student, guide, teacher, labels).loss.shape
        torch.Size([])
    """

    def __init__(
        self,
        temperature: float = 1.0,
        alpha: float = 0.5,
        chunk_size: int | tuple[int, int] = 1024,
        ignore_index: int = -100,
        kind: Kind = "forward_kl",
    ) -> None:
        super().__init__()
        tokens, words = (chunk_size, None) if isinstance(chunk_size, int) else chunk_size
        wrong = {
            f"temperature={temperature}: must be above 0": not 0 < temperature < math.inf,
            f"alpha={alpha}: must be from 0 to 1": not 0 <= alpha <= 1,
            f"chunk_size={chunk_size}: must be at least 1": min(tokens, words or 1) < 1,
            f"kind={kind!r}: must be one of {', '.join(map(repr, _KINDS))}": kind not in _KINDS,
        }
        for reason, is_wrong in wrong.items():
            if is_wrong:
                raise ConfigurationError(reason)
        self.temperature, self.alpha, self.ignore_index = temperature, alpha, ignore_index
        self.chunk_size, self.kind = (tokens, words), kind

    @override
    def forward(
        self,
        hidden: Tensor,
        head: nn.Linear,
        teacher_hidden: Tensor,
        teacher_head: nn.Linear,
        labels: Tensor,
    ) -> DistillationOutput:
        """The loss of some tokens; gradients go to the student's hidden states and head.

        Args:
            hidden: Last hidden states of the student, shape (..., width).
            head: Its head, a linear layer from its width to the vocabulary.
            teacher_hidden: Of the teacher, shape (..., its width).
            teacher_head: Its head.
            labels: The word that follows each token, shape (...), or ``ignore_index``.

        Raises:
            ConfigurationError: The shapes or vocabularies don't fit.
        """
        _check(hidden, head, teacher_hidden, teacher_head, labels)
        found = _Chunked.apply(
            hidden.flatten(0, -2), head.weight, head.bias,
            teacher_hidden.detach().flatten(0, -2), teacher_head.weight, teacher_head.bias,
            labels.flatten(), self,
        )  # fmt: skip
        return DistillationOutput(*found)

    @override
    def extra_repr(self) -> str:
        return (
            f"temperature={self.temperature}, alpha={self.alpha}, chunk_size={self.chunk_size}, "
            f"ignore_index={self.ignore_index}, kind={self.kind!r}"
        )


def _check(
    hidden: Tensor, head: nn.Linear, guide: Tensor, guide_head: nn.Linear, labels: Tensor
) -> None:
    """Refuse what would be broadcast, or compared word by other word."""
    for name, states, layer in (("student", hidden, head), ("teacher", guide, guide_head)):
        if states.shape[:-1] != labels.shape or states.shape[-1] != layer.in_features:
            raise ConfigurationError(
                f"hidden states of the {name} have shape {tuple(states.shape)}; with labels of "
                f"shape {tuple(labels.shape)} and a head of {layer.in_features} inputs they need "
                f"{(*labels.shape, layer.in_features)}. Leave out the last token, which has no "
                "next one, in all of them"
            )
    if head.out_features != guide_head.out_features:
        raise ConfigurationError(
            f"the student has {head.out_features} words, and the teacher {guide_head.out_features}:"
            " both need the same tokenizer. If one table is only padded further, cut it with "
            "resize_token_embeddings"
        )


class _Chunked(Function):
    """The loss and its parts; gradients are computed right away."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        guide: Tensor,
        guide_weight: Tensor,
        guide_bias: Tensor | None,
        labels: Tensor,
        loss: DistillationLoss,
    ) -> tuple[Tensor, ...]:
        trained, wanted = (hidden, weight, bias), ctx.needs_input_grad[:3]
        gradients = [
            _zeros(x) if x is not None and need else None
            for x, need in zip(trained, wanted, strict=True)
        ]
        counts = labels != loss.ignore_index
        number = counts.sum().clamp(min=1)
        totals = []
        tokens = max(1, 2 * loss.chunk_size[0] // _WORKING)
        for start in range(0, len(hidden), tokens):
            rows = slice(start, start + tokens)
            chunk = _Chunk(
                _Head(hidden[rows], weight, bias), _Head(guide[rows], guide_weight, guide_bias),
                labels[rows].where(counts[rows], 0), loss,
            )  # fmt: skip
            factor = counts[rows, None].to(chunk.dtype) / number
            totals.append((chunk.values() * factor).sum(0))
            if any(wanted):
                _add(gradients, chunk, rows, factor, hidden[rows], weight)
        found = torch.stack(totals).sum(0) if totals else hidden.new_zeros(3)
        divergence, own, guides = found.unbind()
        ctx.gradients = [
            g.to(x.dtype) if x is not None and g is not None else None
            for g, x in zip(gradients, trained, strict=True)
        ]
        made = loss.alpha * loss.temperature**2 * divergence + (1 - loss.alpha) * own
        ctx.mark_non_differentiable(divergence, own, guides)
        return made, divergence, own, guides

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        own = (g if g is None else g * given[0].to(g.dtype) for g in ctx.gradients)
        return (*own, *(None,) * 5)


def _add(  # noqa: PLR0913, PLR0917 - two sums of products, of two networks' numbers
    gradients: list[Tensor | None],
    chunk: _Chunk,
    rows: slice,
    factor: Tensor,
    hidden: Tensor,
    weight: Tensor,
) -> None:
    """Add what a chunk gives to the gradients of all hidden states, the weight and the bias."""
    by_hidden, by_weight, by_bias = gradients
    for words, made in chunk.gradients():
        made.mul_(factor)
        if by_bias is not None:
            by_bias[words] += made.sum(0)
        given = made.to(hidden.dtype)
        if by_hidden is not None:
            by_hidden[rows] += given @ weight[words]
        if by_weight is not None:
            by_weight[words] += given.T @ hidden


def _zeros(like: Tensor) -> Tensor:
    """For a sum of gradients: at least in float32, since there are many."""
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))


@dataclass(frozen=True)
class _Head:
    """A network's head, on the hidden states of some tokens, shape (tokens, width)."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    def logits(self, words: slice) -> Tensor:
        """Over a part of the vocabulary, shape (tokens, words), at least in float32."""
        bias = None if self.bias is None else self.bias[words]
        made = F.linear(self.hidden, self.weight[words], bias)
        return made.to(torch.promote_types(made.dtype, torch.float32))


@dataclass(frozen=True)
class _Divergence:
    """A divergence of the student's distribution q from the teacher's p, over one part of words.

    Its gradient by the student's logits, at the temperature, is ``c - q * sum(c)``.

    Attributes:
        value: Its sum over the words, shape (tokens, 1), of the logs of p and q.
        pull: c, shape (tokens, words), of the logs of p and q.
        total: The sum of c over all words, if it is always the same.
    """

    value: Callable[[Tensor, Tensor], Tensor]
    pull: Callable[[Tensor, Tensor], Tensor]
    total: float | None = None


def _summed(made: Tensor) -> Tensor:
    return made.sum(1, keepdim=True)


def _reverse(p: Tensor, q: Tensor) -> Tensor:
    return (q - p).mul_(q.exp())


def _towards_middle(p: Tensor, q: Tensor) -> Tensor:
    """Half of ``q (log q - log m)``, where m is the middle of both."""
    middle = torch.logaddexp(p, q).sub_(math.log(2))
    return middle.neg_().add_(q).mul_(q.exp()).mul_(0.5)


_KINDS: Mapping[str, _Divergence] = {
    "forward_kl": _Divergence(
        lambda p, q: _summed((p - q).mul_(p.exp())), lambda p, _: p.exp().neg_(), total=-1.0
    ),
    "reverse_kl": _Divergence(lambda p, q: _summed(_reverse(p, q)), _reverse),
    "jsd": _Divergence(
        lambda p, q: _summed(_towards_middle(p, q)) + _summed(_towards_middle(q, p)),
        _towards_middle,
    ),
}


class _Chunk:
    """Some tokens, whose logits are made for one part of the vocabulary after another.

    Args:
        student: Its head.
        teacher: Its head.
        targets: The word that follows, shape (tokens,).
        loss: The settings.
    """

    def __init__(
        self, student: _Head, teacher: _Head, targets: Tensor, loss: DistillationLoss
    ) -> None:
        self._heads, self._targets, self._loss = (teacher, student), targets, loss
        self._kind = _KINDS[loss.kind]
        number = len(student.weight)
        size = loss.chunk_size[1] or number
        self._parts = [slice(i, min(i + size, number)) for i in range(0, number, size)]
        self._kept: list[Tensor] | None = None  # if there is one part, its logs
        self._sums = self._all_sums()
        self.dtype = self._sums[0][0].dtype

    def _all_sums(self) -> list[list[Tensor]]:
        """Of each network: log of the sum over all words, plain and at the temperature; targets'.

        All have shape (tokens, 1).
        """
        sums: list[list[list[Tensor]]] = [[[], [], []] for _ in self._heads]
        for words in self._parts:
            place, inside = self._place(words)
            for head, (plain, warm, targets) in zip(self._heads, sums, strict=True):
                logits = head.logits(words)
                plain.append(_logsumexp(logits, 1.0))
                warm.append(_logsumexp(logits, self._loss.temperature))
                targets.append(logits.gather(1, place) * inside)
                if len(self._parts) == 1:
                    self._kept = [*(self._kept or []), logits]
        found = [
            [torch.stack(plain).logsumexp(0), torch.stack(warm).logsumexp(0),
             torch.stack(targets).sum(0)]
            for plain, warm, targets in sums
        ]  # fmt: skip
        for made, (_, total, _) in zip(self._kept or [], found, strict=False):
            made.div_(self._loss.temperature).sub_(total)
        return found

    def _place(self, words: slice) -> tuple[Tensor, Tensor]:
        """Of each target its place in a part of the vocabulary, and whether it is there."""
        inside = (self._targets >= words.start) & (self._targets < words.stop)
        place = (self._targets - words.start).clamp(0, words.stop - words.start - 1)
        return place[:, None], inside[:, None]

    def _logs(self, words: slice) -> list[Tensor]:
        """Log probabilities at the temperature, of the teacher and the student."""
        if self._kept is not None:
            return self._kept
        return [
            head.logits(words).div_(self._loss.temperature).sub_(warm)
            for head, (_, warm, _) in zip(self._heads, self._sums, strict=True)
        ]

    def values(self) -> Tensor:
        """For each token: the divergence, and the cross entropies, shape (tokens, 3)."""
        divergence = torch.stack([self._kind.value(*self._logs(words)) for words in self._parts])
        (guide, _, guide_target), (own, _, own_target) = self._sums
        return torch.cat([divergence.sum(0), own - own_target, guide - guide_target], 1)

    def gradients(self) -> Iterator[tuple[slice, Tensor]]:
        """For each part of the vocabulary, the gradient of the loss by the student's logits.

        Of each token for itself, shape (tokens, words).
        """
        loss, kind, (_, (plain, warm, _)) = self._loss, self._kind, self._sums
        total: Tensor | float | None = kind.total
        if total is None:
            pulls = [_summed(kind.pull(*self._logs(words))) for words in self._parts]
            total = torch.stack(pulls).sum(0)
        for words in self._parts:
            place, inside = self._place(words)
            teacher, own = self._logs(words)
            made = kind.pull(teacher, own)
            del teacher
            made.sub_(own.exp().mul_(total)).mul_(loss.alpha * loss.temperature)
            # Back to the student's distribution at temperature 1.
            own.add_(warm).mul_(loss.temperature).sub_(plain).exp_()
            own.scatter_add_(1, place, -inside.to(own.dtype))
            yield words, made.add_(own, alpha=1 - loss.alpha)


def _logsumexp(logits: Tensor, temperature: float) -> Tensor:
    """Log of the sum of exponentials at a temperature, shape (tokens, 1)."""
    most = logits.amax(1, keepdim=True)
    made = (logits - most).div_(temperature).exp_().sum(1, keepdim=True).log_()
    return made.add_(most / temperature)
