"""How a rank runs its atoms: as they are, compiled, in pieces, or once more in the backward.

Of atoms that run again only the input is kept (Chen et al., *Training Deep Nets with Sublinear
Memory Cost*, 2016); neighbours run again together::

    forward    x ──► a0 ──► a1 ──► a2 ──► y        kept: x, and what a2 saves
                     └─ again ─┘
    backward   x ──► a0 ──► a1, then their backward
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.networks.batchnorm import DeferredStatistics
from lightning_tspipe.networks.chain import AtomChain
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.planning.pieces import Pieces

Ran = tuple[Tensors, list[tuple[int, int, Tensor]]]
Run = Callable[[Tensors, int, int], Ran]
"""Runs the atoms from one up to, not including, another one; as ``AtomChain.run``."""


class InPieces:
    """Runs the first atoms on pieces of a batch, and the others on the whole.

    Args:
        run: Runs any.
        pieces: Which, and into how many. Behind the last of them tensors have a row per sample,
            and before it nothing is emitted.
    """

    def __init__(self, run: Run, pieces: Pieces) -> None:
        self._run = run
        self._pieces = pieces

    def run(self, received: Tensors, start: int, stop: int) -> Ran:
        """Run the atoms from ``start`` up to, not including, ``stop``; as ``AtomChain.run``."""
        last = min(stop, self._pieces.num_atoms)
        if start > 0 or last < self._pieces.num_atoms:  # not all of them: in an evaluation
            return self._run(received, start, stop)
        parts = zip(*(tensor.chunk(self._pieces.number) for tensor in received), strict=True)
        done = [self._run(part, start, last)[0] for part in parts]
        values = tuple(torch.cat(column) for column in zip(*done, strict=True))
        return self._run(values, last, stop) if last < stop else (values, [])


class Execution:
    """Runs ranges of one network.

    Args:
        chain: Its atoms.
        blocks: Its modules by name.
        statistics: Its deferred BatchNorm statistics.
        again: The atoms that run again in the backward.
    """

    def __init__(
        self,
        chain: AtomChain,
        blocks: dict[str, nn.Module],
        statistics: DeferredStatistics,
        again: Collection[int] = (),
    ) -> None:
        self._chain = chain
        self._statistics = statistics
        self._again = frozenset(again)
        self._stateful = {
            f"{name}.{path}".rstrip("."): child
            for name, block in blocks.items()
            for path, child in block.named_modules()
            if child._buffers and not isinstance(child, _BatchNorm)  # noqa: SLF001
        }
        self._ranges: dict[tuple[int, int], list[tuple[int, int, bool]]] = {}

    def run(self, received: Tensors, start: int, stop: int) -> Ran:
        """Run the atoms from ``start`` up to, not including, ``stop``; as ``AtomChain.run``."""
        if not self._again or not torch.is_grad_enabled():
            return self._chain.run(received, start, stop)
        ranges = self._ranges.get((start, stop))
        if ranges is None:
            ranges = self._ranges[start, stop] = list(self._divided(start, stop))
        values = received
        found: list[tuple[int, int, Tensor]] = []
        for first, last, again in ranges:
            run = self._run_again if again else self._chain.run
            values, new = run(values, first, last)
            found += new
        return values, found

    def _divided(self, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
        first = start
        for atom in range(start, stop):
            again = atom in self._again
            if atom + 1 == stop or (atom + 1 in self._again) != again:
                yield first, atom + 1, again
                first = atom + 1

    def _run_again(self, received: Tensors, first: int, last: int) -> Ran:
        def run(*tensors: Tensor) -> Ran:
            return self._chain.run(tensors, first, last)

        before = self._versions()
        result: Ran = checkpoint(run, *received, use_reentrant=False, context_fn=self._contexts)
        if self._stateful:
            self._check_unchanged(before)
        return result

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Around the forward, and around its repetition, which must not count twice."""
        return nullcontext(), self._statistics.ignored()

    def _versions(self) -> list[tuple[int, int]]:
        buffers = (b for module in self._stateful.values() for b in module._buffers.values())  # noqa: SLF001
        return [(id(b), b._version) for b in buffers if b is not None]  # noqa: SLF001

    def _check_unchanged(self, before: list[tuple[int, int]]) -> None:
        if self._versions() == before:
            return
        known = set(before)
        for name, module in self._stateful.items():
            for key, buffer in module._buffers.items():  # noqa: SLF001
                if buffer is not None and (id(buffer), buffer._version) not in known:  # noqa: SLF001
                    raise ConfigurationError(
                        f"{name} ({type(module).__name__}) changes its buffer {key!r} whenever it "
                        "runs, and with activation_checkpointing it runs twice. Name the atoms "
                        "that may: TSPipeStrategy(activation_checkpointing=[...])"
                    )
