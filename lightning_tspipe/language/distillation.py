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
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.language import fused
from lightning_tspipe.language.chunks import (
    KINDS,
    WORKING,
    Chunk,
    Distribution,
    Head,
    TopKChunk,
    WholeChunk,
    top_k,
)
from lightning_tspipe.language.targets import Targets, from_bits, log_probs_key

Kind = Literal["forward_kl", "reverse_kl", "jsd"]
Kernel = Literal["torch", "liger"]


class DistillationOutput(NamedTuple):
    """What :class:`DistillationLoss` returns: scalars, means over the tokens that have a label.

    Attributes:
        loss: What is to be minimized.
        divergence: Of the two distributions, at the temperature (in nats); without a gradient.
        cross_entropy: Of the student and the labels; its ``exp`` is the perplexity.
        teacher_cross_entropy: Of the teacher and the labels; nan where only its most likely words
            are known.
        num_tokens: How many have a label.
    """

    loss: Tensor
    divergence: Tensor
    cross_entropy: Tensor
    teacher_cross_entropy: Tensor
    num_tokens: Tensor


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
        kernel: What computes it: ``"torch"``, or ``"liger"`` (Liger's fused kernels, the extra
            ``liger``), which needs a GPU, chooses its own chunks and computes in float32.

    Raises:
        ConfigurationError: An argument is out of range, or the kernels are not installed.

    Example:
        >>> student, teacher = torch.nn.Linear(8, 50), torch.nn.Linear(16, 50)
        >>> loss = DistillationLoss(temperature=2.0)
        >>> hidden, guide = torch.randn(3, 7, 8), torch.randn(3, 7, 16)
        >>> labels = torch.randint(50, (3, 7))
        >>> loss(hidden, student, guide, teacher, labels).loss.shape
        torch.Size([])
    """

    def __init__(  # noqa: PLR0913 - what a loss of this kind has everywhere
        self,
        temperature: float = 1.0,
        alpha: float = 0.5,
        chunk_size: int | tuple[int, int] = 1024,
        ignore_index: int = -100,
        kind: Kind = "forward_kl",
        *,
        kernel: Kernel = "torch",
    ) -> None:
        super().__init__()
        tokens, words = (chunk_size, None) if isinstance(chunk_size, int) else chunk_size
        wrong = {
            f"temperature={temperature}: must be above 0": not 0 < temperature < math.inf,
            f"alpha={alpha}: must be from 0 to 1": not 0 <= alpha <= 1,
            f"chunk_size={chunk_size}: must be at least 1": min(tokens, words or 1) < 1,
            f"kind={kind!r}: must be one of {', '.join(map(repr, KINDS))}": kind not in KINDS,
            f"kernel={kernel!r}: must be 'torch' or 'liger'": kernel not in {"torch", "liger"},
        }
        for reason, is_wrong in wrong.items():
            if is_wrong:
                raise ConfigurationError(reason)
        self.temperature, self.alpha, self.ignore_index = temperature, alpha, ignore_index
        self.chunk_size, self.kernel = (tokens, words), kernel
        self.kind: str = kind
        if kernel == "liger":
            fused.check_installed()

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
        own, guide = hidden.flatten(0, -2), teacher_hidden.detach().flatten(0, -2)
        found: Any
        if self.kernel == "liger" and fused.serves(hidden, labels, self.ignore_index):
            fused.check(hidden, head, teacher_head)
            both = Head(own, head.weight, None), Head(guide, teacher_head.weight, None)
            found = fused.fused(self, *both, labels.flatten())
        else:
            found = _Chunked.apply(
                own, head.weight, head.bias, labels.flatten(), self, self._whole,
                guide, teacher_head.weight, teacher_head.bias,
            )  # fmt: skip
        return DistillationOutput._make((*found, (labels != self.ignore_index).sum()))

    def kept(
        self, hidden: Tensor, head: nn.Linear, targets: Any, labels: Tensor
    ) -> DistillationOutput:
        """The loss of some tokens by a teacher's most likely words, which have been kept.

        The divergence is that of k + 1 events, of each word and of all others together, so at most
        that of the whole distributions; and the same, where k is all words.

        Args:
            hidden: As above.
            head: As above.
            targets: A batch of what :class:`WithTargets` gives, for the same tokens.
            labels: As above.

        Raises:
            ConfigurationError: The targets were made at another temperature, for another
                vocabulary or other tokens; or they are hidden states.
        """
        _check_states("student", hidden, head, labels)
        key = log_probs_key(self.temperature, head.out_features)
        if not isinstance(targets, Mapping) or key not in targets:
            found = ", ".join(targets) if isinstance(targets, Mapping) else "hidden states"
            raise ConfigurationError(
                f"kept targets are {found}, but this loss and head need {key}. Keep targets at "
                "the temperature of the loss, by a teacher with the student's tokenizer; hidden "
                "states go where the teacher's would: loss(hidden, head, targets, kept.head, "
                "labels)"
            )
        words, bits = targets["words"], targets[key]
        if words.shape[:-1] != labels.shape or bits.shape[:-1] != labels.shape:
            raise ConfigurationError(
                f"kept targets are of tokens of shape {tuple(words.shape[:-1])}, but there are "
                f"labels of shape {tuple(labels.shape)}: leave out the same tokens in both"
            )
        made = _Chunked.apply(
            hidden.flatten(0, -2), head.weight, head.bias, labels.flatten(), self, self._top_k,
            words.flatten(0, -2), bits.flatten(0, -2),
        )  # fmt: skip
        return DistillationOutput._make((*made, (labels != self.ignore_index).sum()))

    @torch.no_grad()
    def targets(
        self, tokens: Tensor, hidden: Tensor, head: nn.Linear, k: int | None = None
    ) -> Targets:
        """What a teacher says of some samples, for ``predict_step`` to return.

        Args:
            tokens: The samples, shape (samples, tokens).
            hidden: The teacher's last hidden states, shape (samples, tokens, width).
            head: Its head.
            k: Its k most likely words are kept, at the loss's temperature, and how likely all
                others are together; None: hidden states, and the head once.

        Raises:
            ConfigurationError: The shapes don't fit, or there are fewer than k words.
        """
        _check_states("teacher", hidden, head, tokens)
        number = head.out_features
        if tokens.dim() != 2:
            raise ConfigurationError(
                f"tokens have shape {tuple(tokens.shape)}; targets are kept by sample, so they "
                "need (samples, tokens)"
            )
        if k is None:
            return Targets.of_hidden(tokens, hidden, head)
        if not 1 <= k <= number:
            raise ConfigurationError(f"k={k}: must be from 1 to the {number} words of the head")
        few, part = self.chunk_size
        rows = max(1, 2 * few * (part or number) // (WORKING * number))
        made = [
            top_k(Head(some, head.weight, head.bias), k, self.temperature)
            for some in hidden.flatten(0, -2).split(rows)
        ]
        both = (torch.cat(parts) for parts in zip(*made, strict=True))
        words, logs = (part.unflatten(0, tokens.shape) for part in both)
        return Targets.of_words(tokens, words, logs, self.temperature, number)

    def _distribution(self, head: Head, labels: Tensor) -> Distribution:
        return Distribution(head, labels, self.temperature, self.chunk_size[1])

    def _whole(self, student: Head, labels: Tensor, rows: slice, *given: Tensor) -> Chunk:
        guide, weight, bias = given
        teacher = self._distribution(Head(guide[rows], weight, bias), labels)
        own = self._distribution(student, labels)
        return WholeChunk(teacher, own, labels, KINDS[self.kind])

    def _top_k(self, student: Head, labels: Tensor, rows: slice, *given: Tensor) -> Chunk:
        words, bits = given
        own = self._distribution(student, labels)
        return TopKChunk(words[rows], from_bits(bits[rows]), own, labels, KINDS[self.kind])

    @override
    def extra_repr(self) -> str:
        return (
            f"temperature={self.temperature}, alpha={self.alpha}, chunk_size={self.chunk_size}, "
            f"ignore_index={self.ignore_index}, kind={self.kind!r}, kernel={self.kernel!r}"
        )


def _check(
    hidden: Tensor, head: nn.Linear, guide: Tensor, guide_head: nn.Linear, labels: Tensor
) -> None:
    """Refuse what would be broadcast, or compared word by other word."""
    _check_states("student", hidden, head, labels)
    _check_states("teacher", guide, guide_head, labels)
    if head.out_features != guide_head.out_features:
        raise ConfigurationError(
            f"the student has {head.out_features} words, and the teacher {guide_head.out_features}:"
            " both need the same tokenizer. If one table is only padded further, cut it with "
            "resize_token_embeddings"
        )


def _check_states(name: str, states: Tensor, layer: nn.Linear, labels: Tensor) -> None:
    if states.shape[:-1] != labels.shape or states.shape[-1] != layer.in_features:
        raise ConfigurationError(
            f"hidden states of the {name} have shape {tuple(states.shape)}; with labels of "
            f"shape {tuple(labels.shape)} and a head of {layer.in_features} inputs they need "
            f"{(*labels.shape, layer.in_features)}. Leave out the last token, which has no "
            "next one, in all of them"
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
        labels: Tensor,
        loss: DistillationLoss,
        chunk_of: Callable[..., Chunk],
        *given: Tensor | None,
    ) -> tuple[Tensor, ...]:
        trained, wanted = (hidden, weight, bias), ctx.needs_input_grad[:3]
        gradients = [
            _zeros(x) if x is not None and need else None
            for x, need in zip(trained, wanted, strict=True)
        ]
        counts = labels != loss.ignore_index
        number = counts.sum().clamp(min=1)
        totals = []
        tokens = max(1, 2 * loss.chunk_size[0] // WORKING)
        for start in range(0, len(hidden), tokens):
            rows = slice(start, start + tokens)
            student, following = Head(hidden[rows], weight, bias), labels[rows]
            chunk = chunk_of(student, following.where(counts[rows], 0), rows, *given)
            factor = counts[rows, None].to(chunk.dtype) / number
            totals.append((chunk.values() * factor).sum(0))
            if any(wanted):
                made = chunk.gradients(loss.alpha)
                _add(gradients, made, rows, factor, hidden[rows], weight)
        found = torch.stack(totals).sum(0) if totals else hidden.new_zeros(3)
        divergence, own, guides = found.unbind()
        ctx.gradients = [
            g.to(x.dtype) if x is not None and g is not None else None
            for g, x in zip(gradients, trained, strict=True)
        ]
        ctx.others = 3 + len(given)
        whole = loss.alpha * loss.temperature**2 * divergence + (1 - loss.alpha) * own
        ctx.mark_non_differentiable(divergence, own, guides)
        return whole, divergence, own, guides

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        own = (g if g is None else g * given[0].to(g.dtype) for g in ctx.gradients)
        return (*own, *(None,) * ctx.others)


def _add(  # noqa: PLR0913, PLR0917 - two sums of products, of two networks' numbers
    gradients: list[Tensor | None],
    parts: Iterable[tuple[slice, Tensor]],
    rows: slice,
    factor: Tensor,
    hidden: Tensor,
    weight: Tensor,
) -> None:
    """Add what a chunk gives to the gradients of all hidden states, the weight and the bias."""
    by_hidden, by_weight, by_bias = gradients
    for words, made in parts:
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
