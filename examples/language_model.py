"""Knowledge distillation of language models: a large one teaches a small one of its family.

The student learns the teacher's distribution over the next token, and the text itself (Hinton et
al., 2015; Agarwal et al., *GKD*, ICLR 2024, with the text's tokens: what the student would write
itself, on-policy, is not sampled). Both networks are ordinary models of Hugging Face's
transformers. Their stages pass on hidden states; both heads are part of the loss, which makes
logits for some tokens at a time. ``python examples/language_model.py --fast`` trains small models
with random weights on the pages of this project's documentation; ``python
examples/language_model.py fit --config examples/configs/language_model.yaml`` real ones on a text
of yours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from documents import END, documents_of, encoder_of, packed
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from running import run
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lightning_tspipe import (
    DistillationLoss,
    DistillationOutput,
    KeptTargets,
    Perplexity,
    Targets,
    WithTargets,
    pretrained,
)

DOCUMENTATION = str(Path(__file__).resolve().parents[1] / "docs")


class LanguageModelDistillation(LightningModule):
    """A frozen teacher, a student, and what tells them apart.

    Args:
        teacher: A folder, or a name on the Hugging Face hub; None: a small model of bytes that has
            learned nothing.
        student: The same; both need the same tokenizer.
        teacher_layers: Of a teacher without a name.
        student_layers: Of a student without a name.
        temperature: Softens both distributions.
        alpha: Share of the teacher in the loss.
        kind: Which divergence.
        chunk_size: Tokens whose logits are made at once.
        lr: Of AdamW, at the end of the warm-up.
        warmup_steps: Updates of the warm-up.
        k: So many of the teacher's most likely words are kept of each token, by ``predict``.
        kept: Whether batches have kept targets, so that no teacher is needed.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the settings of the method
        self,
        teacher: str | None = None,
        student: str | None = None,
        teacher_layers: int = 4,
        student_layers: int = 2,
        temperature: float = 2.0,
        alpha: float = 0.5,
        kind: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl",
        chunk_size: int = 1024,
        lr: float = 1e-4,
        warmup_steps: int = 100,
        k: int = 64,
        *,
        kept: bool = False,
    ) -> None:
        super().__init__()
        self.names = {"teacher": teacher, "student": student}
        self.layers = {"teacher": teacher_layers, "student": student_layers}
        self.criterion = DistillationLoss(temperature, alpha, chunk_size, kind=kind)
        self.val_perplexity, self.val_teacher_perplexity = Perplexity(), Perplexity()
        self.lr, self.warmup_steps, self.k, self.kept = lr, warmup_steps, k, kept
        self.teacher: Any = None
        self.student: Any = None

    def configure_model(self) -> None:
        """Build both, without values: each rank reads those of its stages."""
        if self.student is None:
            if not self.kept:
                self.teacher = self.build("teacher").requires_grad_(requires_grad=False)
            self.student = self.build("student").train()

    def build(self, role: str) -> PreTrainedModel:
        """A pretrained model, or a small one."""
        name = self.names[role]
        if name is not None:
            return pretrained(AutoModelForCausalLM, name)  # type: ignore[no-any-return]
        width = 32 * self.layers[role]
        config = LlamaConfig(
            vocab_size=END + 1, hidden_size=width, intermediate_size=2 * width,
            num_hidden_layers=self.layers[role], num_attention_heads=4, num_key_value_heads=2,
            tie_word_embeddings=role == "student", pad_token_id=None,
        )  # fmt: skip
        return LlamaForCausalLM(config)

    def compare(self, batch: list[Tensor]) -> DistillationOutput:
        """Both models on a batch, and their distance."""
        tokens, positions, labels, *targets = batch
        inside = {"position_ids": positions, "use_cache": False}
        hidden = self.student.model(tokens, **inside).last_hidden_state
        if self.kept:
            head, (given,) = self.student.lm_head, targets
            return self.criterion.kept(hidden, head, given, labels)
        with torch.no_grad():
            guide = self.teacher.model(tokens, **inside).last_hidden_state
        return self.criterion(  # type: ignore[no-any-return]
            hidden, self.student.lm_head, guide, self.teacher.lm_head, labels
        )

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """The loss, and what it consists of."""
        found = self.compare(batch)
        metrics = {
            "loss": found.loss,
            "divergence": found.divergence,
            "perplexity": found.cross_entropy.exp(),
        }
        if not self.kept:
            metrics["teacher_perplexity"] = found.teacher_cross_entropy.exp()
        self.log_dict(metrics, prog_bar=True)
        return found.loss

    def validation_step(self, batch: list[Tensor]) -> None:
        """Perplexities on text that the student doesn't learn, of all of its tokens."""
        found = self.compare(batch)
        self.val_perplexity(found.cross_entropy, found.num_tokens)
        self.log("val_divergence", found.divergence)
        self.log("val_perplexity", self.val_perplexity, prog_bar=True)
        if not self.kept:
            self.val_teacher_perplexity(found.teacher_cross_entropy, found.num_tokens)
            self.log("val_teacher_perplexity", self.val_teacher_perplexity)

    def predict_step(self, batch: list[Tensor]) -> Targets:
        """What the teacher finds most likely, for ``TargetWriter`` to keep."""
        tokens, positions, _ = batch
        hidden = self.teacher.model(tokens, position_ids=positions, use_cache=False)
        return self.criterion.targets(
            tokens, hidden.last_hidden_state, self.teacher.lm_head, self.k
        )

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with a linear warm-up."""
        optimizer = torch.optim.AdamW(self.student.parameters(), lr=self.lr, betas=(0.9, 0.95))
        warmup = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (self.warmup_steps + 1)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


class Documents(LightningDataModule):
    """The documents of a text file or a folder, packed.

    Args:
        path: A text file, or a folder of ``.md`` and ``.txt`` files; empty lines divide documents.
        tokenizer: A folder, or a name on the hub; None: a token is a byte.
        length: Tokens of a sequence.
        batch_size: Sequences of a batch.
        held_out: One sequence of so many is for validation.
        targets: A folder that ``TargetWriter`` wrote while ``predict`` ran over the same documents;
            batches get what the teacher said of them.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the settings of the data
        self,
        path: str = DOCUMENTATION,
        tokenizer: str | None = None,
        length: int = 2048,
        batch_size: int = 1,
        held_out: int = 20,
        targets: str | None = None,
    ) -> None:
        super().__init__()
        self.path, self.tokenizer, self.length = path, tokenizer, length
        self.batch_size, self.held_out, self.targets = batch_size, held_out, targets

    def setup(self, stage: str) -> None:
        """Encode and pack."""
        del stage
        encode = encoder_of(self.tokenizer)
        self.sequences: Any = packed(map(encode, documents_of(self.path)), self.length)
        if self.targets is not None:
            kept = KeptTargets(self.targets, tokenizer=self.tokenizer)
            self.sequences = WithTargets(self.sequences, kept)

    def part(self, *, held_out: bool) -> Dataset[Any]:
        """The sequences for validation, or all others."""
        places = range(len(self.sequences))
        chosen = [place for place in places if (place % self.held_out == 0) == held_out]
        return torch.utils.data.Subset(self.sequences, chosen)

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled batches."""
        return DataLoader(
            self.part(held_out=False),
            self.batch_size,
            shuffle=True,
            drop_last=True,
            generator=torch.Generator().manual_seed(0),  # one order, however weights were drawn
        )

    def val_dataloader(self) -> DataLoader[Any]:
        """What is held out."""
        return DataLoader(self.part(held_out=True), self.batch_size)

    def predict_dataloader(self) -> DataLoader[Any]:
        """All sequences, in their order."""
        # By its name: Lightning gives loaders for predict a batch_size of its own besides.
        return DataLoader(self.sequences, batch_size=self.batch_size)


def module_and_data() -> tuple[LanguageModelDistillation, Documents]:
    """For ``tspipe plan`` and ``tspipe check``: small models of bytes."""
    return LanguageModelDistillation(), Documents(length=64, batch_size=4)


if __name__ == "__main__":
    run(LanguageModelDistillation, Documents)
