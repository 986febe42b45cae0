"""A network in two: its frozen beginning, and the rest that is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.networks.arguments import Arguments, tensors_of
from lightning_tspipe.networks.program import Program

Middle = tuple[tuple[Tensor, ...], dict[str, Tensor]]
"""What passes on between two atoms, and the parts of the return value that are known there."""


def num_frozen(atoms: Iterable[Sequence[bool]]) -> int:
    """Atoms up to the last one with a frozen parameter, and before the first one that is trained.

    What follows it without parameters may be random (dropout), and belongs to the next layer.

    Args:
        atoms: For each atom, whether each of its parameters is frozen.
    """
    last = 0
    for number, frozen in enumerate(atoms, start=1):
        if not all(frozen):
            break
        if frozen:
            last = number
    return last


class DividedNetwork:
    """Runs the atoms of a network in pieces, for instance the frozen ones apart.

    Args:
        network: The network.
        name: What messages call it.
        args: Of a call, by position.
        kwargs: Of a call, by keyword.

    Attributes:
        atoms: Its atoms.

    Raises:
        PartitionError: It can't be cut.
    """

    def __init__(
        self, network: nn.Module, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._arguments = Arguments.of(args, kwargs)
        self._name = name
        self._program = Program(network, name, self._arguments)
        self.atoms = self._program.atoms

    def start(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Middle:
        """What is in front of the first atom in a call.

        Raises:
            ConfigurationError: The call is unlike the first one.
        """
        now = Arguments.of(args, kwargs)
        if not self._arguments.takes(now):
            raise ConfigurationError(
                f"{self._name} was called with {self._arguments} and now with {now}: cached layers "
                "must be called in one way"
            )
        return (now.pack(tensors_of(args, kwargs)),), {}

    def num_frozen(self) -> int:
        """Atoms at the beginning that are frozen."""
        return num_frozen([not p.requires_grad for p in atom.parameters()] for atom in self.atoms)

    def piece(self, start: int, stop: int) -> Callable[[Middle], Middle]:
        """The atoms from ``start`` up to, not including, ``stop``, as one function."""

        def run(middle: Middle) -> Middle:
            values, known = middle
            if start == stop:
                return middle
            passed, found = self._program.run(values, start, stop)
            return passed, known | {str(ref): tensor for ref, tensor in found.items()}

        return run

    def end(self, middle: Middle) -> Any:
        """The return value, behind the last atom."""
        _, known = middle
        leaves = [known[str(ref)] for ref in self._program.outputs]
        return pytree.tree_unflatten(leaves, self._program.output_spec)
