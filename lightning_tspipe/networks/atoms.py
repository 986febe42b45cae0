"""Runs of atoms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.networks.codegen import RangeFunction, Tensors
from lightning_tspipe.networks.program import Atom, OutputRef, Program


class AtomChain:
    """Runs ranges of a network's atoms, each range as one function.

    Args:
        atoms: The first atoms of the network, or all.
        compiler: Makes faster functions of those that run.

    Attributes:
        atoms: The atoms.
        program: The network that they are parts of.
    """

    def __init__(
        self,
        atoms: Sequence[Atom],
        compiler: Callable[[RangeFunction], RangeFunction] | None = None,
    ) -> None:
        self.atoms = tuple(atoms)
        program = self.atoms[0].program
        assert program is not None, f"{self.atoms[0].name} is no part of one network"
        self.program: Program = program
        self._compiler = compiler
        self._emitted = cache(self._emits)

    def run(
        self, received: Tensors, start: int, stop: int
    ) -> tuple[Tensors, dict[OutputRef, Tensor]]:
        """Run the atoms from ``start`` up to, not including, ``stop``.

        Args:
            received: What atom ``start`` gets, of any shapes that it takes; the first one gets the
                tensors of a call packed into one.
            start: The first atom.
            stop: One after the last.

        Returns:
            What the next atom gets (nothing behind the last atom of a network that returns a
            structure), and the outputs.

        Raises:
            PartitionError: A module passed on something that is no tensor.
        """
        if start == 0:
            received = self.program.arguments.unpack(received[0])
        function = self.program.function(start, stop, received)
        if self._compiler is not None:
            function = self._compiler(function)
        # What fails within a function may leave gradients switched off.
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            values, emitted = function(received)
        for value in values:
            if not isinstance(value, Tensor):
                raise PartitionError(
                    f"{self.atoms[stop - 1].name} passes on a {type(value).__name__}, and only "
                    "tensors can be sent between stages; put it and the module that reads its "
                    "result into one module without `pipeline_blocks`"
                )
        # A network's one tensor is passed on, and emitted.
        return values, dict(zip(self._emitted(start, stop), (*emitted, *values), strict=False))

    def _emits(self, start: int, stop: int) -> list[OutputRef]:
        """The outputs of some atoms, in order."""
        return [
            OutputRef(atom, slot)
            for atom in range(start, stop)
            for slot in range(self.atoms[atom].num_outputs)
        ]
