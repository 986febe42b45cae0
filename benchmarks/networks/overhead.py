"""What recording costs once, and what guards cost in each step."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
import torchvision
import transformers
from torch import nn

from benchmarks.networks.checking import Call
from lightning_tspipe.networks.arguments import Arguments, tensors_in
from lightning_tspipe.networks.guards import one_moment
from lightning_tspipe.networks.program import Program

STEP_SECONDS = 0.02
NETWORKS, UNITS = 2, 4
"""In a step: networks, and the units that each of them runs."""


def _vit() -> tuple[nn.Module, Call]:
    return torchvision.models.vit_l_16(), ((torch.empty(4, 3, 224, 224),), {})


def _llama() -> tuple[nn.Module, Call]:
    config = transformers.LlamaConfig(num_hidden_layers=32)
    ids = torch.zeros(2, 128, dtype=torch.long)
    call = (ids,), {"attention_mask": torch.ones_like(ids), "use_cache": False}
    return transformers.LlamaForCausalLM(config), call


def _cut(name: str) -> tuple[Program, Call, float]:
    """A network without values, cut; and the seconds of processor time that this takes."""
    with torch.device("meta"):
        network, call = {"vit_l": _vit, "llama_32": _llama}[name]()
    begin = time.process_time()
    cut = Program(network, name, Arguments.of(*call))
    return cut, call, time.process_time() - begin


def capture_seconds() -> dict[str, float]:
    """Seconds to record and cut a ViT-L, and a Llama of 32 layers."""
    return {name: round(min(_cut(name)[2] for _ in range(3)), 3) for name in ("vit_l", "llama_32")}


def guard_overhead() -> dict[str, Any]:
    """Share of a step of 20 ms in which it is looked whether recordings still hold.

    They are looked at when the step begins, and while its units run.
    """
    shares = {}
    for name in ("vit_l", "llama_32"):
        program, (args, kwargs), _ = _cut(name)
        received = tuple(tensors_in((args, kwargs)))
        times = []
        for _ in range(200):
            begin = time.perf_counter()
            assert program.version == 0
            with one_moment():
                for _ in range(UNITS):
                    program.function(0, len(program.atoms), received)
            times.append(time.perf_counter() - begin)
        shares[name] = round(NETWORKS * median(times) / STEP_SECONDS, 5)
    return shares
