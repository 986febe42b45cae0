"""Fine-tuning of BERT for the sentiment of sentences (SST-2), while its layers freeze.

The classifier is Hugging Face's, called as one calls it. ``FreezeAndRepack`` freezes layers between
epochs, ``AutoCache`` keeps what they return for each sentence; the configuration names both.
``python examples/finetune_text.py --fast`` trains on sentences that are made up, ``python
examples/finetune_text.py fit --config examples/configs/finetune_text.yaml`` on files of yours with
a sentence, a tab and a label on each line, as SST-2 has them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from running import run
from texts import PAD, Vocabulary, generated
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification

from lightning_tspipe.caching import WithIds


class Sentiment(LightningModule):
    """A classifier of sentences.

    Args:
        vocabulary_size: Tokens.
        num_layers: Of BERT; 12 of width 768 are its base size.
        width: Of each layer.
        max_length: Tokens of a sentence.
        weights: File of a state dict to start from; None: it has learned nothing.
        dropout: Share of activations that are dropped in layers that are trained.
        lr: Of AdamW.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the settings of the method
        self,
        vocabulary_size: int = 2000,
        num_layers: int = 4,
        width: int = 64,
        max_length: int = 32,
        weights: str | None = None,
        dropout: float = 0.1,
        lr: float = 5e-4,
    ) -> None:
        super().__init__()
        self.lr = lr
        config = BertConfig(
            vocab_size=vocabulary_size,
            hidden_size=width,
            num_hidden_layers=num_layers,
            num_attention_heads=max(1, width // 64),
            intermediate_size=4 * width,
            max_position_embeddings=max_length,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            pad_token_id=PAD,
        )
        self.student = BertForSequenceClassification(config)
        if weights is not None:
            self.student.load_state_dict(torch.load(weights, weights_only=True), strict=False)

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        """Of each sentence, shape ``(batch, 2)``."""
        output = self.student(batch["tokens"], attention_mask=batch["mask"])
        logits: Tensor = output.logits
        return logits

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """Cross-entropy; the samples' ids are for the cache."""
        loss = cross_entropy(self.logits(batch), batch["label"])
        self.log("loss", loss, prog_bar=True, batch_size=len(batch["label"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        """The accuracy."""
        right = self.logits(batch).argmax(dim=1) == batch["label"]
        self.log("val_accuracy", right.float().mean(), prog_bar=True, batch_size=len(right))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.student.parameters(), lr=self.lr)


class LabelledSentences(Dataset[dict[str, Any]]):
    """Sentences of one length: what is cached for a sentence does not depend on its neighbours.

    Args:
        lines: A sentence, a tab, and 0 or 1.
        vocabulary: Its tokens.
        max_length: Tokens of each, cut off or padded.
    """

    def __init__(self, lines: list[str], vocabulary: Vocabulary, max_length: int) -> None:
        self.pairs = [line.rsplit("\t", 1) for line in lines if "\t" in line]
        self.vocabulary, self.max_length = vocabulary, max_length

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sentence, label = self.pairs[index]
        tokens = torch.full((self.max_length,), PAD)
        found = torch.tensor(self.vocabulary.encode(sentence.lower())[: self.max_length])
        tokens[: len(found)] = found
        return {"tokens": tokens, "mask": (tokens != PAD).long(), "label": int(label)}


class SentimentData(LightningDataModule):
    """Loaders of labelled sentences.

    Args:
        file: With the training sentences; None: sentences that are made up.
        val_file: With those to validate with; None: a fifth of the made-up ones.
        batch_size: Sentences per step.
        max_length: Tokens of a sentence.
        vocabulary_size: Tokens; the most frequent words of the file get one.
    """

    def __init__(
        self,
        file: str | None = None,
        val_file: str | None = None,
        batch_size: int = 32,
        max_length: int = 32,
        vocabulary_size: int = 2000,
    ) -> None:
        super().__init__()
        self.file, self.val_file, self.batch_size = file, val_file, batch_size
        self.max_length, self.vocabulary_size = max_length, vocabulary_size

    def sentences(self, *, train: bool) -> LabelledSentences:
        """What is trained on, or validated with."""
        lines = made_up(train=True) if self.file is None else lines_of(self.file)
        vocabulary = Vocabulary([line.lower() for line in lines], self.vocabulary_size)
        if not train:
            lines = made_up(train=False) if self.val_file is None else lines_of(self.val_file)
        return LabelledSentences(lines, vocabulary, self.max_length)

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled batches, with ids."""
        return DataLoader(
            WithIds(self.sentences(train=True)), self.batch_size, shuffle=True, drop_last=True
        )

    def val_dataloader(self) -> DataLoader[Any]:
        """Everything once, in order."""
        return DataLoader(self.sentences(train=False), self.batch_size)


def lines_of(file: str) -> list[str]:
    """The lines of a text file."""
    return Path(file).read_text(encoding="utf-8").splitlines()


def made_up(*, train: bool) -> list[str]:
    """Sentences of a made-up language, in which words with small numbers are praise."""
    lines = []
    for index, sentence in enumerate(generated()):
        praise = [int(word[1:]) < 50 for word in sentence.split()]
        if (index % 5 > 0) == train:
            lines.append(f"{sentence}\t{int(2 * sum(praise) > len(praise))}")
    return lines


def module_and_data() -> tuple[Sentiment, SentimentData]:
    """For ``tspipe plan`` and ``tspipe check``: four layers, without dropout."""
    return Sentiment(dropout=0.0), SentimentData(batch_size=8)


if __name__ == "__main__":
    run(Sentiment, SentimentData)
