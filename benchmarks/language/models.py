"""What is emulated: a Llama of 8 billion parameters that teaches one of a billion."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.emulated.world import emulated
from lightning_tspipe.networks.arguments import Arguments, tensors_in
from lightning_tspipe.networks.program import Program
from lightning_tspipe.planning.profile import NetworkProfile
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.profiling.atoms import profile_atoms

TOKENS = 2048
WORDS = 128_256
FLOPS_PER_SECOND = 60e12
"""Any: times are scaled, and only the proportions count."""
FRACTION = 1 / 256
"""Of the real bytes that travel: two cores copy for all devices."""

TEACHER = LlamaConfig(
    vocab_size=WORDS, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8,
)  # fmt: skip
STUDENT = LlamaConfig(
    vocab_size=WORDS, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
    num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
)  # fmt: skip
"""As Llama 3.1 8B and Llama 3.2 1B are."""


def priced(config: LlamaConfig, *, trainable: bool) -> NetworkProfile:
    """What the layers of a model cost, without its head."""
    with torch.device("meta"):
        network = LlamaForCausalLM(config).model.requires_grad_(requires_grad=trainable)
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
    args, kwargs = (ids,), {"use_cache": False}
    program = Program(network, "model", Arguments.of(args, kwargs))
    inputs = tuple(tensors_in((args, kwargs)))
    atoms = profile_atoms(program, inputs, trainable=trainable, flops_per_second=FLOPS_PER_SECOND)
    return NetworkProfile(tuple(atoms))


def head_flops(config: LlamaConfig) -> int:
    """Operations that make the logits of a batch."""
    return 2 * TOKENS * config.hidden_size * config.vocab_size


def step(seconds: float) -> StepProfile:
    """A batch of one sequence.

    Args:
        seconds: What it takes on one device, the loss included.
    """
    of_loss = 3 * head_flops(STUDENT) + head_flops(TEACHER)
    whole = StepProfile(
        student=priced(STUDENT, trainable=True),
        teacher=priced(TEACHER, trainable=False),
        num_calls=(1, 1),
        batch_sizes=(1, 1),
        paired=False,
        input_bytes_per_sample=8 * TOKENS,
        loss_seconds_per_sample=of_loss / FLOPS_PER_SECOND,
    )
    return emulated(whole, seconds, FRACTION)
