"""The sequential references: the same mathematics as a pipeline, on one device, in plain lines."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

State = dict[str, Tensor]


@dataclass
class Record:
    """What a run left behind, for comparison."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[State] = field(default_factory=list)
    weights: State = field(default_factory=dict)
    optimizer: dict[str, dict[str, Any]] = field(default_factory=dict)


class MicroBatched(nn.Module):
    """A network applied to micro-batches, its BatchNorm statistics committed once per call."""

    def __init__(self, network: nn.Module, num_microbatches: int) -> None:
        super().__init__()
        self.network = network
        self._num_microbatches = num_microbatches
        self._stale: State | None = None

    def remember(self) -> None:
        """From the next forward on, use the weights of now: one update late."""
        self._stale = {k: v.detach().clone() for k, v in self.network.named_parameters()}

    def forget(self) -> None:
        """The newest weights again: the pipeline was drained."""
        self._stale = None

    def _apply(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if self._stale is None:
            return self.network(x)
        return functional_call(self.network, self._stale, (x,))

    def forward(self, x: Tensor) -> Tensor:
        """The network on each micro-batch in turn."""
        parts = [p for p in torch.tensor_split(x, self._num_microbatches) if len(p)]
        if len(parts) == 1:
            return self._apply(x)
        norms = [m for m in self.modules() if isinstance(m, _BatchNorm) and m.training]
        seen: dict[nn.Module, list[Tensor]] = {norm: [] for norm in norms}
        saved = {norm: dict(norm.named_buffers()) for norm in norms}
        for norm in norms:  # micro-batches write to copies
            for name, buffer in saved[norm].items():
                setattr(norm, name, buffer.clone())
        hooks = [
            norm.register_forward_pre_hook(lambda m, args: seen[m].append(args[0].detach()))
            for norm in norms
        ]
        outputs = [self._apply(part) for part in parts]
        for hook in hooks:
            hook.remove()
        for norm in norms:
            for name, buffer in saved[norm].items():
                setattr(norm, name, buffer)
            # One forward over all that it saw: torch's own update of the running statistics.
            with torch.no_grad():
                norm(torch.cat(seen[norm]))
        return torch.cat(outputs)


def run_reference(  # noqa: PLR0913, PLR0917 - a whole training
    module: nn.Module,
    student: Sequence[str],
    teacher: Sequence[str],
    epochs: Sequence[Sequence[Any]],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    num_microbatches: int,
    delayed: bool,
    accumulate: int = 1,
    after_step: Callable[[nn.Module], None] | None = None,
) -> Record:
    """Train a copy of ``module`` in the plainest way.

    Args:
        module: Has ``training_step``; not changed.
        student: Names of the student's blocks.
        teacher: Names of the teacher's blocks.
        epochs: Batches of each epoch.
        make_optimizer: As ``configure_optimizers``.
        num_microbatches: Micro-batches per call.
        delayed: Whether the teacher is one update late.
        accumulate: Batches per optimizer step.
        after_step: An EMA at the end of each batch.
    """
    module = copy.deepcopy(module)
    optimizer = make_optimizer(module)
    wrapped = {}
    for name in (*student, *teacher):
        parent, _, attribute = name.rpartition(".")
        owner = module.get_submodule(parent)
        wrapped[name] = MicroBatched(getattr(owner, attribute), num_microbatches)
    plain = {name: w.network for name, w in wrapped.items()}
    parameters = dict(module.named_parameters())
    record = Record()
    count = 0
    for batches in epochs:
        for w in wrapped.values():
            w.forget()
        for index, batch in enumerate(batches):
            _install(module, wrapped)
            # In the step, an EMA works on the plain networks: the wrappers share their parameters.
            loss = module.training_step(batch, index)
            _install(module, plain)
            if count % accumulate == 0:
                optimizer.zero_grad()
            (loss / accumulate).backward()
            record.losses.append(loss.detach().clone())
            record.gradients.append(
                {k: p.grad.clone() for k, p in parameters.items() if p.grad is not None}
            )
            if delayed:
                for name in teacher:
                    wrapped[name].remember()
            count += 1
            if count % accumulate == 0:
                optimizer.step()
                if after_step is not None:
                    after_step(module)
    record.weights = {k: v.detach().clone() for k, v in module.state_dict().items()}
    names = {id(p): k for k, p in parameters.items()}
    record.optimizer = {names[id(p)]: dict(s) for p, s in optimizer.state.items()}
    return record


def _install(module: nn.Module, blocks: dict[str, Any]) -> None:
    for name, block in blocks.items():
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, block)
