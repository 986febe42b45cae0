"""Blocks of a network that has no list of them: what lies between named boundaries.

The network is traced, and a boundary is where a submodule begins; a block runs the network's own
submodules and parameters, of which names stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.networks.atoms import AtomChain, atomize


class AtomBlock(nn.Module):
    """Some atoms of a network, as a module of one tensor.

    Its submodules, parameters and buffers are the network's: those that the atoms read.

    Args:
        network: The network.
        chain: Its atoms.
        start: The first atom.
        stop: One after the last.
        name: What messages call it.
    """

    def __init__(
        self, network: nn.Module, chain: AtomChain, start: int, stop: int, name: str
    ) -> None:
        super().__init__()
        self._chain = chain
        self._range = start, stop
        self._name = name
        atoms = chain.atoms[start:stop]
        self._read = [
            name for atom in atoms for name in (*atom.parameter_names, *atom.buffer_names)
        ]
        # Beside the registered submodules: the block owns nothing.
        self.__dict__["network"] = network

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Run the atoms.

        Raises:
            ConfigurationError: Several tensors pass the end of the block.
        """
        start, stop = self._range
        values, _ = self._chain.run((x,), start, stop)
        if len(values) != 1:
            raise ConfigurationError(
                f"{self._name} ends where {len(values)} tensors pass on, within a residual block: "
                "name a boundary that only one passes"
            )
        return values[0]

    @override
    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The network's submodules that own what the atoms read, or own nothing."""
        for name, module in self.__dict__["network"].named_modules():
            own = (*module._parameters, *module._buffers)  # noqa: SLF001 - of itself alone
            if not own or any(f"{name}.{key}".lstrip(".") in self._read for key in own):
                yield name, module

    @override
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that the atoms read, each once."""
        found = self.__dict__["network"].named_parameters()
        yield from ((name, parameter) for name, parameter in found if name in self._read)

    @override
    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The buffers that the atoms read, each once."""
        found = self.__dict__["network"].named_buffers()
        yield from ((name, buffer) for name, buffer in found if name in self._read)

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AtomBlock:
        for module in self.modules():
            module._apply(fn, recurse=False)  # noqa: SLF001 - as torch does with submodules
        return self

    @override
    def extra_repr(self) -> str:
        start, stop = self._range
        return ", ".join(atom.name for atom in self._chain.atoms[start:stop])


def blocks_between(
    network: nn.Module, name: str, boundaries: Sequence[str]
) -> list[tuple[str, nn.Module]]:
    """The blocks of a network, with their names.

    Args:
        network: The network.
        name: Of it.
        boundaries: The submodules with which the blocks begin, but for the first.

    Raises:
        ConfigurationError: No block can begin there.
        PartitionError: The network can't be traced.
    """
    atoms = atomize(network, name).atoms
    firsts = [atom.name.partition("..")[0] for atom in atoms]
    starts = [0]
    for boundary in boundaries:
        found = next(
            (i for i, first in enumerate(firsts) if f"{first}.".startswith(f"{boundary}.")), None
        )
        if found is None or found <= starts[-1]:
            raise ConfigurationError(_refusal(name, network, boundary, boundaries, firsts))
        starts.append(found)
    chain = AtomChain(atoms)
    names = [firsts[0].partition(".")[0], *boundaries]
    return [
        (f"{name}.{key}", AtomBlock(network, chain, start, stop, f"block {i} of the {name}"))
        for i, (key, (start, stop)) in enumerate(
            zip(names, pairwise((*starts, len(atoms))), strict=True)
        )
    ]


def _refusal(
    name: str,
    network: nn.Module,
    boundary: str,
    boundaries: Sequence[str],
    firsts: Sequence[str],
) -> str:
    known = {module for module, _ in network.named_modules()}
    possible = [first for first in firsts[1:] if first in known]
    why = "in their order" if boundary in known else f"and it has no submodule {boundary!r}"
    return (
        f"block_boundaries of the {name}, {list(boundaries)}: no block can begin with "
        f"{boundary!r}. Name submodules of {type(network).__name__} with which an atom begins, "
        f"{why}: for example {', '.join(possible[:12])}"
    )
