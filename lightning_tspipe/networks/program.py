"""Atoms, and what they run: a traced network cut into ranges, or a module called as a whole.

Nothing is copied out of the network: whoever swaps a parameter, a buffer or a submodule's
``forward`` changes what the next run does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx, nn

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.networks import cuts
from lightning_tspipe.networks.arguments import Arguments
from lightning_tspipe.networks.codegen import RangeFunction, write_function
from lightning_tspipe.networks.modules import is_leaf, title
from lightning_tspipe.networks.tracing import trace

_MODELESS = frozenset({nn.Sequential, nn.ModuleList, nn.ModuleDict})


@dataclass(frozen=True, slots=True)
class Segment:
    """Contiguous atoms of one program.

    Attributes:
        program: What they belong to.
        start: The first atom.
        stop: One after the last atom.
        num_outputs: How many tensors of a network's return value it emits.
        returns_value: Whether the value it passes on is a network's return value, and emitted.
        parameter_names: The parameters that it reads, named as in the program's module.
        buffer_names: The buffers that it reads.
    """

    program: TracedProgram | LeafProgram
    start: int = 0
    stop: int = 1
    num_outputs: int = 1
    returns_value: bool = True
    parameter_names: tuple[str, ...] = ()
    buffer_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Atom:
    """The smallest part of a network that can be placed.

    Attributes:
        name: For people, for example ``layer1.0.conv1..relu``.
        segments: What it runs.
        parameter_names: The parameters that it reads, named as in the atomized module.
        buffer_names: The buffers that it reads.
        writes_input: Whether it may change its input in place: it must run with the one before.
        passes_input: Whether what it passes on may share memory with its input.
    """

    name: str
    segments: tuple[Segment, ...]
    parameter_names: tuple[str, ...] = ()
    buffer_names: tuple[str, ...] = ()
    writes_input: bool = False
    passes_input: bool = True

    @property
    def num_outputs(self) -> int:
        """How many tensors of a network's return value it emits."""
        return sum(segment.num_outputs for segment in self.segments)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that it reads, as they are now."""
        return [
            segment.program.module.get_parameter(name)
            for segment in self.segments
            for name in segment.parameter_names
        ]

    def buffers(self) -> list[Tensor]:
        """The buffers that it reads, as they are now."""
        return [
            segment.program.module.get_buffer(name)
            for segment in self.segments
            for name in segment.buffer_names
        ]


@dataclass(frozen=True, slots=True, eq=False)
class LeafProgram:
    """A function that is one atom.

    Attributes:
        run: What it runs.
        module: Whose parameters it reads; an empty one where there are none.
    """

    run: RangeFunction
    module: nn.Module

    def function(self, start: int, stop: int) -> RangeFunction:
        """The function of the one atom."""
        del start, stop
        return self.run


def unpacking_atom(arguments: Arguments) -> Atom:
    """What makes the tensors of a call from the one that travels."""
    program = LeafProgram(lambda received: (arguments.unpack(received[0]), ()), nn.Module())
    return Atom("unpack", (Segment(program, num_outputs=0, returns_value=False),))


def function_atom(function: Callable[[Tensor], Tensor], name: str) -> Atom:
    """Make an atom of a function without parameters, such as a ``flatten`` between two modules.

    Args:
        function: What it runs, from one tensor to one tensor.
        name: For people; as in torch, a name that ends in "_" says that it writes its input.
    """
    program = LeafProgram(lambda received: ((function(*received),), ()), nn.Module())
    return Atom(name, (Segment(program),), writes_input=name.endswith("_"))


def module_atom(module: nn.Module) -> Atom:
    """A module that is called as a whole."""
    parameters = tuple(name for name, _ in module.named_parameters())
    buffers = tuple(name for name, _ in module.named_buffers())
    program = LeafProgram(lambda received: ((module(*received),), ()), module)
    segment = Segment(program, parameter_names=parameters, buffer_names=buffers)
    return Atom(
        type(module).__name__,
        (segment,),
        parameters,
        buffers,
        writes_input=bool(getattr(module, "inplace", False)),
        passes_input=not cuts.allocates(module),
    )


class TracedProgram:
    """A traced module, cut into atoms; one trace for each combination of train and eval modes.

    Attributes:
        module: The module.
        atoms: Its atoms.
        first: The trace of the modes in which it was cut.
    """

    def __init__(self, module: nn.Module, name: str, arguments: Arguments) -> None:
        self.module = module
        self._name = name
        self._arguments = arguments
        self._watched = tuple(
            child
            for child in module.modules()
            if (child is module or not is_leaf(child)) and type(child) not in _MODELESS
        )
        self.first = TracedVariant(module, name, arguments)
        self._variants = {self._modes(): self.first}
        self.atoms = tuple(self.first.atom(self, k) for k in range(len(self.first.names)))

    def _modes(self) -> tuple[bool, ...]:
        return tuple([module.training for module in self._watched])

    def function(self, start: int, stop: int) -> RangeFunction:
        """The function that runs atoms ``start`` to ``stop`` (exclusive) in the present modes.

        Raises:
            PartitionError: In these modes the network has other atoms than when it was cut.
        """
        modes = self._modes()
        if modes not in self._variants:
            variant = TracedVariant(self.module, self._name, self._arguments)
            if variant.signature != self.first.signature:
                raise PartitionError(
                    f"{title(self.module, self._name)} does different things in train and eval "
                    "mode, so that one cut cannot serve both; move what depends on `self.training` "
                    "into a submodule of its own, or give the class a method "
                    "`pipeline_blocks(self)` that returns its submodules in the order of forward"
                )
            self._variants[modes] = variant
        return self._variants[modes].function(start, stop)


class TracedVariant:
    """The atoms of one trace, and the functions written for them so far.

    Attributes:
        trace: The trace.
        outputs: For each tensor of the return value: the atom that emits it, its place there.
        names: For each atom the names of the parameters and of the buffers that it reads.
        signature: What two traces must share so that one cut serves both.
    """

    def __init__(self, module: nn.Module, name: str, arguments: Arguments) -> None:
        self.trace = trace(module, name, arguments)
        self._root = module
        self._nodes = cuts.ordered_calls(self.trace)
        leaves = self.trace.leaves
        self._is_plain = self.trace.spec.is_leaf()  # one tensor and nothing around it
        if not leaves or cuts.number_nodes(self._nodes).intersection(leaves):
            raise PartitionError(
                f"{title(module, name)} returns no tensor, or a number that depends on its input; "
                "return tensors and constants only"
            )
        ends = cuts.find_cuts(self.trace, self._nodes, module)
        self._bounds = [0, *(index + 1 for index, _ in ends), len(self._nodes)]
        self._passed = [self.trace.inputs, *(values for _, values in ends)]
        self._passed.append(leaves if self._is_plain else ())
        self._functions: dict[tuple[int, int], RangeFunction] = {}
        self._emitted: list[list[fx.Node]] = [[] for _ in self._bounds[1:]]
        self.outputs = ((len(ends), 0),) if self._is_plain else tuple(map(self._emit, leaves))
        parameters = {id(p): n for n, p in module.named_parameters()}
        buffers = {id(b): n for n, b in module.named_buffers()}
        self.names = [
            (self._names(k, parameters), self._names(k, buffers)) for k in range(len(self._emitted))
        ]
        self.signature = (
            [own for own, _ in self.names],
            self.outputs,
            [len(values) for values in self._passed],
            self.trace.spec,
        )

    def _emit(self, leaf: fx.Node) -> tuple[int, int]:
        if leaf in self.trace.inputs:
            atom = 0
        elif leaf.op == "get_attr":
            atom = len(self._emitted) - 1
        else:
            position = self._nodes.index(leaf)
            atom = sum(bound <= position for bound in self._bounds[1:])
        self._emitted[atom].append(leaf)
        return atom, len(self._emitted[atom]) - 1

    def function(self, start: int, stop: int) -> RangeFunction:
        """The function that runs atoms ``start`` to ``stop`` (exclusive)."""
        if (start, stop) not in self._functions:
            self._functions[start, stop] = write_function(
                self._root,
                self._nodes[self._bounds[start] : self._bounds[stop]],
                received=self._passed[start],
                passed=self._passed[stop],
                emitted=[leaf for leaves in self._emitted[start:stop] for leaf in leaves],
                devices=self.trace.devices,
            )
        return self._functions[start, stop]

    def atom(self, program: TracedProgram, index: int) -> Atom:
        """An atom, as part of a program."""
        nodes = self._calls(index)
        own = set(nodes)
        written = filter(None, map(cuts.written_argument, nodes))
        returns = self._is_plain and index == len(self.names) - 1
        num_outputs = len(self._emitted[index]) + returns
        return Atom(
            _atom_name(nodes),
            (Segment(program, index, index + 1, num_outputs, returns, *self.names[index]),),
            *self.names[index],
            writes_input=any(not cuts.memory_roots(node) <= own for node in written),
            passes_input=any(
                not cuts.memory_roots(value) <= own for value in self._passed[index + 1]
            ),
        )

    def _calls(self, atom: int) -> list[fx.Node]:
        return self._nodes[self._bounds[atom] : self._bounds[atom + 1]]

    def _names(self, atom: int, named: Mapping[int, str]) -> tuple[str, ...]:
        tensors: list[Tensor] = []
        leaves = [leaf for leaf in self._emitted[atom] if leaf.op == "get_attr"]
        for node in self._calls(atom):
            if node.op == "call_module":
                module: nn.Module = node.meta["module"]
                tensors += [*module.parameters(), *module.buffers()]
            leaves += [argument for argument in node.all_input_nodes if argument.op == "get_attr"]
        tensors += [cuts.read_attribute(self._root, leaf) for leaf in leaves]
        return tuple(dict.fromkeys(named[id(t)] for t in tensors if id(t) in named))


def _atom_name(nodes: Sequence[fx.Node]) -> str:
    numbers = cuts.number_nodes(nodes)
    names = [_call_name(node) for node in nodes if node not in numbers] or ["identity"]
    return names[0] if len(names) == 1 else f"{names[0]}..{names[-1].rpartition('.')[2]}"


def _call_name(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    return ".".join(filter(None, (node.meta["scope"], cuts.target_name(node))))
