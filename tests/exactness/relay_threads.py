"""Blockwise distillation on ranks that are threads of this process, without Lightning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from lightning_tspipe.planning.relay import Mode, RelayPlan, passes
from lightning_tspipe.runtime.execution.engine import Rank
from lightning_tspipe.runtime.modes.relay.blocks import infer_shapes, pair_blocks
from lightning_tspipe.runtime.modes.relay.engine import (
    NETWORKS,
    RelayEngine,
    RelayOptions,
    capture_blocks,
)
from lightning_tspipe.runtime.transport.base import Transport
from tests.device import DEVICE, on_device, on_host
from tests.strict import StrictNetwork
from tests.threads import run_on_threads

WIDTHS = (3, 5, 4, 6, 4, 5, 3, 4, 5)


class Unlisted(nn.Module):
    """Blocks in a row that no list names, with something between them."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        for index, block in enumerate(blocks):
            self.add_module(f"part{index}", block)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = 0.5 * part(x).sin()
        return x


class Part(nn.Module):
    """One of its blocks, with what follows it there."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * self.block(x).sin()


class Blocks(nn.Module):
    """Linear blocks with BatchNorm; the loss of odd blocks reads labels too."""

    def __init__(self, num_blocks: int, *, is_listed: bool = True) -> None:
        super().__init__()
        sizes = list(pairwise(WIDTHS[: num_blocks + 1]))
        teachers = [nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.Tanh()) for a, b in sizes]
        students = [
            nn.Sequential(nn.Linear(a, 2), nn.BatchNorm1d(2), nn.Linear(2, b)) for a, b in sizes
        ]
        self.boundaries: dict[str, list[str]] = {}
        if is_listed:
            self.teacher: nn.Module = nn.Sequential(*teachers).eval()
            self.student: nn.Module = nn.Sequential(*students)
        else:
            self.teacher, self.student = Unlisted(teachers).eval(), Unlisted(students)
            names = [f"part{index}" for index in range(1, num_blocks)]
            self.boundaries = {"teacher": names, "student": names}
        self.teacher.requires_grad_(requires_grad=False)

    def listed(self, network: nn.Module) -> list[nn.Module]:
        """Its blocks, as plain modules."""
        return [Part(b) if self.boundaries else b for b in network.children()]

    def block_loss(self, out: Tensor, target: Tensor, block: int, batch: Any) -> Tensor:
        loss = F.mse_loss(out, target)
        return loss + (0.1 * F.cross_entropy(out, batch[1]) if block % 2 else 0.0)


@dataclass(frozen=True)
class Split:
    """A training.

    Attributes:
        mode: See ``planning.relay``.
        cuts: First block of each stage, and the number of blocks.
        widths: Ranks of each stage.
        sizes: Batch sizes.
        run_ahead: Steps that a rank may be ahead.
        barrier: Whether all end each step together.
        is_listed: Whether the networks are lists of their blocks.
        adds_up: Whether all ranks add a number up in each step, as for the norm that clips.
        change: Changes the module after it is built.
    """

    mode: Mode
    cuts: tuple[int, ...]
    widths: tuple[int, ...]
    sizes: tuple[int, ...] = (7, 5, 8, 2)
    run_ahead: int = 2
    barrier: bool = False
    is_listed: bool = True
    adds_up: bool = False
    change: Callable[[Blocks], None] = field(default=lambda module: None, repr=False)

    def build(self) -> Blocks:
        torch.manual_seed(0)
        module = Blocks(self.cuts[-1], is_listed=self.is_listed).double()
        self.change(module)
        return module

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(1)
        return [
            (
                torch.randn(size, 3, generator=random, dtype=torch.float64),
                torch.randint(3, (size,), generator=random),
            )
            for size in self.sizes
        ]


EACH_MODE = (
    Split("dpu", (0, 1, 3), (1, 1)), Split("ahd", (0, 1, 3), (2, 1)),
    Split("tr", (0, 2, 4), (1, 1), barrier=True), Split("ir", (0, 4), (3,)),
)  # fmt: skip
"""One training of each mode."""


@dataclass
class Result:
    """What all ranks have together."""

    weights: dict[str, Tensor]
    copies: list[dict[str, Tensor]]
    forwards: Counter[int]
    bytes_loaded: int


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def run_split(split: Split) -> Result:
    """Train on as many threads as there are ranks."""
    num_ranks = sum(split.widths)
    network = StrictNetwork(num_ranks, timeout=30)
    modules = [split.build() for _ in range(num_ranks)]

    def work(rank: int) -> Any:
        return _train_rank(split, modules[rank], network.transport(rank))

    found = run_on_threads(work, num_ranks)
    engines: Sequence[RelayEngine] = [engine for engine, _, _ in found]
    return Result(
        found[0][1],
        [held for _, _, held in found],
        sum((engine.forwards for engine in engines), Counter()),
        sum(engine.bytes_loaded for engine in engines),
    )


def _train_rank(split: Split, module: Blocks, transport: Transport) -> Any:
    batches = on_device(split.batches())
    here = Rank(module, NETWORKS, transport, DEVICE)
    pairs = pair_blocks(module, batches[0][0], module.boundaries)
    shapes = infer_shapes(pairs, module.block_loss, batches[0][0], batches[0])
    captured = capture_blocks(here, pairs, lambda batch: batch[0], batches[0])
    walks = passes(split.mode, RelayPlan(split.cuts, split.widths))
    options = RelayOptions(split.run_ahead, split.barrier)
    engine = RelayEngine(here, captured, pairs, shapes, walks, options)
    optimizer = sgd(module.parameters())
    for batch in batches:
        engine.begin(batch if engine.is_data_rank else None, lambda batch: [batch[0]])
        losses = engine.run_round(0)
        optimizer.zero_grad()
        engine.backward(torch.stack([o.loss for o in losses.values()]).sum().backward)
        if split.adds_up:
            total = transport.sum_over_ranks(torch.ones((), device=DEVICE))
            assert float(total) == transport.num_ranks
        engine.finish()
        optimizer.step()
    engine.drain()
    state = module.state_dict()
    held = {k: v.clone() for k, v in state.items() if k.startswith("student") and not v.is_meta}
    held = on_host(held)
    return engine, engine.shards.state_dict(engine.rank, transport), held
