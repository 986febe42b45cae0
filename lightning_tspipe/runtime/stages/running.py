"""How a rank runs its atoms: as they are, compiled, in pieces, or once more in the backward.

Of atoms that run again only the input is kept (Chen et al., *Training Deep Nets with Sublinear
Memory Cost*, 2016); neighbours run again together::

    forward    x ──► a0 ──► a1 ──► a2 ──► y        kept: x, and what a2 saves
                     └─ again ─┘
    backward   x ──► a0 ──► a1, then their backward
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.networks.atoms import AtomChain, OutputRef
from lightning_tspipe.networks.batchnorm import DeferredStatistics
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.planning.placement import WHOLE, Pieces

Ran = tuple[Tensors, dict[OutputRef, Tensor]]
Run = Callable[[Tensors, int, int], Ran]
"""Runs the atoms from one up to, not including, another one; as ``AtomChain.run``."""


class Execution:
    """Runs ranges of one network.

    Args:
        chain: Its atoms.
        blocks: Its modules by name.
        statistics: Its deferred BatchNorm statistics.
        again: The atoms that run again in the backward.
        pieces: The first atoms that run on pieces of a batch, and into how many. Behind the last of
            them tensors have a row per sample, and before it nothing is emitted.
    """

    def __init__(
        self,
        chain: AtomChain,
        blocks: dict[str, nn.Module],
        statistics: DeferredStatistics,
        again: Collection[int] = (),
        pieces: Pieces = WHOLE,
    ) -> None:
        self._pieces = pieces
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
        last = self._pieces.num_atoms
        if start > 0 or not 0 < last <= stop:  # not all of those: in an evaluation
            return self._run(received, start, stop)
        parts = zip(*(tensor.chunk(self._pieces.number) for tensor in received), strict=True)
        done = [self._run(part, start, last)[0] for part in parts]
        values = tuple(torch.cat(column) for column in zip(*done, strict=True))
        return self._run(values, last, stop) if last < stop else (values, {})

    def _run(self, received: Tensors, start: int, stop: int) -> Ran:
        if not self._again or not torch.is_grad_enabled():
            return self._chain.run(received, start, stop)
        if (start, stop) not in self._ranges:
            groups = groupby(range(start, stop), self._again.__contains__)
            found = [(again, list(atoms)) for again, atoms in groups]
            self._ranges[start, stop] = [(a[0], a[-1] + 1, again) for again, a in found]
        values = received
        outputs: dict[OutputRef, Tensor] = {}
        for first, last, again in self._ranges[start, stop]:
            run = self._run_again if again else self._chain.run
            values, new = run(values, first, last)
            outputs |= new
        return values, outputs

    def _run_again(self, received: Tensors, first: int, last: int) -> Ran:
        def run(*tensors: Tensor) -> Ran:
            return self._chain.run(tensors, first, last)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            # Around the forward, and around its repetition, which must not count twice.
            return nullcontext(), self._statistics.ignored()

        before = self._versions()
        result: Ran = checkpoint(run, *received, use_reentrant=False, context_fn=contexts)
        for (name, key), version in self._versions().items():
            if version != before.get((name, key)):
                raise ConfigurationError(
                    f"{name} ({type(self._stateful[name]).__name__}) changes its buffer {key!r} "
                    "whenever it runs, and with activation_checkpointing it runs twice. Name the "
                    "atoms that may: TSPipeStrategy(activation_checkpointing=[...])"
                )
        return result

    def _versions(self) -> dict[tuple[str, str], tuple[int, int]]:
        """What differs, of each buffer by its module and name, when it was written to."""
        return {
            (name, key): (id(buffer), buffer._version)  # noqa: SLF001
            for name, module in self._stateful.items()
            for key, buffer in module._buffers.items()  # noqa: SLF001
            if buffer is not None
        }
