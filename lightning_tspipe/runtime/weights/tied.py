"""Parameters that several ranks read, such as an embedding that is the head's weight, too.

Each of these ranks holds the parameter and its optimizer's state. A backward leaves on each the
gradient of what it has run; the sum of these is the gradient on all of them, so that the same
update follows everywhere::

    rank 1    embedding ──► ...                     ... ──► dE ─┐     ┌─► dE + dH ──► optimizer
    rank 0                      ... ──► head, loss ──► dH ──────┴─────┴─► dE + dH ──► optimizer
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.late import Late, sample_of
from lightning_tspipe.runtime.recording import Recorder
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.channels import Channel, Edge, Lane
from lightning_tspipe.runtime.transport.replicas import REST, GradientReduction
from lightning_tspipe.runtime.weights.gradient_hooks import run_hooks


@dataclass(eq=False)
class TiedGradients:
    """Sums of the gradients of tied parameters, of which a rank holds some.

    Attributes:
        tied: The parameters by name, and the ranks that hold each; the same on all ranks.
        transport: How to reach these.
        defers: Whether they are added up before an update only, as no rank waits for others before.
    """

    tied: Mapping[str, tuple[nn.Parameter, Sequence[int]]]
    transport: Transport
    defers: bool = False
    _reduction: GradientReduction | None = None
    _trained: set[str] = field(default_factory=set)
    _seen: list[tuple[str, Late]] = field(default_factory=list)
    _before: dict[str, Tensor | None] | None = None

    def __post_init__(self) -> None:
        rank = self.transport.rank
        self._own = [name for name, (_, ranks) in self.tied.items() if rank in ranks]

    def average(self, peers: Any, recorder: Recorder) -> None:
        """Have gradients averaged over replicas, too."""
        self._reduction = GradientReduction({REST: self.own}, peers, recorder)

    @contextmanager
    def summed(self, *, reduce: bool) -> Iterator[None]:
        """Around the backward of a step: what it adds to gradients is added up over the ranks.

        Args:
            reduce: Whether gradients are averaged over replicas afterwards.

        Raises:
            ConfigurationError: Two ranks have other values of a parameter.
        """
        # One that is frozen may be so for a while only.
        self._trained |= {name for name, (own, _) in self.tied.items() if own.requires_grad}
        tied = {name: self.tied[name] for name in self._own if name in self._trained}
        if self._before is None:
            self._before = {name: own.grad for name, (own, _) in tied.items()}
            for own, _ in tied.values():
                own.grad = None
        yield
        if reduce or not self.defers:
            self.settle()
        if reduce and self._reduction is not None:
            self._reduction.run((), lambda _: None)

    def settle(self) -> None:
        """Add up what the backwards since the last sum have added; every rank calls it."""
        before, self._before = self._before, None
        if before is None:
            return
        with torch.no_grad():
            tied = {name: self.tied[name] for name in before}
            self._add_up(tied)
            for name, (own, _) in tied.items():
                run_hooks(own)
                known = before[name]
                if known is not None:
                    own.grad = known if own.grad is None else known.add_(own.grad)

    @property
    def own(self) -> list[nn.Parameter]:
        """Those that this rank holds."""
        return [self.tied[name][0] for name in self._own]

    @property
    def edges(self) -> set[Edge]:
        """Between the ranks that hold one together."""
        ranks = (ranks for _, ranks in self.tied.values())
        return {Edge(*pair, Lane.PROGRAM) for own in ranks for pair in permutations(own, 2)}

    def _add_up(self, tied: Mapping[str, tuple[nn.Parameter, Sequence[int]]]) -> None:
        """Exchange gradients, and add them in the order of the ranks, which is the same on all."""
        transport = self.transport
        peers = sorted({rank for _, ranks in tied.values() for rank in ranks} - {transport.rank})
        parts = {name: {transport.rank: _gradient(own)} for name, (own, _) in tied.items()}
        notes = {name: {transport.rank: _note(own)} for name, (own, _) in tied.items()}
        shared = {peer: [n for n, (_, ranks) in tied.items() if peer in ranks] for peer in peers}
        receipts = {}
        for peer, names in shared.items():
            own = [parts[n][transport.rank] for n in names]
            own.append(torch.stack([notes[n][transport.rank] for n in names]))
            specs = [TensorSpec(tuple(each.shape), each.dtype) for each in own]
            receipts[peer] = transport.receive(specs, peer, Channel.SUMS)
            transport.send(own, peer, Channel.SUMS, specs)
        for peer, names in shared.items():
            *gradients, noted = receipts[peer].wait()
            for name, gradient, note in zip(names, gradients, noted, strict=True):
                parts[name][peer], notes[name][peer] = gradient, note
        self._compare(tied, notes)
        for name, (parameter, ranks) in tied.items():
            # Only then look: on a GPU the host waits for it.
            if parameter.grad is not None or any(note[0] for note in notes[name].values()):
                first, *others = (parts[name][rank] for rank in sorted(ranks))
                parameter.grad = sum(others, first)

    def _compare(
        self,
        tied: Mapping[str, tuple[nn.Parameter, Sequence[int]]],
        notes: Mapping[str, Mapping[int, Tensor]],
    ) -> None:
        """Refuse values that were different in the step before; the host doesn't wait for those."""
        seen, self._seen = self._seen, [
            (name, Late(torch.stack([note[1] for note in own.values()]).diff()))
            for name, own in notes.items()
        ]  # fmt: skip
        for name, differences in seen:
            if any(differences.tolist()):
                raise ConfigurationError(
                    f"{name!r} is tied, so that ranks {' and '.join(map(str, tied[name][1]))} hold "
                    "it and have to make the same updates, but its values are different there. A "
                    "hook or an optimizer has changed it by random numbers, or on one of the ranks "
                    "only. Change it in the same way on all, or choose a partition that keeps its "
                    "uses on one rank: TSPipeStrategy(partition=[...])"
                )


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()


def _note(parameter: nn.Parameter) -> Tensor:
    """Whether it has a gradient, and a number that other values would hardly have."""
    sample = sample_of(parameter)
    return torch.stack([torch.full_like(sample, parameter.grad is not None), sample])
