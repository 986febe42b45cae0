"""The sequential reference: the same mathematics as a pipeline, on one device, in plain lines.

It knows two things of the pipeline, both from the paper (Lim et al., ICML 2022): networks run
micro-batch by micro-batch with BatchNorm's running statistics updated once per call, and with
``delayed`` the teacher is one update late, except in the first batch of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from tests.exactness.setting import Record, Setting, State, gradients_of, loss_of, state_of


class MicroBatched:
    """Runs calls of a network by micro-batches, BatchNorm statistics committed once per call."""

    def __init__(self, network: nn.Module, num_microbatches: int) -> None:
        self._network = network
        self._num_microbatches = num_microbatches
        self._stale: State | None = None
        self._before: State | None = None

    def remember(self, *, predict: bool = False) -> None:
        """From the next call on, use the weights of now: one update late.

        Args:
            predict: Or those that they would become by moving on as they did last.
        """
        now = {k: v.detach().clone() for k, v in self._network.named_parameters()}
        before = self._before if predict and self._before is not None else now
        self._stale = {k: value + (value - before[k]) for k, value in now.items()}
        self._before = now

    def forget(self) -> None:
        """The newest weights again: the pipeline was drained."""
        self._stale = None

    def install(self) -> None:
        """Calls of the network come here."""
        vars(self._network)["forward"] = self._call

    def remove(self) -> None:
        """The network is as it was."""
        del vars(self._network)["forward"]

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self.remove()
        leaves, structure = pytree.tree_flatten((args, kwargs))
        # Tables for all samples are longer.
        number = min(len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())
        split = (self._split(leaf, number) for leaf in leaves)
        parts = list(zip(*split, strict=True))[:number]  # others are empty
        calls = [pytree.tree_unflatten(part, structure) for part in parts]
        output = self._run(args, kwargs) if len(calls) == 1 else self._run_parts(calls)
        self.install()
        return output

    def _split(self, leaf: Any, number: int) -> Sequence[Any]:
        """The parts of what has a row for each of so many samples; others are the same in each."""
        if isinstance(leaf, Tensor) and leaf.shape[:1] == (number,):
            return torch.tensor_split(leaf, self._num_microbatches)
        return [leaf] * self._num_microbatches

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._stale is None:
            return self._network(*args, **kwargs)
        return functional_call(self._network, self._stale, args, kwargs)

    def _run_parts(self, parts: list[Any]) -> Any:
        norms = [m for m in self._network.modules() if isinstance(m, _BatchNorm) and m.training]
        seen: dict[nn.Module, list[Tensor]] = {norm: [] for norm in norms}
        saved = {norm: dict(norm.named_buffers()) for norm in norms}
        for norm in norms:  # micro-batches write to copies
            for name, buffer in saved[norm].items():
                setattr(norm, name, buffer.clone())
        hooks = [
            norm.register_forward_pre_hook(lambda m, args: seen[m].append(args[0].detach()))
            for norm in norms
        ]
        outputs = [self._run(*part) for part in parts]
        for hook in hooks:
            hook.remove()
        for norm in norms:
            for name, buffer in saved[norm].items():
                setattr(norm, name, buffer)
            # One forward over all that it saw: torch's own update of the running statistics.
            with torch.no_grad():
                norm(torch.cat(seen[norm]))
        return pytree.tree_map(
            lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0], *outputs
        )


def run_reference(setting: Setting) -> Record:
    """Train in the plainest way."""
    module = setting.build()
    students = [MicroBatched(module.get_submodule(name), setting.num_microbatches)
                for name in module.student_names]  # fmt: skip
    teachers = [MicroBatched(module.get_submodule(name), setting.num_microbatches)
                for name in module.teacher_names]  # fmt: skip
    late = teachers if setting.schedule == "tspipe" else []
    optimizer = setting.make_optimizer(module)
    parameters = dict(module.named_parameters())
    record, count = Record(), 0
    for batches in setting.epochs(module):
        for teacher in late:
            teacher.forget()
        for index, batch in enumerate(batches):
            with torch.random.fork_rng(), installed([*students, *teachers]):
                torch.manual_seed(count)  # the engine's random stream of this step
                loss = loss_of(module.training_step(batch, index))
            if count % setting.accumulate == 0:
                optimizer.zero_grad()
            (loss / setting.accumulate).backward()  # type: ignore[no-untyped-call]
            record.losses.append(loss.detach().clone())
            record.gradients.append(gradients_of(parameters))
            for teacher in late:
                teacher.remember(predict=setting.predict)
            count += 1
            if count % setting.accumulate == 0:
                optimizer.step()
                module.after_step()
    record.weights = {k: v.detach().clone() for k, v in module.state_dict().items()}
    record.optimizer = state_of(optimizer, parameters)
    return record


@contextmanager
def installed(blocks: Sequence[MicroBatched]) -> Iterator[None]:
    """While inside, calls of the networks run by micro-batches."""
    for block in blocks:
        block.install()
    yield
    for block in blocks:
        block.remove()
