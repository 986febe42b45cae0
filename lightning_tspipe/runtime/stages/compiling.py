"""Stages through ``torch.compile``, where a compiler is at hand."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from lightning_tspipe.networks.codegen import RangeFunction, Tensors

_MAX_WORDS = 40

log = logging.getLogger("lightning_tspipe")


class Compiler:
    """Compiles functions when they run first; if that fails, they run as they are.

    Args:
        options: Arguments of ``torch.compile``.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._compiled = cache(self._guarded)
        self._failed = False

    def __call__(self, function: RangeFunction) -> RangeFunction:
        """The compiled function."""
        return function if self._failed else self._compiled(function)

    def _guarded(self, function: RangeFunction) -> RangeFunction:
        compiled = torch.compile(function, **self._options)

        def run(received: Tensors) -> tuple[Tensors, Tensors]:
            if self._failed:
                return function(received)
            try:
                with warnings.catch_warnings():
                    # It looks at the gradients of what it is given.
                    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
                    return compiled(received)
            except torch._dynamo.exc.TorchDynamoException as error:  # noqa: SLF001 - loaded when needed
                self._failed = True
                log.warning(
                    "torch.compile failed (%s); the stages run as they are. Leave compile out, or "
                    "choose another backend: TSPipeStrategy(compile={'backend': 'aot_eager'})",
                    " ".join(str(error).split()[:_MAX_WORDS]),
                )
                return function(received)

        return run
