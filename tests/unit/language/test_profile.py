"""What heads beside the loss cost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_tspipe import DistillationLoss
from lightning_tspipe.capture.trace import Networks
from lightning_tspipe.profiling.steps import flops_per_sample, profile_step
from lightning_tspipe.runtime.execution.engine import Rank
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.transport.base import Alone
from lightning_tspipe.runtime.weights.ownership import beside_stages

CPU = torch.device("cpu")
WORDS, TOKENS, SAMPLES = 50, 12, 4


def model(width: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2,
        )
    )  # fmt: skip


class Distils(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = model(8), model(16).requires_grad_(requires_grad=False)
        self.criterion = DistillationLoss(chunk_size=5)

    def training_step(self, tokens: Tensor) -> Tensor:
        hidden = self.student.model(tokens, use_cache=False).last_hidden_state
        with torch.no_grad():
            guide = self.teacher.model(tokens, use_cache=False).last_hidden_state
        heads = self.student.lm_head, self.teacher.lm_head
        loss: Tensor = self.criterion(hidden, heads[0], guide, heads[1], tokens).loss
        return loss


def captured(module: Distils) -> Captured:
    networks = Networks(("student.model",), ("teacher.model",))
    here = Rank(module, networks, Alone(), CPU)
    return here.capture(module.training_step, torch.randint(WORDS, (SAMPLES, TOKENS)))


def test_heads_are_priced_by_their_operations() -> None:
    module = Distils()
    step, heads = captured(module), (module.student.lm_head, module.teacher.lm_head)
    own, guide = (2 * TOKENS * head.weight.numel() for head in heads)
    of_loss = 3 * own + guide  # logits of both; gradients of hidden states and weight
    assert step.plan.flops == SAMPLES * of_loss
    beside = beside_stages(module, step)
    assert set(beside) == {head.weight for head in heads}

    rate = 1e9
    priced = profile_step(step, CPU, [], (), rate, beside=beside)
    assert priced.loss_seconds_per_sample == of_loss / rate
    assert priced.loss_parameter_bytes == sum(head.weight.nbytes for head in heads)
    assert priced.loss_trainable_bytes == module.student.lm_head.weight.nbytes
    assert priced.teacher is not None
    assert sum(atom.flops_per_sample for atom in priced.teacher.atoms) > 0
    assert flops_per_sample(step) > of_loss


@pytest.mark.slow
def test_measured_heads_are_as_fast_as_what_was_measured() -> None:
    step = captured(Distils())
    found = profile_step(step, CPU, [], (1,))
    assert found.teacher is not None
    student, teacher = found.student, found.teacher
    seconds = sum(student.sums(kind, SAMPLES)[-1] for kind in ("forward", "backward"))
    seconds += teacher.sums("forward", SAMPLES)[-1]
    flops = [sum(atom.flops_per_sample for atom in network.atoms) for network in (student, teacher)]
    rate = SAMPLES * (3 * flops[0] + flops[1]) / seconds
    expected = step.plan.flops / SAMPLES / rate
    assert abs(found.loss_seconds_per_sample - expected) < 1e-9 * expected
