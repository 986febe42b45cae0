"""Networks of blocks, teacher beside student, as blockwise distillation trains them.

A network that has no list of its blocks is recorded, and divided between named boundaries: where a
submodule begins. Such a block runs the network's own submodules and parameters, of which names stay
what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.networks import swap
from lightning_tspipe.networks.arguments import Arguments
from lightning_tspipe.networks.fakes import Fakes
from lightning_tspipe.networks.modules import blocks_of
from lightning_tspipe.networks.program import Program
from lightning_tspipe.random_states import random_stream

BlockLoss = Callable[[Tensor, Tensor, int, Any], Tensor]


@dataclass(frozen=True)
class BlockPair:
    """A block of the teacher and the student's block that learns to do the same.

    Attributes:
        index: Its number.
        name: The student's block, by its dotted name.
        teacher_name: The teacher's.
        teacher: The teacher's block.
        student: The student's.
    """

    index: int
    name: str
    teacher_name: str
    teacher: nn.Module
    student: nn.Module

    @property
    def has_batchnorm(self) -> bool:
        """Whether the student's block normalises by the batch."""
        return any(isinstance(child, _BatchNorm) for child in self.student.modules())


Boundaries = Mapping[str, Sequence[str]]
"""For a network by its name, the submodules with which its blocks begin, but for the first."""


def pair_blocks(
    module: nn.Module, x: Tensor, boundaries: Boundaries | None = None
) -> tuple[BlockPair, ...]:
    """The blocks of a module's teacher and student.

    Args:
        module: Has both networks.
        x: What the first block gets, of a batch.
        boundaries: Of networks that have no list of their blocks.

    Raises:
        ConfigurationError: One is missing or has no blocks, or they have different numbers.
    """
    given: Any = boundaries if boundaries is not None else {}  # what a user has written
    if not isinstance(given, Mapping) or not {"teacher", "student"}.issuperset(given):
        raise ConfigurationError(
            f"block_boundaries={given!r}: write {{'teacher': [...], 'student': [...]}}, with the "
            "names of the submodules at which each network's blocks begin, except the first"
        )
    teachers, students = (
        _named_blocks(module, name, x, given.get(name)) for name in ("teacher", "student")
    )
    if len(teachers) != len(students):
        raise ConfigurationError(
            f"the teacher has {len(teachers)} blocks and the student {len(students)}: block i "
            "of the student learns from block i of the teacher. Group layers in an "
            "nn.Sequential so that there are equally many, or name equally many block_boundaries"
        )
    return tuple(
        BlockPair(index, name, teacher_name, one, other)
        for index, ((teacher_name, one), (name, other)) in enumerate(
            zip(teachers, students, strict=True)
        )
    )


def _named_blocks(
    module: nn.Module, name: str, x: Tensor, boundaries: Sequence[str] | None
) -> list[tuple[str, nn.Module]]:
    network = getattr(module, name, None)
    if not isinstance(network, nn.Module):
        raise ConfigurationError(
            f"{type(module).__name__} has no network `{name}`: blockwise distillation needs a "
            "`teacher` and a `student`, each an nn.Sequential or nn.ModuleList of its blocks"
        )
    if boundaries is not None:
        return blocks_between(network, name, x, boundaries)
    if isinstance(network, nn.Sequential | nn.ModuleList):
        found = [(f"{name}.{key}", child) for key, child in network.named_children()]
    else:
        names = {child: path for path, child in network.named_modules()}
        found = [(f"{name}.{names[b]}", b) for b in blocks_of(network) or ()]
    if not found:
        raise ConfigurationError(
            f"the {name} ({type(network).__name__}) has no blocks: make it an nn.Sequential or "
            "nn.ModuleList of them, name the submodules with which they begin "
            f"(block_boundaries = {{{name!r}: [...]}}), or give it a method pipeline_blocks() that "
            "returns them in the order in which they are called"
        )
    return found


class AtomBlock(nn.Module):
    """Some atoms of a network, as a module of one tensor.

    Its submodules, parameters and buffers are the network's: those that the atoms read.

    Args:
        program: The network.
        start: The first atom.
        stop: One after the last.
        name: What messages call it.
    """

    def __init__(self, program: Program, start: int, stop: int, name: str) -> None:
        super().__init__()
        self._program = program  # which is no submodule: the block owns nothing
        self._range = start, stop
        self._name = name
        atoms = program.atoms[start:stop]
        self._read = [name for atom in atoms for name in atom.tensor_names]

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Run the atoms.

        Raises:
            ConfigurationError: Several tensors pass the end of the block.
        """
        start, stop = self._range
        values, _ = self._program.run((x,), start, stop)
        if len(values) != 1:
            raise ConfigurationError(
                f"{self._name} ends where {len(values)} tensors are passed on, in a residual "
                "block: name a boundary that only one tensor crosses"
            )
        return values[0]

    @override
    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The network's submodules that own what the atoms read, or own nothing."""
        for name, module in self._program.module.named_modules():
            own = (*module._parameters, *module._buffers)  # noqa: SLF001 - of itself alone
            if not own or any(f"{name}.{key}".lstrip(".") in self._read for key in own):
                yield name, module

    @override
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that the atoms read, each once."""
        found = self._program.module.named_parameters()
        yield from ((name, parameter) for name, parameter in found if name in self._read)

    @override
    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The buffers that the atoms read, each once."""
        found = self._program.module.named_buffers()
        yield from ((name, buffer) for name, buffer in found if name in self._read)

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AtomBlock:
        for module in self.modules():
            module._apply(fn, recurse=False)  # noqa: SLF001 - as torch does with submodules
        return self

    @override
    def extra_repr(self) -> str:
        start, stop = self._range
        return ", ".join(atom.name for atom in self._program.atoms[start:stop])


def blocks_between(
    network: nn.Module, name: str, x: Tensor, boundaries: Sequence[str]
) -> list[tuple[str, nn.Module]]:
    """The blocks of a network, with their names.

    Args:
        network: The network.
        name: Of it.
        x: What it gets, of a batch.
        boundaries: The submodules with which the blocks begin, but for the first.

    Raises:
        ConfigurationError: No block can begin there.
        PartitionError: The network can't be recorded.
    """
    program = Program(network, name, Arguments.of((x,), {}))
    atoms = program.atoms
    firsts = [atom.name.partition("..")[0] for atom in atoms]
    starts = [0]
    for boundary in boundaries:
        found = next(
            (i for i, first in enumerate(firsts) if f"{first}.".startswith(f"{boundary}.")), None
        )
        if found is None or found <= starts[-1]:
            known = {module for module, _ in network.named_modules()}
            possible = [first for first in firsts[1:] if first in known]
            why = "in their order" if boundary in known else f"and it has no submodule {boundary!r}"
            raise ConfigurationError(
                f"block_boundaries of the {name}, {list(boundaries)}: no block can begin with "
                f"{boundary!r}. Name submodules of {type(network).__name__} at which an atom "
                f"begins, {why}: for example {', '.join(possible[:12])}"
            )
        starts.append(found)
    names = [firsts[0].partition(".")[0], *boundaries]
    return [
        (f"{name}.{key}", AtomBlock(program, start, stop, f"block {i} of the {name}"))
        for i, (key, (start, stop)) in enumerate(
            zip(names, pairwise((*starts, len(atoms))), strict=True)
        )
    ]


@dataclass(frozen=True)
class BlockOutcome:
    """What a block's loss is on this rank.

    Attributes:
        loss: With its graph, or what stands for it, weighed by the rank's share of the batch: the
            ranks' losses and gradients add up to those of the whole batch.
        value: The mean over this rank's samples, without a graph.
        samples: How many these are.
    """

    loss: Tensor
    value: Tensor
    samples: int


@dataclass(frozen=True)
class BlockShapes:
    """What flows between the blocks, for one sample.

    Attributes:
        inputs: For each block what it gets, and behind the last what it returns: shapes without the
            batch dimension, and types.
        fields: For each block the leaves of the batch that its loss reads.
    """

    inputs: tuple[TensorSpec, ...]
    fields: tuple[tuple[int, ...], ...]

    def input_spec(self, block: int, samples: int) -> TensorSpec:
        """What ``block`` gets of so many samples."""
        spec = self.inputs[block]
        return replace(spec, shape=(samples, *spec.shape))


def infer_shapes(
    pairs: Sequence[BlockPair],
    block_loss: BlockLoss,
    x: Tensor,
    batch: Any,
    context: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> BlockShapes:
    """Send shapes through all blocks, without values.

    Args:
        pairs: The blocks.
        block_loss: The loss, to see what it reads of the batch.
        x: What the first block gets, of a batch.
        batch: That batch.
        context: The precision plugin's forward context.

    Raises:
        ConfigurationError: A block of the student returns other shapes than the teacher's, the
            batch dimension gets lost, or a block changes its input.
    """
    fake = Fakes(x.device)
    modules = [m for pair in pairs for b in (pair.teacher, pair.student) for m in b.modules()]

    def make(tensor: Tensor) -> Tensor:
        with fake:
            return TensorSpec.of(tensor).empty(x.device)

    specs, fields = [_per_sample(x, len(x), "the input")], []
    leaves, structure = pytree.tree_flatten(batch)
    shadows = [make(leaf.detach()) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    whole = pytree.tree_unflatten(shadows, structure)
    with swap.without_values(modules, make), random_stream(None):
        value = make(x.detach())
        for pair in pairs:
            with fake, context():
                with torch.no_grad():
                    target = _run(pair.teacher, f"{pair.index} ({pair.teacher_name})", value)
                output = _run(pair.student, f"{pair.index} ({pair.name})", value)
            _check_shapes(pair, output, target)
            specs.append(_per_sample(target, len(x), f"block {pair.index} ({pair.name})"))
            with fake, context():
                fields.append(_fields_read(block_loss, output, target, pair.index, whole))
            value = target
    return BlockShapes(tuple(specs), tuple(fields))


def _run(block: nn.Module, title: str, value: Tensor) -> Any:
    before = value._version  # noqa: SLF001 - what autograd counts
    result = block(value)
    if value._version > before:  # noqa: SLF001
        raise ConfigurationError(
            f"block {title} changes its input in place, which other blocks need too: set "
            "inplace=False in its first layer"
        )
    return result


def _check_shapes(pair: BlockPair, output: Any, target: Any) -> None:
    for value, network in ((target, "teacher"), (output, "student")):
        if not isinstance(value, Tensor):
            raise ConfigurationError(
                f"block {pair.index} of the {network} returns {type(value).__name__}: blocks take "
                "and return one tensor"
            )
    if output.shape != target.shape:
        raise ConfigurationError(
            f"block {pair.index} ({pair.name}): the student returns shape {tuple(output.shape)} "
            f"and the teacher {tuple(target.shape)}. The student's next block would get the "
            "teacher's output, so both must agree: change the channels or strides of that block"
        )


def _per_sample(tensor: Tensor, samples: int, what: str) -> TensorSpec:
    if tensor.dim() == 0 or len(tensor) != samples:
        raise ConfigurationError(
            f"{what} has shape {tuple(tensor.shape)} for {samples} samples: its first dimension "
            "must be the batch"
        )
    spec = TensorSpec.of(tensor)
    return replace(spec, shape=spec.shape[1:], requires_grad=False)


class _Watch(TorchFunctionMode):
    """Notes which of some tensors are read."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        super().__init__()
        self._places = {id(leaf): i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        self.read: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = {self._places.get(id(leaf)) for leaf in pytree.tree_leaves((args, kwargs))}
        self.read |= {place for place in found if place is not None}
        return func(*args, **(kwargs or {}))


def _fields_read(
    block_loss: BlockLoss, output: Tensor, target: Tensor, index: int, batch: Any
) -> tuple[int, ...]:
    leaves = pytree.tree_leaves(batch)
    watch = _Watch(leaves)
    try:
        with watch:
            block_loss(output, target, index, batch)
    except ConfigurationError:
        raise
    except Exception:  # noqa: BLE001 - what a loss does with values can't be foreseen
        # Without values it can't be followed: then it may read everything.
        return tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    return tuple(sorted(watch.read))
