"""Documents as packed sequences of tokens, for language models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

NO_LABEL = -100
END = 256  # behind the bytes

Encode = Callable[[str], list[int]]


def encode_bytes(text: str) -> list[int]:
    """A token for each byte, and one for the end."""
    return [*text.encode(), END]


def encoder_of(tokenizer: str | None) -> Encode:
    """How texts become tokens.

    Args:
        tokenizer: A folder, or a name on the Hugging Face hub; None: a token is a byte.
    """
    if tokenizer is None:
        return encode_bytes
    from transformers import AutoTokenizer  # noqa: PLC0415 - real tokenizers only

    made = AutoTokenizer.from_pretrained(tokenizer)
    return lambda text: [*made.encode(text, add_special_tokens=False), made.eos_token_id]


def documents_of(path: str) -> list[str]:
    """The parts of a text file, or of all Markdown and text files of a folder, by empty lines."""
    found = Path(path)
    files = [found] if found.is_file() else sorted([*found.rglob("*.md"), *found.rglob("*.txt")])
    if not files:
        message = f"{path} is neither a text file nor a folder with .md or .txt files"
        raise FileNotFoundError(message)
    texts = (part for file in files for part in file.read_text(encoding="utf-8").split("\n\n"))
    return [text for text in texts if text.strip()]


def packed(documents: Iterable[Sequence[int]], length: int) -> TensorDataset:
    """Sequences of one length, each of several documents behind each other.

    The positions of a document begin with 0, by which models of transformers see where it begins:
    its tokens attend to none of another. The last token of a document has no label.

    Args:
        documents: The tokens of each.
        length: Tokens of a sequence; what is longer goes on in the next one.

    Returns:
        Tokens, positions and labels, each of shape (sequences, length).
    """
    rows = [
        (token, place, following)
        for tokens in documents
        for place, (token, following) in enumerate(
            zip(tokens, [*tokens[1:], NO_LABEL], strict=True)
        )
    ]
    whole = torch.tensor(rows[: len(rows) // length * length]).view(-1, length, 3)
    tokens, positions, labels = (part.contiguous() for part in whole.unbind(-1))
    return TensorDataset(tokens, _restarted(positions), labels)


def _restarted(positions: Tensor) -> Tensor:
    """The positions of a document that goes on from the sequence before begin anew."""
    goes_on = (positions == 0).cumsum(1) == 0
    return torch.where(goes_on, torch.arange(positions.shape[1]), positions)


def tokens_of(batch: Sequence[Tensor]) -> int:
    """How many tokens a batch of packed sequences has."""
    return batch[0].numel()
