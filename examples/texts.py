"""Sentences as lists of tokens: of a text file, or made up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from torch.utils.data import Dataset

PAD, MASK, UNKNOWN = range(3)
NUM_SPECIAL = 3


class Vocabulary:
    """A token for each frequent word.

    Args:
        lines: Where words are counted.
        size: Tokens, with those for padding, the mask and unknown words.
    """

    def __init__(self, lines: Sequence[str], size: int) -> None:
        counts = Counter(word for line in lines for word in line.split())
        frequent = counts.most_common(size - NUM_SPECIAL)
        self.tokens = {word: NUM_SPECIAL + index for index, (word, _) in enumerate(frequent)}

    def encode(self, line: str) -> list[int]:
        """The tokens of a sentence."""
        return [self.tokens.get(word, UNKNOWN) for word in line.split()]


class Sentences(Dataset[list[int]]):
    """Sentences, cut off where they are too long.

    Args:
        lines: One sentence each.
        vocabulary: Its tokens.
        max_length: Tokens that are kept.
    """

    def __init__(self, lines: Sequence[str], vocabulary: Vocabulary, max_length: int) -> None:
        encoded = (vocabulary.encode(line)[:max_length] for line in lines)
        self.sentences = [tokens for tokens in encoded if tokens]

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> list[int]:
        return self.sentences[index]


def lines_of(file: str) -> list[str]:
    """The sentences of a text file, in lower case."""
    return Path(file).read_text(encoding="utf-8").lower().splitlines()


def generated(number: int = 1000, num_words: int = 100) -> list[str]:
    """Sentences of a made-up language, in which each word suggests the next one."""
    draw = random.Random(0)  # noqa: S311 - made-up words, no secrets
    follows = [[draw.randrange(num_words) for _ in range(4)] for _ in range(num_words)]
    lines = []
    for _ in range(number):
        words = [draw.randrange(num_words)]
        while len(words) < 4 or (len(words) < 16 and draw.random() < 0.9):
            words.append(draw.choice(follows[words[-1]]))
        lines.append(" ".join(f"w{word}" for word in words))
    return lines
