"""Costs of a language model's training step, from configurations: models without any weights.

The step is that of ``examples/language_model.py``. Its networks are built on the meta device and
traced on tensors without values, and what they compute is priced: nothing is allocated, and of a
model on the Hugging Face hub nothing but its configuration is downloaded.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from lightning_tspipe.capture.trace import Networks
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.language import DistillationLoss
from lightning_tspipe.planning.profile import NetworkProfile
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.profiling.steps import profile_step
from lightning_tspipe.runtime.execution.engine import Rank
from lightning_tspipe.runtime.transport.base import Alone
from lightning_tspipe.runtime.weights.ownership import beside_stages

Precision = Literal["32-true", "bf16-true"]
PRECISIONS: dict[Precision, torch.dtype] = {"32-true": torch.float32, "bf16-true": torch.bfloat16}
"""Data types of parameters, by Lightning's names; gradients and optimizer state have the same."""

_HOST = torch.device("cpu")
_META = torch.device("meta")


@dataclass(frozen=True)
class LanguageStep:
    """A step that trains a language model.

    Attributes:
        student: Its configuration: a folder, a ``config.json``, or a name on the hub.
        teacher: That of the model that it learns from; None: it learns from the text alone.
        length: Tokens of a sequence.
        batch_size: Sequences of a batch.
        precision: Lightning's name of the data type.
        chunk_size: Tokens whose logits a ``DistillationLoss`` makes at once.
    """

    student: str
    teacher: str | None = None
    length: int = 2048
    batch_size: int = 1
    precision: Precision = "32-true"
    chunk_size: int = 1024


def profile_language_step(step: LanguageStep, flops_per_second: float) -> StepProfile:
    """Price a step's networks, without weights.

    Args:
        step: The step.
        flops_per_second: Speed of a device.

    Raises:
        ConfigurationError: A configuration is not found, is not that of a language model, or those
            of two models don't fit each other.
        CaptureError: The step of these models cannot be captured.
    """
    if min(step.length, step.batch_size) < 1:
        raise ConfigurationError(
            f"--length {step.length}, --batch {step.batch_size}: both must be at least 1"
        )
    dtype = PRECISIONS[step.precision]
    student = _built(step.student, dtype).train()
    if step.teacher is None:
        module: Pretraining | Distillation = Pretraining(student)
        networks = Networks(("student",))
    else:
        teacher = _built(step.teacher, dtype).eval().requires_grad_(requires_grad=False)
        module = Distillation(student, teacher, step)
        networks = Networks(("student",), ("teacher",))
    tokens = torch.zeros(step.batch_size, step.length, dtype=torch.long)
    positions = torch.arange(step.length).repeat(step.batch_size, 1)
    here = Rank(module, networks, Alone(), _HOST)
    captured = here.capture(module.training_step, [tokens, positions, tokens])
    optimizer = torch.optim.AdamW(student.parameters())  # what it will keep isn't there yet
    profile = profile_step(
        captured, _META, [optimizer], (), flops_per_second, beside=beside_stages(module, captured)
    )
    return module.with_loss(profile, step.length * step.batch_size)


class Pretraining(nn.Module):
    """A model that learns from text; its logits are its output.

    Args:
        student: The model.
    """

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student = student

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Cross entropy of each next token."""
        tokens, positions, labels = batch
        logits = self.student(tokens, **_inside(self.student, positions)).logits
        return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())

    def with_loss(self, profile: StepProfile, num_tokens: int) -> StepProfile:
        """Count logits; in float32 their log softmax, its gradient, and theirs."""
        weight = _head(self.student).weight
        needed = num_tokens * len(weight) * (weight.itemsize + 3 * torch.float32.itemsize)
        each = needed // max(profile.batch_sizes)
        return replace(profile, loss_working_bytes_per_sample=each)


class Distillation(nn.Module):
    """A model that learns from another one by ``DistillationLoss``.

    Args:
        student: The model.
        teacher: The other one.
        step: Its settings.

    Raises:
        ConfigurationError: They have different vocabularies.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module, step: LanguageStep) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher
        self.criterion = DistillationLoss(chunk_size=step.chunk_size)
        words, others = (_head(model).out_features for model in (student, teacher))
        if words != others:
            raise ConfigurationError(
                f"{step.student} has {words} words, and {step.teacher} {others}: both need the "
                "same tokenizer. If one table is only padded further, give a folder with its "
                "config.json, and there the vocab_size of the other"
            )

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """The distance of both, and from the text."""
        tokens, positions, labels = batch
        hidden = self._hidden(self.student, tokens, positions)
        with torch.no_grad():
            guide = self._hidden(self.teacher, tokens, positions)
        heads = _head(self.student), _head(self.teacher)
        return cast("Tensor", self.criterion(hidden, heads[0], guide, heads[1], labels).loss)

    @staticmethod
    def _hidden(model: Any, tokens: Tensor, positions: Tensor) -> Tensor:  # noqa: ANN401 - as below
        base = model.base_model
        found: Tensor = base(tokens, **_inside(base, positions)).last_hidden_state
        return found

    def with_loss(self, profile: StepProfile, num_tokens: int) -> StepProfile:
        """Count two chunks of logits, and the sums of the head's gradient, in float32.

        They become a gradient of the head's type, which is counted as one that is not added yet.
        """
        weight = _head(self.student).weight
        tokens, float32 = min(self.criterion.chunk_size[0], num_tokens), torch.float32.itemsize
        chunks = 2 * tokens * len(weight) * float32
        sums = weight.numel() * float32
        return replace(profile, loss_working_bytes=max(chunks + sums - weight.nbytes, sums))


def at_narrow_places(profile: StepProfile) -> StepProfile:
    """The same step, cut only where less is passed on than before and behind.

    In a transformer that is behind attention and behind each MLP; a cut in front of a product of
    matrices would send more for the same work. With a fifth of the places a search takes seconds.
    """
    teacher = profile.teacher
    return replace(
        profile,
        student=_narrow(profile.student),
        teacher=None if teacher is None else _narrow(teacher),
    )


def _narrow(network: NetworkProfile) -> NetworkProfile:
    sent = [atom.output_bytes_per_sample for atom in network.atoms]
    wide = {
        place
        for place, amount in enumerate(sent[:-1])
        if amount > min(sent[max(0, place - 1)], sent[place + 1])
    }
    return network.joining(network.joined | wide)


def _inside(model: nn.Module, positions: Tensor) -> dict[str, Any]:
    """Arguments of a model, of which those without positions (Mamba) know none."""
    known = inspect.signature(model.forward).parameters
    given = {"position_ids": positions, "use_cache": False}
    return {name: value for name, value in given.items() if name in known}


def _head(model: Any) -> nn.Linear:  # noqa: ANN401 - transformers' base class lacks annotations
    """What makes logits of hidden states.

    Raises:
        ConfigurationError: The model has no linear head.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ConfigurationError(f"{type(model).__name__} has no linear head on its hidden states")
    return head


def _built(name: str, dtype: torch.dtype) -> Any:  # noqa: ANN401 - as above
    """A causal language model on the meta device, of a configuration.

    Raises:
        ConfigurationError: There is none of that name, or it is that of another kind of model.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigurationError(
            "language models need Hugging Face's transformers: pip install 'lightning-tspipe[text]'"
        ) from error
    path = Path(name)
    if not path.exists() and (path.is_absolute() or name.startswith(".") or path.suffix == ".json"):
        raise ConfigurationError(f"there is no folder or file {name}; it is to be a config.json")
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"no configuration of {name!r} could be read: {error}\nNames on the Hugging Face hub "
            "need a connection (and for gated models `hf auth login`). Without one, give a folder "
            "with the model's config.json"
        ) from error
    try:
        with _META:
            make: Any = AutoModelForCausalLM.from_config
            model = make(config, dtype=dtype)
    except ValueError as error:
        raise ConfigurationError(
            f"{name!r} is the configuration of a model of type {config.model_type!r}, which "
            f"transformers cannot build as a causal language model: {str(error).splitlines()[0]}"
        ) from error
    model.tie_weights()
    return model
