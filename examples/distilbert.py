"""DistilBERT (Sanh et al., 2019): a transformer of half the depth learns from a large one.

Teacher and student are ordinary models of Hugging Face's transformers, called as one calls them:
``attention_mask`` by keyword, ``output_hidden_states=True``. The loss reads the logits and the last
hidden states, and gradients reach the student through both.
``python examples/distilbert.py --fast`` trains for some steps over two CPU processes, ``python
examples/distilbert.py fit --config examples/configs/distilbert.yaml`` on a text file of yours.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from running import run
from texts import MASK, NUM_SPECIAL, PAD, Sentences, Vocabulary, generated, lines_of
from torch import Tensor
from torch.nn.functional import cosine_embedding_loss, cross_entropy, kl_div, log_softmax, softmax
from torch.utils.data import DataLoader
from transformers import DistilBertConfig, DistilBertForMaskedLM

NO_LABEL = -100


class DistilBERT(LightningModule):
    """Three losses: soft targets, masked language modelling, and the direction of hidden states.

    Args:
        vocabulary_size: Tokens.
        num_layers: Of the teacher; the student has half of them.
        width: Of both.
        max_length: Tokens of a sentence.
        weights: File of the teacher's state dict; None: it has learned nothing.
        dropout: Share of the student's activations that are dropped.
        temperature: Softens the targets.
        lr: Of AdamW.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the settings of the method
        self,
        vocabulary_size: int = 2000,
        num_layers: int = 12,
        width: int = 256,
        max_length: int = 64,
        weights: str | None = None,
        dropout: float = 0.1,
        temperature: float = 2.0,
        lr: float = 5e-4,
    ) -> None:
        super().__init__()
        self.temperature, self.lr = temperature, lr
        config = DistilBertConfig(
            vocab_size=vocabulary_size,
            max_position_embeddings=max_length,
            dim=width,
            hidden_dim=4 * width,
            n_layers=num_layers,
            n_heads=width // 32,
            dropout=dropout,
            attention_dropout=dropout,
            pad_token_id=PAD,
            # The first and the last stage would share a parameter.
            tie_word_embeddings=False,
        )
        self.teacher = DistilBertForMaskedLM(config).requires_grad_(requires_grad=False)
        if weights is not None:
            self.teacher.load_state_dict(torch.load(weights, weights_only=True))
        half = DistilBertConfig(**{**config.to_dict(), "n_layers": num_layers // 2})
        self.student = DistilBertForMaskedLM(half)

    def on_train_start(self) -> None:
        """The Trainer puts everything in train mode."""
        self.teacher.train(mode=False)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """The step of the paper, section 3."""
        tokens, mask, labels = batch["tokens"], batch["mask"], batch["labels"]
        student = self.student(tokens, attention_mask=mask, output_hidden_states=True)
        with torch.no_grad():
            teacher = self.teacher(tokens, attention_mask=mask, output_hidden_states=True)
        words = mask.bool()  # not the padding
        soft = self.temperature**2 * kl_div(
            log_softmax(student.logits[words] / self.temperature, dim=-1),
            softmax(teacher.logits[words] / self.temperature, dim=-1),
            reduction="batchmean",
        )
        guesses = student.logits.flatten(0, 1)
        masked = cross_entropy(guesses, labels.flatten(), ignore_index=NO_LABEL)
        hidden = student.hidden_states[-1][words]
        towards = teacher.hidden_states[-1][words]
        cosine = cosine_embedding_loss(hidden, towards, hidden.new_ones(len(hidden)))
        loss = 5 * soft + 2 * masked + cosine
        self.log_dict({"loss": loss, "mlm_loss": masked, "cosine_loss": cosine}, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.student.parameters(), lr=self.lr, weight_decay=0.01)


class MaskedSentences(LightningDataModule):
    """Sentences of different length, of which some tokens are masked.

    Args:
        file: A text file with one sentence per line; None: sentences that are made up.
        batch_size: Sentences per step.
        max_length: Tokens of a sentence at most.
        vocabulary_size: Tokens; the most frequent words of the file get one.
        share: Of the tokens that are masked.
    """

    def __init__(
        self,
        file: str | None = None,
        batch_size: int = 64,
        max_length: int = 64,
        vocabulary_size: int = 2000,
        share: float = 0.15,
    ) -> None:
        super().__init__()
        self.file, self.batch_size, self.share = file, batch_size, share
        self.max_length, self.vocabulary_size = max_length, vocabulary_size

    def train_dataloader(self) -> DataLoader[list[int]]:
        """Shuffled batches."""
        lines = generated() if self.file is None else lines_of(self.file)
        vocabulary = Vocabulary(lines, self.vocabulary_size)
        return DataLoader(
            Sentences(lines, vocabulary, self.max_length),
            self.batch_size,
            shuffle=True,
            drop_last=True,
            collate_fn=self.collate,
        )

    def collate(self, sentences: list[list[int]]) -> dict[str, Tensor]:
        """Pad to the longest, and mask some tokens, which become the labels."""
        tokens = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(sentence) for sentence in sentences], batch_first=True, padding_value=PAD
        )
        hidden = (torch.rand(tokens.shape) < self.share) & (tokens >= NUM_SPECIAL)
        hidden[:, 0] = True  # so that there is one
        return {
            "tokens": tokens.masked_fill(hidden, MASK),
            "mask": (tokens != PAD).long(),
            "labels": tokens.masked_fill(~hidden, NO_LABEL),
        }


def module_and_data() -> tuple[DistilBERT, MaskedSentences]:
    """For ``tspipe plan`` and ``tspipe check``: twelve layers teach six, without dropout."""
    return DistilBERT(dropout=0.0), MaskedSentences(batch_size=8)


if __name__ == "__main__":
    run(DistilBERT, MaskedSentences)
