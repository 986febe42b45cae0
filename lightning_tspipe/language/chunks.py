"""Logits of some tokens at a time, what is computed of them, and what a student learns by them.

The teacher's side comes in two forms: its whole distribution, made by its head of hidden states; or
its most likely words, and all others as one event, as :mod:`~lightning_tspipe.language.targets`
are kept. In the second, the student's distribution is summed to the same events::

    words      a    b    c    d    e    f          teacher's most likely 2: c, a
    events    └b─┘ └──────── rest ───┘             p(c), p(a), p(rest) = p(b) + p(d) + p(e) + p(f)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere
from typing_extensions import override

WORKING = 5
"""Arrays in work at once, of logits and of what is made of them: so a chunk's tokens are divided,
that together they take as much memory as two chunks."""

_NOTHING = -1e4
"""Log of the probability of an event without words: its ``exp`` is 0, and its multiples by 0 are
numbers."""


@dataclass(frozen=True)
class Head:
    """A network's head, on the hidden states of some tokens, shape (tokens, width)."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    def logits(self, words: slice) -> Tensor:
        """Over a part of the vocabulary, shape (tokens, words), at least in float32."""
        bias = None if self.bias is None else self.bias[words]
        made = F.linear(self.hidden, self.weight[words], bias)
        return made.to(torch.promote_types(made.dtype, torch.float32))


def top_k(head: Head, k: int, temperature: float) -> tuple[Tensor, Tensor]:
    """The k most likely words, and log probabilities of these and of all others together.

    Returns:
        Words, shape (tokens, k), and logs at the temperature, shape (tokens, k + 1).
    """
    logits = head.logits(slice(0, len(head.weight))).div_(temperature)
    most, words = logits.topk(k)
    rest = logits.scatter_(1, words, -math.inf).logsumexp(1, keepdim=True)
    return words.int(), torch.cat([most, rest], 1).log_softmax(1).clamp_(min=_NOTHING)


@dataclass(frozen=True)
class Divergence:
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


KINDS: Mapping[str, Divergence] = {
    "forward_kl": Divergence(
        lambda p, q: _summed((p - q).mul_(p.exp())), lambda p, _: p.exp().neg_(), total=-1.0
    ),
    "reverse_kl": Divergence(lambda p, q: _summed(_reverse(p, q)), _reverse),
    "jsd": Divergence(
        lambda p, q: _summed(_towards_middle(p, q)) + _summed(_towards_middle(q, p)),
        _towards_middle,
    ),
}


class Distribution:
    """A network's distribution over the words behind some tokens, for parts of the vocabulary.

    Args:
        head: Makes logits.
        labels: The word that follows, shape (tokens,).
        temperature: Above 0.
        size: Words of a part; None: all.

    Attributes:
        parts: Of the vocabulary.
        plain: Log of the sum over all words, shape (tokens, 1).
        warm: The same at the temperature.
        cross_entropy: Of the labels, shape (tokens, 1).
    """

    def __init__(self, head: Head, labels: Tensor, temperature: float, size: int | None) -> None:
        number = len(head.weight)
        size = size or number
        self.temperature = temperature
        self.parts = [slice(i, min(i + size, number)) for i in range(0, number, size)]
        self._head = head
        self._logs: Tensor | None = None  # if there is one part
        plain, warm, found = [], [], []
        for words in self.parts:
            logits = head.logits(words)
            plain.append(_logsumexp(logits, 1.0))
            warm.append(_logsumexp(logits, temperature))
            place, inside = places(labels[:, None], words)
            found.append(logits.gather(1, place) * inside)
            if len(self.parts) == 1:
                self._logs = logits
        self.plain, self.warm = (torch.stack(sums).logsumexp(0) for sums in (plain, warm))
        self.cross_entropy = self.plain - torch.stack(found).sum(0)
        if self._logs is not None:
            self._logs.div_(temperature).sub_(self.warm)

    def logs(self, words: slice) -> Tensor:
        """Log probabilities at the temperature, shape (tokens, words): kept, or made again."""
        if self._logs is not None:
            return self._logs
        return self._head.logits(words).div_(self.temperature).sub_(self.warm)


def places(words: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Of words their places in a part of the vocabulary, and whether they are there."""
    inside = (words >= part.start) & (words < part.stop)
    return (words - part.start).clamp(0, part.stop - part.start - 1), inside


def _logsumexp(logits: Tensor, temperature: float) -> Tensor:
    """Log of the sum of exponentials at a temperature, shape (tokens, 1)."""
    most = logits.amax(1, keepdim=True)
    made = (logits - most).div_(temperature).exp_().sum(1, keepdim=True).log_()
    return made.add_(most / temperature)


class Chunk(ABC):
    """Some tokens, whose logits are made for one part of the vocabulary after another.

    Args:
        student: Its distribution.
        labels: The word that follows, shape (tokens,).
        kind: Which divergence.
    """

    def __init__(self, student: Distribution, labels: Tensor, kind: Divergence) -> None:
        self.student, self.labels, self.kind = student, labels, kind
        self.dtype = student.plain.dtype

    @abstractmethod
    def divergence(self) -> Tensor:
        """Of each token, shape (tokens, 1)."""

    @abstractmethod
    def teacher_cross_entropy(self) -> Tensor:
        """Of each label, shape (tokens, 1); nan where it is not known."""

    @abstractmethod
    def pull(self, words: slice, own: Tensor) -> Tensor:
        """For a part of the vocabulary, of the student's logs there: the divergence's ``pull``."""

    @abstractmethod
    def total(self) -> Tensor | float:
        """The sum of ``pull`` over all words, shape (tokens, 1) or one for all tokens."""

    def values(self) -> Tensor:
        """For each token: the divergence, and the cross entropies, shape (tokens, 3)."""
        own, guide = self.student.cross_entropy, self.teacher_cross_entropy()
        return torch.cat([self.divergence(), own, guide], 1)

    def gradients(self, alpha: float) -> Iterator[tuple[slice, Tensor]]:
        """For each part of the vocabulary, the gradient of the loss by the student's logits.

        Of each token for itself, shape (tokens, words).
        """
        student, total = self.student, self.total()
        for words in student.parts:
            place, inside = places(self.labels[:, None], words)
            own = student.logs(words)
            made = self.pull(words, own)
            made.sub_(own.exp().mul_(total)).mul_(alpha * student.temperature)
            # Back to the student's distribution at temperature 1.
            own.add_(student.warm).mul_(student.temperature).sub_(student.plain).exp_()
            own.scatter_add_(1, place, -inside.to(own.dtype))
            yield words, made.add_(own, alpha=1 - alpha)


class WholeChunk(Chunk):
    """A chunk whose teacher's distribution is known whole.

    Args:
        teacher: Its distribution.
        student: The student's.
        labels: The word that follows, shape (tokens,).
        kind: Which divergence.
    """

    def __init__(
        self, teacher: Distribution, student: Distribution, labels: Tensor, kind: Divergence
    ) -> None:
        super().__init__(student, labels, kind)
        self._teacher = teacher

    @override
    def divergence(self) -> Tensor:
        return self._over_parts(self.kind.value)

    @override
    def teacher_cross_entropy(self) -> Tensor:
        return self._teacher.cross_entropy

    @override
    def pull(self, words: slice, own: Tensor) -> Tensor:
        return self.kind.pull(self._teacher.logs(words), own)

    @override
    def total(self) -> Tensor | float:
        if self.kind.total is not None:
            return self.kind.total
        return self._over_parts(lambda p, q: _summed(self.kind.pull(p, q)))

    def _over_parts(self, made: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        logs = ((self._teacher.logs(part), self.student.logs(part)) for part in self.student.parts)
        return torch.stack([made(*both) for both in logs]).sum(0)


class TopKChunk(Chunk):
    """A chunk of whose teacher the most likely words are known, and what is left for the others.

    Args:
        words: The teacher's most likely words, shape (tokens, k).
        logs: Of their probabilities, and of that of all others, shape (tokens, k + 1). They are
            normalised: stored in half precision, they may sum to a little more or less than 1.
        student: The student's distribution.
        labels: The word that follows, shape (tokens,).
        kind: Which divergence.
    """

    def __init__(
        self,
        words: Tensor,
        logs: Tensor,
        student: Distribution,
        labels: Tensor,
        kind: Divergence,
    ) -> None:
        super().__init__(student, labels, kind)
        self._words = words.long()
        self._teacher = logs.to(self.dtype).log_softmax(1)
        found, rest = [], []
        for part in student.parts:
            own = student.logs(part)
            place, inside = places(self._words, part)
            found.append(own.gather(1, place).where(inside, 0))
            rest.append(_others(own, place, inside).logsumexp(1, keepdim=True))
        self._rest = torch.stack(rest).logsumexp(0).clamp_(min=_NOTHING)
        self._own = torch.cat([torch.stack(found).sum(0), self._rest], 1)

    @override
    def divergence(self) -> Tensor:
        return self.kind.value(self._teacher, self._own)

    @override
    def teacher_cross_entropy(self) -> Tensor:
        return torch.full_like(self._rest, math.nan)

    @override
    def pull(self, words: slice, own: Tensor) -> Tensor:
        """An event's pull is that of its words, by their shares of it."""
        place, inside = places(self._words, words)
        pulls = self.kind.pull(self._teacher, self._own)
        made = _others(own, place, inside).sub_(self._rest).exp_().mul_(pulls[:, -1:])
        return made.scatter_add_(1, place, pulls[:, :-1].where(inside, 0))

    @override
    def total(self) -> Tensor | float:
        if self.kind.total is not None:
            return self.kind.total
        return _summed(self.kind.pull(self._teacher, self._own))


def _others(logs: Tensor, place: Tensor, inside: Tensor) -> Tensor:
    """The logs of all words but some, which get the probability 0."""
    least = torch.where(inside, -math.inf, math.inf).to(logs.dtype)
    return logs.scatter_reduce(1, place, least, "amin")
